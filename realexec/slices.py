"""Fine-grained experts: slices of one dense FFN, matched to the router's clusters.

The FFN's neurons are dealt out to the experts, the same number to each, so that a neuron belongs to an expert
that is chosen when the neuron has much to say. Only K of J slices run, and with weights that sum to 1, so the
chosen ones must stand in for the rest: the down projections are fitted anew, by ridge regression of the dense
FFN's output on what the chosen slices compute, times their weights. It is drawn towards the plain down
projection times one factor, the best one for the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment
from scipy.special import expit

from .clustering import Floats, choose
from .dense import Ffn

RIDGE = 0.3
"""Pull towards the plain down projection, over the mean square of a neuron's weighted output. Chosen on
prompts held out: smaller ones fit the prompts at hand better and others worse."""


@dataclass(frozen=True)
class SlicedFfn:
    """Experts in order, and how far their weighted sum is from the dense output, relative to it, on the
    inputs."""

    experts: list[Ffn]
    error: float


def slice_ffn(ffn: Ffn, inputs: Floats, router: Floats, top_k: int) -> SlicedFfn:
    """Cut an FFN into len(router) slices for the router [J, h], fitted on `inputs` [n, h]."""
    experts = len(router)
    chosen, weights = choose(inputs @ router.T, top_k)
    spread = np.zeros((len(inputs), experts), dtype=np.float32)
    np.put_along_axis(spread, chosen, weights, axis=1)
    neurons = neuron_outputs(ffn, inputs)
    owner = deal_out(np.square(neurons) * np.square(ffn.down).sum(axis=0), spread > 0)
    target = neurons @ ffn.down.T
    weighted = neurons * spread[:, owner]
    down = _fitted_down(ffn.down, weighted, target)
    error = float(np.linalg.norm(weighted @ down.T - target) / max(float(np.linalg.norm(target)), 1e-12))
    places = [np.flatnonzero(owner == expert) for expert in range(experts)]
    return SlicedFfn([Ffn(ffn.gate[own], ffn.up[own], down[:, own]) for own in places], error)


def neuron_outputs(ffn: Ffn, inputs: Floats) -> Floats:
    """silu(gate·x) * (up·x) [n, i] for inputs [n, h]."""
    gate = inputs @ ffn.gate.T
    outputs: Floats = gate * expit(gate) * (inputs @ ffn.up.T)
    return outputs


def deal_out(energy: Floats, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """The expert [i] of each neuron, i/J neurons to each, for which most of `energy` [n, i] falls on tokens
    that chose the neuron's expert (`chosen` [n, J])."""
    experts, neurons = chosen.shape[1], energy.shape[1]
    seats = np.repeat(np.arange(experts), neurons // experts)
    gain = chosen.astype(np.float32).T @ energy
    rows, columns = linear_sum_assignment(gain[seats], maximize=True)
    owner = np.empty(neurons, dtype=np.intp)
    owner[columns] = seats[rows]
    return owner


def _fitted_down(down: Floats, weighted: Floats, target: Floats) -> Floats:
    """argmin over D of ‖weighted·Dᵀ − target‖² + ridge·‖D − factor·down‖²."""
    features = weighted.astype(np.float64)
    plain = features @ down.T
    factor = float(np.sum(plain * target) / max(float(np.sum(plain * plain)), 1e-12))
    gram = features.T @ features
    ridge = RIDGE * max(float(np.trace(gram)) / len(gram), 1e-12)
    gram[np.diag_indices_from(gram)] += ridge
    fitted = np.linalg.solve(gram, features.T @ target + ridge * factor * down.T)
    rows: Floats = fitted.T.astype(np.float32)
    return rows

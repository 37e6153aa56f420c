"""What a model's routing looks like request by request: entropy, load, repetition, likeness of pairs.

n is a number of iterations, L of layers, J of experts per layer, N of requests. Rows are gate rows; a chosen
expert is one that an iteration's tokens activated. Only decode iterations are measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .routing_stats import Chosen, entropy_bits, top_k_mask

Floats = npt.NDArray[np.float32]

AGGREGATED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of consecutive iterations whose rows are averaged before their entropy is taken; each divides the
last."""
BINS = 10


class Aggregated(msgspec.Struct, frozen=True):
    """Entropy in bits, mean over layers and windows, of the mean row of `iterations` consecutive ones."""

    iterations: int
    windows: int
    bits: float


class Entropy(msgspec.Struct, frozen=True):
    """Entropy in bits per layer: `fine` of an iteration's row, `coarse` of a request's mean row."""

    fine: list[float]
    coarse: list[float]
    most: float
    aggregated: list[Aggregated]


class Likeness(msgspec.Struct, frozen=True):
    """How well similarity of two requests tells the share of experts that they have in common.

    search     "trajectory": cosine of gate rows; "semantic": cosine of embeddings
    level      "iteration": one decode iteration drawn per request; "request": its mean row, its K most used
               experts per layer, and the embedding of its first iteration
    pairs      Pearson coefficient over all pairs of requests
    requests   Pearson coefficient over requests, each the mean over its pairs
    curve      mean (similarity, hit) of ten equal shares of the pairs, by similarity
    points     (similarity, hit) of each request, the mean over its pairs
    """

    search: str
    level: str
    pairs: float
    requests: float
    curve: list[tuple[float, float]]
    points: list[tuple[float, float]]


def first_decode(prefill: str) -> int:
    """Number of the first decode iteration of a request: 0 where the trace has no prefill, else 1."""
    return 0 if prefill == "none" else 1


@dataclass(eq=False)
class Patterns:
    """Sums over the requests read so far; `add` takes one request's decode iterations."""

    layers: int
    experts: int
    fine: npt.NDArray[np.float64] = field(init=False)
    coarse: npt.NDArray[np.float64] = field(init=False)
    loads: npt.NDArray[np.int64] = field(init=False)
    windows: dict[int, tuple[int, float]] = field(init=False, default_factory=dict)
    iterations: int = field(init=False, default=0)
    requests: int = field(init=False, default=0)
    repeated: int = field(init=False, default=0)
    repeatable: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.fine, self.coarse = np.zeros(self.layers), np.zeros(self.layers)
        self.loads = np.zeros((self.layers, self.experts), np.int64)

    def add(self, gate: npt.NDArray[np.float16], chosen: Chosen) -> None:
        """Rows [n, L, J] and activated experts of one request's n decode iterations."""
        if len(gate) == 0:
            return
        self.iterations += len(gate)
        self.requests += 1
        self.coarse += entropy_bits(gate.mean(axis=0, dtype=np.float32, keepdims=True))
        for start in range(0, len(gate), AGGREGATED[-1]):  # no window crosses the end of a part
            self._add_part(gate[start : start + AGGREGATED[-1]].astype(np.float32))
        self.loads += chosen.sum(axis=0)
        self.repeated += int((chosen[1:] & chosen[:-1]).sum())
        self.repeatable += int(chosen[1:].sum())

    def _add_part(self, rows: Floats) -> None:
        self.fine += entropy_bits(rows) * len(rows)
        for length in AGGREGATED:
            count = len(rows) // length
            if count:
                means = rows[: count * length].reshape(count, length, self.layers, self.experts).mean(axis=1)
                windows, bits = self.windows.get(length, (0, 0.0))
                found = float(entropy_bits(means).mean())
                self.windows[length] = (windows + count, bits + found * count)

    def entropy(self) -> Entropy:
        """Of everything added."""
        return Entropy(
            fine=(self.fine / self.iterations).tolist(),
            coarse=(self.coarse / self.requests).tolist(),
            most=float(np.log2(self.experts)),
            aggregated=[Aggregated(n, count, bits / count) for n, (count, bits) in self.windows.items()],
        )

    def previous_overlap(self) -> float | None:
        """Share of activations that the same layer also had one iteration earlier; None without such."""
        return self.repeated / self.repeatable if self.repeatable else None

    def busiest(self) -> list[float]:
        """Per layer, the busiest expert's share of the activations over an even share, ≥ 1."""
        shares = self.loads / self.loads.sum(axis=1, keepdims=True)
        return [float(share) * self.experts for share in shares.max(axis=1)]

    def balance(self) -> list[float]:
        """Per layer, the entropy of the experts' loads over that of even loads, at most 1."""
        if self.experts == 1:
            return [1.0] * self.layers
        most = float(np.log2(self.experts))
        return [float(bits) / most for bits in entropy_bits(self.loads[None].astype(np.float64))]


def most_used(counts: npt.NDArray[np.int64], top_k: int) -> Chosen:
    """The K most used experts of each layer, bool [..., L, J]; equal counts: the lower expert."""
    return top_k_mask(counts.astype(np.float64), top_k)


def likeness(
    search: str, level: str, vectors: npt.NDArray[Any], chosen: Chosen, *, with_points: bool
) -> Likeness | None:
    """Of all pairs of requests: `vectors` [N, F] are compared, `chosen` [N, L, J] are their experts.

    None where similarity or hits are all alike, so that no coefficient exists.
    """
    count = len(vectors)
    if count < 3:
        return None
    flat = vectors.reshape(count, -1).astype(np.float32)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    flat = np.divide(flat, norms, out=np.zeros_like(flat), where=norms > 0)
    masks = chosen.reshape(count, -1).astype(np.float32)
    similarity = (flat @ flat.T).astype(np.float64)
    hits = (masks @ masks.T).astype(np.float64) / masks.sum(axis=1, dtype=np.float64)[:, None]
    hits = (hits + hits.T) / 2  # requests that activate different numbers of experts
    upper = np.triu_indices(count, 1)
    alike, shared = similarity[upper], hits[upper]
    means = [(matrix.sum(axis=1) - matrix.diagonal()) / (count - 1) for matrix in (similarity, hits)]
    pairs, requests = pearson(alike, shared), pearson(*means)
    if pairs is None or requests is None:
        return None
    parts = np.array_split(np.argsort(alike, kind="stable"), min(BINS, len(alike)))
    curve = [(float(alike[part].mean()), float(shared[part].mean())) for part in parts]
    points = list(zip(*(mean.tolist() for mean in means), strict=True)) if with_points else []
    return Likeness(search, level, pairs, requests, curve, points)


def pearson(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> float | None:
    """Correlation coefficient of two series; None where one of them is constant up to rounding."""
    one, other = left - left.mean(), right - right.mean()
    scale = float(np.sqrt((one @ one) * (other @ other)))
    flat = [float(np.abs(part).max()) <= 1e-6 for part in (one, other)]
    return None if any(flat) or scale == 0 else float(one @ other) / scale

"""The parameters of a preset that a fit searches, as a vector without bounds; and those it can read off."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from .fit_sample import as_recorded
from .fit_statistics import RoutingFigures
from .routing import RoutingMeta
from .routing_preset import RoutingPreset
from .routing_stats import entropy_bits, top_k_mask
from .synthetic import SyntheticRouting
from .synthetic_math import LARGEST_SCALE, evenly_spaced

Doubles = npt.NDArray[np.float64]

_SHARES = ("topic", "request", "drift", "layer")  # beside the token's; the iteration's stays as it is
NAMES = (
    *(f"shares.{name}" for name in _SHARES),
    "tokens.drift_correlation",
    "tokens.repeat",
    "tokens.stock",
    "rows.noise_concentration",
    "latent.context_layers",
    "latent.global_share",
)
STOCK, MOST_STOCK = 200, 5000  # the knob's unit, and a stock so large that little of it is met twice
_LEAST, _MOST = -6.0, 5.0


def knobs_of(preset: RoutingPreset) -> Doubles:
    """Shares as log of their ratio to the token's, sizes as log, chances as log odds."""
    token = max(preset.shares.token, 1e-3)
    ratios = [max(getattr(preset.shares, name), 1e-3) / token for name in _SHARES]
    chances = [preset.tokens.drift_correlation, preset.tokens.repeat]
    stock = np.log(max(1, preset.tokens.stock) / STOCK)
    sizes = [preset.rows.noise_concentration, preset.latent.context_layers]
    return np.array(
        [*np.log(ratios), *map(_odds, chances), stock, *np.log(sizes), _odds(preset.latent.global_share)]
    ).clip(_LEAST, _MOST)


def with_knobs(preset: RoutingPreset, knobs: Doubles) -> RoutingPreset:
    """The preset with the vector's values, rounded to what a person would read."""
    knobs = knobs.clip(_LEAST, _MOST)
    ratios = np.exp(knobs[: len(_SHARES)])
    left = 1 - preset.shares.iteration
    named = {
        name: math.floor(1e4 * left * ratio / (1 + ratios.sum())) / 1e4  # never more than is left
        for name, ratio in zip(_SHARES, ratios, strict=True)
    }
    token = round(left - sum(named.values()), 9)
    correlation, repeat, stock, concentration, layers, common = knobs[len(_SHARES) :]
    replace = msgspec.structs.replace
    return replace(
        preset,
        shares=replace(preset.shares, token=token, **named),
        tokens=replace(
            preset.tokens,
            drift_correlation=round(_chance(correlation), 3),
            repeat=round(_chance(repeat), 3),
            stock=min(MOST_STOCK, round(STOCK * np.exp(stock))),
        ),
        rows=replace(preset.rows, noise_concentration=float(f"{np.exp(concentration):.3g}")),
        latent=replace(
            preset.latent,
            context_layers=float(f"{np.exp(layers):.3g}"),
            global_share=round(_chance(common), 3),
        ),
    )


def with_entropy(
    preset: RoutingPreset, goal: list[float], recording: RoutingMeta, seed: int
) -> RoutingPreset:
    """The preset whose rows have the entropy `goal` [L], in bits, once cut to what was recorded."""
    source = SyntheticRouting(preset, seed)
    logits = source.sample_logits.reshape(-1, preset.layers, preset.experts).astype(np.float64)
    chosen = top_k_mask(logits, preset.top_k)
    low, high = np.zeros(preset.layers), np.full(preset.layers, LARGEST_SCALE)
    wanted = np.array(goal)
    for _ in range(18):
        middle = (low + high) / 2
        rows = _softmax(logits * middle[:, None])
        sharp = entropy_bits(as_recorded(rows, chosen, recording)) < wanted
        low, high = np.where(sharp, low, middle), np.where(sharp, middle, high)
    bits = entropy_bits(_softmax(logits * ((low + high) / 2)[:, None]))
    most = np.log2(preset.experts)
    rounded = tuple(round(float(value), 3) for value in bits.clip(0.02 * most, 0.998 * most))
    return msgspec.structs.replace(preset, rows=msgspec.structs.replace(preset.rows, entropy_bits=rounded))


def with_skew(preset: RoutingPreset, recorded: RoutingFigures, generated: RoutingFigures) -> RoutingPreset:
    """The preset whose popularity is nearer to the recorded load of each layer."""
    wanted = np.maximum(np.array(recorded.skew) - 1, 1e-3)
    got = np.maximum(np.array(generated.skew) - 1, 1e-3)
    bias = evenly_spaced(preset.rows.bias, preset.layers)
    factor = np.sqrt(wanted / got).clip(0.5, 2)
    rounded = tuple(round(float(value), 3) for value in (np.maximum(bias, 0.02) * factor).clip(0.0, 2.5))
    return msgspec.structs.replace(preset, rows=msgspec.structs.replace(preset.rows, bias=rounded))


def _softmax(logits: Doubles) -> Doubles:
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True))


def _odds(chance: float) -> float:
    inside = min(max(chance, 2e-3), 1 - 2e-3)
    return float(np.log(inside / (1 - inside)))


def _chance(odds: float) -> float:
    return float(1 / (1 + np.exp(-odds)))

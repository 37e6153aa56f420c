"""The arithmetic of the synthetic generator, on plain arrays.

n iterations, L layers, J experts per layer, K chosen, D latent dimensions. What is done for every iteration
is compiled (csrc/synthetic.cpp).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .._core import synthetic_drift, synthetic_gate, synthetic_repeats
from ..errors import SettingError
from .routing_preset import RoutingPreset, Tokens

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

LARGEST_SCALE = 12.0  # keeps exp() of six standard deviations inside f32


def readout(rng: np.random.Generator, preset: RoutingPreset) -> Floats:
    """Matrix [2·D, L·J] from the token's and the context's latent vectors to logits."""
    latent, shares = preset.latent, preset.shares
    centres = np.linspace(0, preset.layers - 1, latent.dimensions)[:, None]
    near = np.exp(-0.5 * ((np.arange(preset.layers) - centres) / latent.layer_width) ** 2)
    power = latent.global_share + (1 - latent.global_share) * near
    weights = rng.standard_normal((latent.dimensions, preset.layers, preset.experts))
    weights *= np.sqrt(power)[:, :, None]
    weights /= np.sqrt((weights**2).sum(axis=0))
    known = 1 - np.exp(-(np.arange(preset.layers) + 0.5) / latent.context_layers)
    context = shares.topic + shares.request + shares.drift + shares.iteration
    from_token = weights * np.sqrt(shares.token + (1 - known) * context)[:, None]
    from_context = weights * np.sqrt(known)[:, None]
    both = np.concatenate((from_token, from_context))
    return both.reshape(len(both), -1).astype(np.float32)


def standardised(values: Doubles, weights: Doubles | None = None) -> Floats:
    """Columns of `values` [n, D] with mean 0 and variance 1 under `weights` [n]; a single row becomes 0."""
    mean = np.average(values, axis=0, weights=weights)
    spread = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    return ((values - mean) / np.where(spread > 0, spread, 1)).astype(np.float32)


def drift(rng: np.random.Generator, n: int, dimensions: int, correlation: float) -> Floats:
    """Stationary AR(1) series [n, D] of unit variance: x[t] = r·x[t−1] + √(1 − r²)·noise."""
    series = rng.standard_normal((n, dimensions), dtype=np.float32)
    synthetic_drift(series, correlation)
    return series


def repeats(rng: np.random.Generator, n: int, tokens: Tokens) -> npt.NDArray[np.int64]:
    """Which token of the stock or of those before it each of n tokens repeats, itself where none."""
    return synthetic_repeats(rng.random((n, 3)), tokens.stock, tokens.repeat, tokens.run)


def noise_strength(
    rng: np.random.Generator, n: int, share: float, concentration: float
) -> tuple[Floats, Floats]:
    """Of n iterations, factors [n] on what the layers read in common and on each layer's own noise.

    An iteration's noise has a share v of the variance, Beta distributed with mean `share`.
    """
    if not 0 < share < 1:
        return np.ones(n, np.float32), np.ones(n, np.float32)
    part = rng.beta(share * concentration, (1 - share) * concentration, n)
    read, noise = np.sqrt((1 - part) / (1 - share)), np.sqrt(part / share)
    return read.astype(np.float32), noise.astype(np.float32)


def evenly_spaced(values: tuple[float, ...], layers: int) -> Doubles:
    """`values` stand at evenly spaced layers from the first to the last; interpolated to every layer [L]."""
    return np.asarray(np.interp(np.linspace(0, 1, layers), np.linspace(0, 1, len(values)), values))


def scale_for_entropy(logits: Floats, preset: RoutingPreset) -> Floats:
    """Factor per layer [L] that gives the sample `logits` [n, L, J] the preset's mean entropy."""
    goal = evenly_spaced(preset.rows.entropy_bits, preset.layers)
    low, high = np.zeros(preset.layers), np.full(preset.layers, LARGEST_SCALE)
    entropy = goal
    for _ in range(16):
        middle = (low + high) / 2
        scaled = logits * middle[:, None].astype(np.float32)
        weights = np.exp(scaled)
        total = weights.sum(axis=2)
        nats = np.log(total) - (weights * scaled).sum(axis=2) / total
        entropy = nats.mean(axis=0) / np.log(2)
        low, high = np.where(entropy > goal, middle, low), np.where(entropy > goal, high, middle)
    if np.abs(entropy - goal).max() > 0.05:
        layer = int(np.argmax(np.abs(entropy - goal)))
        raise SettingError(
            f"routing preset {preset.model}: rows.entropy_bits of {goal[layer]:.2f} in layer {layer} is out "
            f"of reach; the nearest that can be made is {entropy[layer]:.2f}. Choose a value beyond that."
        )
    return np.asarray((low + high) / 2, dtype=np.float32)


def recall_at(
    logits: Floats, unit: Floats, error: Floats, levels: tuple[float, ...], shape: tuple[int, int], top_k: int
) -> list[float]:
    """Share of the true top K of `logits` [n, L·J] that is left in the top K after `error` [n, L·J] is added.

    The error is `levels` times `unit` [L·J], the size of a standard deviation of each logit.
    """

    def chosen(values: Floats) -> npt.NDArray[np.int64]:
        _, experts = synthetic_gate(values, shape[1], top_k)
        return np.asarray(experts + np.arange(len(experts))[:, None] * shape[1])

    truth, recalls = chosen(logits), []
    for level in levels:
        guess = (logits + error * unit * np.float32(level)) * np.float32(1 / np.hypot(1, level))
        recalls.append(len(np.intersect1d(truth, chosen(guess), assume_unique=True)) / truth.size)
    return recalls


def prompt_counts(
    rng: np.random.Generator,
    sampled: npt.NDArray[np.int64],
    long_run: Doubles,
    tokens: int,
    top_k: int,
    weight: float,
) -> npt.NDArray[np.int64]:
    """Token counts [L, J] of a prompt of `tokens` tokens, of which some were `sampled` [L, J] one by one.

    The others follow the sample's distribution, mixed with `weight` tokens' worth of `long_run` [L, J]. Every
    row sums to tokens · K and no count exceeds `tokens`.
    """
    drawn = int(sampled[0].sum()) // top_k
    rest = tokens - drawn
    if rest == 0:
        return sampled
    chance = sampled / top_k + weight * long_run
    counts = rng.multinomial(rest * top_k, chance / chance.sum(axis=1, keepdims=True))
    for layer in np.flatnonzero((counts > rest).any(axis=1)):
        row = counts[layer]
        excess = int(np.maximum(row - rest, 0).sum())
        np.minimum(row, rest, out=row)
        order = np.argsort(-chance[layer], kind="stable")
        room = np.cumsum(rest - row[order])
        row[order] += np.diff(np.minimum(room, excess), prepend=0)
    return np.asarray(sampled + counts)

"""Routers without training: balanced spherical k-means of a layer's FFN inputs, folded into one matrix.

A Mixtral router is a product with a matrix [J, h] and has no bias, but a layer's FFN inputs share a large
mean μ, which would decide every choice. So the inputs are clustered after the direction of μ has been
projected out, which also removes μ itself; centroids then lie in the complement and are blind to it. The
direction that has become free carries what a bias would: u = μ / |μ|² gives u·x near 1, and a row c_j + b_j·u
is a centroid with offset b_j, chosen so that all experts get about the same load.

Everything is NumPy in one fixed order: the same inputs, counts and generator give the same bytes on one
machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

ITERATIONS = 25
"""Rounds of k-means; the centroids hardly move after about fifteen."""

BALANCE_ROUNDS = 200
"""Adjustments of the offsets once the centroids stand."""


@dataclass(frozen=True)
class Router:
    """A layer's router: `weight` [J, h], and what it does with the inputs it was made from."""

    weight: Floats
    top_k_mass: float  # mean probability that the top K experts have together
    loads: Floats  # [J] share of each expert in the choices; the shares sum to 1


def make_router(inputs: Floats, experts: int, top_k: int, mass: float, rng: np.random.Generator) -> Router:
    """A router over `inputs` [n, h] whose mean top-K mass is `mass` and whose loads are about equal."""
    mean = inputs.mean(axis=0, dtype=np.float64).astype(np.float32)
    constant = mean / max(float(mean @ mean), 1e-12)  # u: u·x is near 1
    centred = inputs - np.outer(inputs @ constant, mean)
    centroids = balanced_spherical_kmeans(unit_rows(centred), experts, rng)
    scores = inputs @ centroids.T
    constants = inputs @ constant
    offsets = balance(scores, constants, top_k)
    weight = centroids + np.outer(offsets, constant)
    weight *= scale_for_mass(inputs @ weight.T, top_k, mass)
    logits = inputs @ weight.T
    return Router(weight, top_k_mass(logits, top_k), loads(logits, top_k))


def balanced_spherical_kmeans(points: Floats, clusters: int, rng: np.random.Generator) -> Floats:
    """Unit centroids [clusters, h] of unit `points` [n, h], by cosine, with clusters of about equal size."""
    centroids = points[np.sort(rng.choice(len(points), clusters, replace=False))]
    ones = np.ones(len(points), dtype=np.float32)
    for _ in range(ITERATIONS):
        scores = points @ centroids.T
        owner = np.argmax(scores + balance(scores, ones, 1, rounds=30), axis=1)
        sums = np.zeros_like(centroids)
        np.add.at(sums, owner, points)
        lost = np.bincount(owner, minlength=clusters) == 0
        if lost.any():  # a centroid that nobody chose starts again at a point
            sums[lost] = points[rng.choice(len(points), int(lost.sum()), replace=False)]
        centroids = unit_rows(sums)
    return centroids


def balance(scores: Floats, constants: Floats, top_k: int, rounds: int = BALANCE_ROUNDS) -> Floats:
    """Offsets [J] for which the top K of scores [n, J] + constants [n] ⊗ offsets are spread most evenly.

    An expert with more than its share is made less attractive, by steps that shrink from the spread of the
    scores to a hundredth of it; the best offsets on the way are kept.
    """
    experts = scores.shape[1]
    step = float(scores.std(axis=0).mean())
    offsets = best = np.zeros(experts, dtype=np.float32)
    least = np.inf
    for turn in range(rounds):
        share = loads(scores + np.outer(constants, offsets), top_k) * experts
        busiest = float(share.max())
        if busiest < least:
            least, best = busiest, offsets
        size = step * 0.3 * 0.01 ** (turn / rounds)
        offsets = offsets - np.float32(size) * np.clip(share - 1, -1, 1).astype(np.float32)
    return best


def scale_for_mass(logits: Floats, top_k: int, mass: float) -> np.float32:
    """The factor on `logits` [n, J] that makes their mean top-K mass `mass`, by bisection of its
    logarithm."""
    low, high = -12.0, 12.0
    for _ in range(40):
        middle = (low + high) / 2
        if top_k_mass(logits * np.float32(np.exp(middle)), top_k) < mass:
            low = middle
        else:
            high = middle
    return np.float32(np.exp((low + high) / 2))


def choose(logits: Floats, top_k: int) -> tuple[npt.NDArray[np.intp], Floats]:
    """The chosen experts [n, K] of `logits` [n, J] and their weights, which sum to 1 as in Mixtral."""
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    weights = softmax(np.take_along_axis(logits, chosen, axis=1))
    return chosen, weights


def softmax(logits: Floats) -> Floats:
    """Softmax of every row."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    rows: Floats = powers / powers.sum(axis=1, keepdims=True)
    return rows


def top_k_mass(logits: Floats, top_k: int) -> float:
    """Mean over rows of the K largest probabilities' sum."""
    experts = logits.shape[1]
    if top_k == experts:
        return 1.0
    largest = np.partition(softmax(logits), experts - top_k, axis=1)[:, experts - top_k :]
    return float(largest.sum(axis=1).mean(dtype=np.float64))


def loads(logits: Floats, top_k: int) -> Floats:
    """Share of every expert in the top-K choices of all rows."""
    experts = logits.shape[1]
    chosen = np.argpartition(logits, experts - top_k, axis=1)[:, experts - top_k :]
    counts = np.bincount(chosen.ravel(), minlength=experts)
    return (counts / chosen.size).astype(np.float32)


def unit_rows(rows: Floats) -> Floats:
    """Rows scaled to length 1; a zero row stays zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: Floats = rows / np.maximum(lengths, np.float32(1e-12))
    return scaled

"""What is compared of recorded and generated routing: one set of figures, the same for both.

L is a number of layers, J of experts per layer, K of experts activated per token, d the distance of a
trajectory search in layers, C the number of stored maps.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from .fit_sample import SampledRequest
from .routing import Half
from .routing_analysis_patterns import Patterns, likeness, most_used
from .routing_stats import Chosen, map_hits, speculation_recall, static_hit, top_k_mask

LAGS = (1, 2, 4, 16, 64)
DISTANCES = (1, 3, 6)
DISTANCE = 3
BLENDED = 32
OWN_SEARCHES = 8  # per request
ENTROPY_REQUESTS = 60  # whose rows give the entropies: these differ little between requests
CAPACITIES = {1000: "1K", 10_000: "10K"}


class RoutingFigures(msgspec.Struct, frozen=True):
    """Figures of a set of requests; shares, hits and cosines are between 0 and 1, entropies in bits.

    values   by name:
             static_hit                    the K most popular experts of the stored requests
             overlap_N, early_overlap      experts in common with N iterations before; with one, first layers
             nearest_C_dD                  trajectory 1-nearest map
             blend_C_dD                    32 nearest maps, weights exp(score / 0.05)
             spread_C                      standard deviation over iterations of nearest_C_d3
             own_request_hit               1-nearest map among the request's own other iterations, d = 3
             entropy_1, entropy_8, entropy_request   of one row, of the mean of 8, of a request's mean row
             load_skew                     J · Σ of squared load shares, mean over layers; 1 is even
             cosine_within, cosine_across  of two requests' mean rows, of one category and of two;
             cosine_requests               of any two
             pearson_trajectory, pearson_semantic   similarity against experts in common, pairs of requests
             semantic_hit                  nearest embedding, layers 0 … d − 1, d = 3
             speculation_recall_D
    entropy, skew, overlap   the same by layer, [L]
    """

    values: dict[str, float]
    entropy: list[float]
    skew: list[float]
    overlap: list[float]


def measure(
    stored: Sequence[SampledRequest],
    served: Sequence[SampledRequest],
    top_k: int,
    *,
    searches: int,
    rng: np.random.Generator,
) -> RoutingFigures:
    """Figures of `served` requests against a store filled from `stored` ones.

    Of the served iterations `searches` are drawn, stored maps of each capacity likewise (all where there are
    fewer). Figures that need no store are those of both sets together, as they vary less.
    """
    every = [*stored, *served]
    maps, stored_chosen = _joined(stored)
    rows, chosen = _joined(served)
    at = rng.permutation(len(rows))[:searches]
    places = rng.permutation(len(maps))
    values = {"static_hit": static_hit(stored_chosen, chosen)}
    overlaps = {lag: _overlap(every, lag) for lag in LAGS}
    values |= {f"overlap_{lag}": _mean(found) for lag, found in overlaps.items() if found is not None}
    overlap = overlaps[1] if overlaps[1] is not None else np.full(rows.shape[1], np.nan)
    values["early_overlap"] = _mean(overlap[: max(1, len(overlap) // 8)])
    values |= _map_figures(maps, places, rows[at], chosen[at])
    values |= _own_hit(served, rng)
    patterns = Patterns(*rows.shape[1:])
    for request in every[:: max(1, len(every) // ENTROPY_REQUESTS)]:
        patterns.add(request.gate, request.chosen)
    entropy = patterns.entropy()
    aggregated = {part.iterations: part.bits for part in entropy.aggregated}
    values["entropy_1"] = _mean(np.array(entropy.fine))
    if 8 in aggregated:
        values["entropy_8"] = aggregated[8]
    values["entropy_request"] = _mean(np.array(entropy.coarse))
    loads = stored_chosen.sum(axis=0) + chosen.sum(axis=0)
    skew = rows.shape[2] * np.square(loads / loads.sum(axis=1, keepdims=True)).sum(axis=1)
    values["load_skew"] = _mean(skew)
    values |= _likeness(every, top_k)
    values |= _semantic_hit(stored, places, served, at, top_k)
    for distance in sorted(served[0].speculation):
        guesses = np.concatenate([request.speculation[distance] for request in served])
        values[f"speculation_recall_{distance}"] = speculation_recall(
            rows[at], guesses[at], distance=distance, top_k=top_k
        )
    return RoutingFigures(values, entropy.fine, skew.tolist(), overlap.tolist())


def mean_figures(figures: Sequence[RoutingFigures]) -> RoutingFigures:
    """Mean over several seeds of each figure that all of them have."""
    return RoutingFigures(
        {
            name: float(np.mean([one.values[name] for one in figures]))
            for name in figures[0].values
            if all(name in one.values for one in figures)
        },
        *(
            np.mean([getattr(one, name) for one in figures], axis=0).tolist()
            for name in ("entropy", "skew", "overlap")
        ),
    )


def _joined(requests: Sequence[SampledRequest]) -> tuple[Half, Chosen]:
    return np.concatenate([r.gate for r in requests]), np.concatenate([r.chosen for r in requests])


def _mean(values: npt.NDArray[np.float64]) -> float:
    return float(values.mean())


def _overlap(requests: Sequence[SampledRequest], lag: int) -> npt.NDArray[np.float64] | None:
    """Per layer the share of activations that were there `lag` iterations before; None without any."""
    found = total = None
    for request in requests:
        chosen = request.chosen
        if len(chosen) > lag:
            both = (chosen[lag:] & chosen[:-lag]).sum(axis=(0, 2))
            count = chosen[lag:].sum(axis=(0, 2))
            found = both if found is None else found + both
            total = count if total is None else total + count
    return None if found is None or total is None else found / total


def _map_figures(maps: Half, places: npt.NDArray[np.int64], rows: Half, chosen: Chosen) -> dict[str, float]:
    values = {}
    reached = tuple(d for d in DISTANCES if d < maps.shape[1])
    middle = min(DISTANCE, maps.shape[1] - 1)
    for capacity, name in CAPACITIES.items():
        store = maps[places[:capacity]]
        first = capacity == min(CAPACITIES)
        distances = tuple(sorted({middle, *reached})) if first else (middle,)
        hits = map_hits(store, rows, chosen, distances=distances, neighbours=(1, BLENDED))
        for distance in distances:
            values[f"nearest_{name}_d{distance}"] = _mean(hits[distance, 1])
        values[f"blend_{name}_d{middle}"] = _mean(hits[middle, BLENDED])
        values[f"spread_{name}"] = float(hits[middle, 1].std())
    return values


def _own_hit(requests: Sequence[SampledRequest], rng: np.random.Generator) -> dict[str, float]:
    """Of requests with 48 iterations or more: two thirds of them are stored, some of the others searched."""
    hits = []
    for request in requests:
        order = rng.permutation(len(request.gate))
        if len(order) >= 48:
            store, searched = order[: 2 * len(order) // 3], order[-OWN_SEARCHES:]
            distance = min(DISTANCE, request.gate.shape[1] - 1)
            found = map_hits(
                request.gate[store],
                request.gate[searched],
                request.chosen[searched],
                distances=(distance,),
                neighbours=(1,),
            )
            hits.append(_mean(found[distance, 1]))
    return {"own_request_hit": float(np.mean(hits))} if hits else {}


def _likeness(requests: Sequence[SampledRequest], top_k: int) -> dict[str, float]:
    means = np.stack([request.gate.mean(axis=0, dtype=np.float32) for request in requests])
    used = most_used(np.stack([request.chosen.sum(axis=0) for request in requests]), top_k)
    values = {}
    found = likeness("trajectory", "request", means, used, with_points=False)
    if found is not None:
        values["pearson_trajectory"] = found.pairs
    flat = means.reshape(len(means), -1)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    upper = np.triu_indices(len(flat), 1)
    cosines = (flat @ flat.T)[upper]
    if len(cosines):
        values["cosine_requests"] = float(cosines.mean())
    categories = np.array([str(request.category) for request in requests])
    same = (categories[:, None] == categories)[upper]
    if requests[0].category is not None and same.any() and not same.all():
        values["cosine_within"] = float(cosines[same].mean())
        values["cosine_across"] = float(cosines[~same].mean())
    known = [request for request in requests if request.embedding is not None]
    if len(known) == len(requests):
        embeddings = np.stack(
            [r.embedding.mean(axis=0, dtype=np.float32) for r in known if r.embedding is not None]
        )
        found = likeness("semantic", "request", embeddings, used, with_points=False)
        if found is not None:
            values["pearson_semantic"] = found.pairs
    return values


def _semantic_hit(
    stored: Sequence[SampledRequest],
    places: npt.NDArray[np.int64],
    served: Sequence[SampledRequest],
    at: npt.NDArray[np.int64],
    top_k: int,
) -> dict[str, float]:
    there = [r.embedding for r in stored if r.embedding is not None]
    here = [r.embedding for r in served if r.embedding is not None]
    if len(there) < len(stored) or len(here) < len(served):
        return {}
    places = places[: min(CAPACITIES)]
    keys = np.concatenate(there)[places].astype(np.float32)
    queries = np.concatenate(here)[at].astype(np.float32)
    keys /= np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-9)
    nearest = (queries @ keys.T).argmax(axis=1)
    maps, (_, chosen) = _joined(stored)[0][places], _joined(served)
    first = slice(0, min(DISTANCE, maps.shape[1]))
    truth = chosen[at][:, first]
    return {"semantic_hit": float((top_k_mask(maps[nearest, first], top_k) & truth).sum() / truth.sum())}

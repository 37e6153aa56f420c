"""What a routing trace says about prefetching: the measurements of the paper's motivation, on any trace.

Two passes over the file. The first one adds up what needs no drawing; the second hands the drawn iterations
to their seeds. Memory holds at most `MOST_REQUESTS` request-level matrices and, per seed, C maps and
`SERVED_ITERATIONS` iterations; the trace itself is never in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ..errors import SettingError, TraceError
from .routing import Half, RoutingMeta
from .routing_analysis_draw import Drawn, Split, first_pass, second_pass, split_requests
from .routing_analysis_patterns import Entropy, Likeness, likeness, most_used
from .routing_analysis_search import (
    Fill,
    StoreFigures,
    coarse_hits,
    popular_hit,
    search_store,
    speculation_hits,
)
from .routing_file import RoutingFile

SERVED_ITERATIONS = 2000
MOST_REQUESTS = 2000
TRAINING_SHARE = 0.7


class Bound(msgspec.Struct, frozen=True):
    """A store size for which the paper claims a similarity of any iteration's nearest map."""

    rule: str
    maps: int
    claimed: float


class SeedFigures(msgspec.Struct, frozen=True):
    """What one seed's split gave.

    stores        one per capacity, ascending
    coarse        distance → hits of request-level counts
    speculation   distance → hits of speculated rows, where the trace has them
    popular       hits of each layer's K most activated experts
    """

    seed: int
    training_requests: int
    served_requests: int
    training_iterations: int
    served_iterations: int
    stores: list[StoreFigures]
    coarse: dict[int, float]
    speculation: dict[int, float]
    popular: float


class RoutingAnalysis(msgspec.Struct, frozen=True):
    """Everything that `finemoe trace analyze` prints and plots; hit rates and shares are between 0 and 1."""

    path: str
    store_path: str | None
    meta: RoutingMeta
    recorded_requests: int
    requests: int
    iterations: int
    fill: Fill
    entropy: Entropy
    busiest: list[float]
    balance: list[float]
    previous: float | None
    likeness: list[Likeness]
    bounds: list[Bound]
    seeds: list[SeedFigures]


def claimed_bounds(layers: int, experts: int) -> list[Bound]:
    """The paper's store sizes for 75 and 98 % similarity, and the larger one in circulation for 98 %."""
    cells = layers * experts
    return [
        Bound("2LJ", 2 * cells, 0.75),
        Bound("½LJ·ln(LJ)", math.ceil(cells * math.log(cells) / 2), 0.98),
        Bound("2LJ·ln(LJ)", math.ceil(2 * cells * math.log(cells)), 0.98),
    ]


def analyse_routing(
    path: str | Path,
    *,
    store: str | Path | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    capacities: Sequence[int] = (1000, 10_000),
    fill: Fill = "sample",
    distance: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> RoutingAnalysis:
    """Measure the decode iterations of the routing trace `path`.

    Per seed 70 % of its requests are training and 2,000 decode iterations of the others are searched; with
    `store`, another trace of the same model, all of that one's requests are training. A store of C maps is
    filled from the training requests' decode iterations: "sample" draws C of them without replacement, "rdy"
    offers all of them in the file's order and lets the redundancy rule replace, for which `distance` weighs
    embeddings. The paper's store sizes are measured beside `capacities` where there are enough maps.

    Raises `SettingError` for seeds or capacities that mean nothing, `TraceError` for a trace that is too
    short or, with `store`, of another shape.
    """
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise SettingError(f"seeds = {list(seeds)}: name different whole numbers of 0 or more.")
    if not capacities or min(capacities) < 1:
        raise SettingError(f"capacities = {list(capacities)}: name numbers of maps of 1 or more.")
    served = RoutingFile(path)
    training = served if store is None else _same_shape(RoutingFile(store), served)
    meta = served.meta
    if meta.layers < 2:
        raise TraceError(path, "one layer: nothing is ahead of it.", remedy="Analyse a deeper model.")
    overview = first_pass(served, MOST_REQUESTS, seeds[0], progress)
    stored = overview if training is served else first_pass(training, MOST_REQUESTS, seeds[0], progress)
    splits = [split_requests(seed, overview, stored, TRAINING_SHARE, SERVED_ITERATIONS) for seed in seeds]
    bounds = claimed_bounds(meta.layers, meta.experts)
    maps = min(split.training_iterations for split in splits)
    sizes = sorted({min(size, maps) for size in capacities} | {b.maps for b in bounds if b.maps <= maps})
    drawn = second_pass(served, training, splits, sizes, fill, distance, progress)
    figures, alike = [], []
    for split, one in zip(splits, drawn, strict=True):
        progress(f"seed {split.seed}: searching")
        figures.append(_seed_figures(meta, split, one, sizes, stored.counts))
        alike.append(_iteration_likeness(meta, one, with_points=split is splits[0]))
    patterns = overview.patterns
    return RoutingAnalysis(
        path=str(path),
        store_path=None if store is None else str(store),
        meta=meta,
        recorded_requests=served.requests,
        requests=len(overview.requests),
        iterations=patterns.iterations,
        fill=fill,
        entropy=patterns.entropy(),
        busiest=patterns.busiest(),
        balance=patterns.balance(),
        previous=patterns.previous_overlap(),
        likeness=[
            *_mean_likeness(alike),
            *_request_likeness(meta, overview.mean_rows, overview.counts, overview.embeddings),
        ],
        bounds=bounds,
        seeds=figures,
    )


def _same_shape(store: RoutingFile, served: RoutingFile) -> RoutingFile:
    for name in ("layers", "experts", "top_k"):
        theirs, ours = getattr(store.meta, name), getattr(served.meta, name)
        if theirs != ours:
            raise TraceError(
                store.path,
                f"{name} = {theirs}, {served.path} has {ours}.",
                place="metadata",
                remedy="Name a store recorded from the same model.",
            )
    return store


def _seed_figures(
    meta: RoutingMeta, split: Split, drawn: Drawn, sizes: list[int], counts: dict[int, np.ndarray]
) -> SeedFigures:
    stores = [search_store(meta, *drawn.store(size), drawn.served) for size in sizes]
    matrices = np.stack([counts[request] for request in split.training])
    return SeedFigures(
        seed=split.seed,
        training_requests=len(split.training),
        served_requests=len(split.testing),
        training_iterations=split.training_iterations,
        served_iterations=len(drawn.served.gate),
        stores=stores,
        coarse=coarse_hits(matrices, drawn.served, meta.top_k),
        speculation=speculation_hits(drawn.served, meta.top_k),
        popular=popular_hit(matrices.sum(axis=0), drawn.served, meta.top_k),
    )


def _iteration_likeness(meta: RoutingMeta, drawn: Drawn, *, with_points: bool) -> list[Likeness]:
    one = drawn.one_each
    found = [likeness("trajectory", "iteration", one.gate, one.chosen, with_points=with_points)]
    if one.embedding is not None:
        known = one.embedding.any(axis=1)
        found.append(
            likeness(
                "semantic", "iteration", one.embedding[known], one.chosen[known], with_points=with_points
            )
        )
    return [item for item in found if item is not None]


def _request_likeness(
    meta: RoutingMeta,
    mean_rows: np.ndarray,
    counts: dict[int, np.ndarray],
    embeddings: Half | None,
) -> list[Likeness]:
    used = most_used(np.stack(list(counts.values())), meta.top_k)
    found = [likeness("trajectory", "request", mean_rows, used, with_points=True)]
    if embeddings is not None:
        known = embeddings.any(axis=1)
        found.append(likeness("semantic", "request", embeddings[known], used[known], with_points=True))
    return [item for item in found if item is not None]


def _mean_likeness(seeds: list[list[Likeness]]) -> list[Likeness]:
    """The coefficients' mean over the seeds; curve and points of the first one."""
    found = []
    for first in seeds[0]:
        same = [item for seed in seeds for item in seed if item.search == first.search]
        found.append(
            msgspec.structs.replace(
                first,
                pairs=float(np.mean([item.pairs for item in same])),
                requests=float(np.mean([item.requests for item in same])),
            )
        )
    return found

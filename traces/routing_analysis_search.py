"""What the searches of a map store find: hits by distance, scores by capacity, when δ acts; and their rivals.

C is a number of stored maps, Q of searched iterations, L of layers, J of experts per layer, K of experts
activated per token. Hits are shares of the activations of the layers that a distance reaches, all of them
with K prefetched experts per layer. Searches run in the compiled core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ..policy.core import Searcher, core_options, make_config
from ..policy.systems import find_system
from .routing import Half, RoutingMeta
from .routing_stats import Chosen, Floats, top_k_mask

Fill = Literal["sample", "rdy"]
DISTANCES = (1, 2, 3, 4, 6, 8)
_BATCH = 16


class StoreFigures(msgspec.Struct, frozen=True):
    """One seed's searches of a store of `maps` maps.

    hits         distance → hit rate of the trajectory search
    semantic     distance d → hit rate of layers 0 … d − 1 by the semantic search; empty without embeddings
    delta        distance → share of the (iteration, layer) pairs where δ prefetches more than K experts
    mean_score   of all trajectory searches
    whole_mean, whole_least   of those that have seen all layers but the last
    """

    maps: int
    hits: dict[int, float]
    semantic: dict[int, float]
    delta: dict[int, float]
    mean_score: float
    whole_mean: float
    whole_least: float


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Searched iterations: rows f16 [Q, L, J], activated experts, and embeddings f16 [Q, h] or None.

    totals       i64 [Q, L, J]: tokens of the iteration's request per expert, this iteration the last
    speculation  distance → f16 [Q, L, J]
    """

    gate: Half
    chosen: Chosen
    embedding: Half | None
    totals: npt.NDArray[np.int64]
    speculation: dict[int, Half]


def distances_of(layers: int) -> tuple[int, ...]:
    """Prefetch distances that a model of so many layers has, of those measured."""
    return tuple(distance for distance in DISTANCES if distance < layers)


def map_searcher(meta: RoutingMeta, capacity: int, *, distance: int = 1, semantic: bool = False) -> Searcher:
    """An empty store with one kind of search; the distance matters to the redundancy of embeddings only."""
    width = meta.embedding_width
    options = core_options(
        find_system("finemoe"),
        layers=meta.layers,
        experts=meta.experts,
        top_k=meta.top_k,
        devices=1,
        slots_per_device=1,
        expert_bytes=1,
        prefetch_distance=distance,
        store_capacity=capacity,
        embedding_width=width,
        embedding_work=width,
    )
    return Searcher(make_config(options | {"trajectory": not semantic, "semantic": semantic}))


def search_store(meta: RoutingMeta, maps: Half, embeddings: Half | None, served: Served) -> StoreFigures:
    """Search the maps [C, L, J] for every served iteration, after each layer."""
    searcher = map_searcher(meta, len(maps))
    searcher.fill(maps, embeddings)
    places = np.empty((meta.layers - 1, len(served.gate)), np.int64)
    scores = np.empty(places.shape)
    for start in range(0, len(served.gate), _BATCH):
        found = np.array(searcher.search_batch(served.gate[start : start + _BATCH], None))
        places[:, start : start + _BATCH], scores[:, start : start + _BATCH] = found[..., 0], found[..., 1]
    best = top_k_mask(maps, meta.top_k)
    ordered = -np.sort(-maps.astype(np.float32), axis=2)
    mass = ordered[:, :, : meta.top_k].sum(axis=2, dtype=np.float64)
    more = ordered[:, :, meta.top_k] > 0 if meta.top_k < meta.experts else np.zeros(mass.shape, np.bool_)
    hits, delta = {}, {}
    for distance in distances_of(meta.layers):
        inside = acting = activations = 0
        for layer in range(distance, meta.layers):
            nearest, chosen = places[layer - distance], served.chosen[:, layer]
            inside += int((best[nearest, layer] & chosen).sum())
            activations += int(chosen.sum())
            wanted = np.clip(1 - scores[layer - distance], 0, 1)
            acting += int((more[nearest, layer] & (mass[nearest, layer] < wanted)).sum())
        hits[distance] = inside / activations
        delta[distance] = acting / ((meta.layers - distance) * len(served.gate))
    return StoreFigures(
        maps=len(maps),
        hits=hits,
        semantic=_semantic_hits(meta, maps, embeddings, best, served),
        delta=delta,
        mean_score=float(scores.mean()),
        whole_mean=float(scores[-1].mean()),
        whole_least=float(scores[-1].min()),
    )


def _semantic_hits(
    meta: RoutingMeta, maps: Half, embeddings: Half | None, best: Chosen, served: Served
) -> dict[int, float]:
    if embeddings is None or served.embedding is None:
        return {}
    known = np.flatnonzero(served.embedding.any(axis=1))
    if len(known) == 0 or not embeddings.any():
        return {}
    searcher = map_searcher(meta, len(maps), semantic=True)
    searcher.fill(maps, embeddings)
    nearest = np.concatenate(
        [
            np.array(searcher.search_batch(served.gate[part], served.embedding[part])[0])[:, 0].astype(int)
            for part in np.array_split(known, -(-len(known) // _BATCH))
        ]
    )
    inside = (best[nearest] & served.chosen[known]).sum(axis=(0, 2))
    activations = served.chosen[known].sum(axis=(0, 2))
    return {d: float(inside[:d].sum() / activations[:d].sum()) for d in distances_of(meta.layers)}


def coarse_hits(counts: npt.NDArray[np.int64], served: Served, top_k: int) -> dict[int, float]:
    """Distance → hits of request-level counts [N, L, J] of other requests, searched after each layer.

    As in MoE-Infinity: rows are normalised, the request's own counts so far are compared with every stored
    matrix by the mean cosine of the rows 0 … l, and the nearest one's K most used experts of layer l + d are
    the prediction.
    """
    stored, queries = _unit_rows(counts), _unit_rows(served.totals)
    best = top_k_mask(counts.astype(np.float64), top_k)
    layers = counts.shape[1]
    inside, activations = dict.fromkeys(distances_of(layers), 0), dict.fromkeys(distances_of(layers), 0)
    score = np.zeros((len(queries), len(stored)), np.float32)
    for seen in range(layers - 1):
        score += queries[:, seen] @ stored[:, seen].T
        nearest = score.argmax(axis=1)
        for distance in inside:
            layer = seen + distance
            if layer < layers:
                inside[distance] += int((best[nearest, layer] & served.chosen[:, layer]).sum())
                activations[distance] += int(served.chosen[:, layer].sum())
    return {distance: inside[distance] / activations[distance] for distance in inside}


def _unit_rows(counts: npt.NDArray[np.int64]) -> Floats:
    rows = counts.astype(np.float32)
    norms = np.linalg.norm(rows, axis=2, keepdims=True)
    return np.asarray(np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0))


def speculation_hits(served: Served, top_k: int) -> dict[int, float]:
    """Distance → hits of the K largest values of the rows speculated that many layers before."""
    hits = {}
    for distance, rows in sorted(served.speculation.items()):
        guess = top_k_mask(rows[:, : rows.shape[1] - distance], top_k)
        truth = served.chosen[:, distance:]
        hits[distance] = float((guess & truth).sum() / truth.sum())
    return hits


def popular_hit(loads: npt.NDArray[np.int64], served: Served, top_k: int) -> float:
    """Hits of each layer's K most activated experts of the training requests, `loads` [L, J]."""
    popular = top_k_mask(loads.astype(np.float64), top_k)
    return float((served.chosen & popular).sum() / served.chosen.sum())

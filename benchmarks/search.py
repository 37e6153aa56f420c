"""Searches of the map store against what one would write without it, on one thread.

Trajectory: all searches of one iteration of one request (layers 0 … L − d − 1) over maps of the synthetic
presets. At C = 1K against contenders that give the best map of every layer, too:
  cosine  torch.nn.functional.cosine_similarity, float32, of the query's prefix with the stored one [C, m·J]
  BLAS    one matrix-vector product per layer on the stored prefix, prefix norms known; the fastest of NumPy
          and torch, each on maps stored by rows ([C, L·J]) and by features ([L·J, C])
At C = 32K against a plain pass: the fastest single read of as many bytes as the store holds of those layers
(two per value, and four per map and layer for the prefix norms) that the installed libraries offer: np.sum,
np.max, torch.sum and BLAS sasum of float32.
Semantic: one search, against the fastest float32 matrix-vector product with argmax over as many bytes (half
of the stored embeddings, at four bytes per value), of NumPy and torch, by rows and by features.

Ratios are of least times over interleaved repeats. What is timed of ours is the whole call from Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import measure  # first: it sets the number of threads
import numpy as np
import torch
from finemoe.policy.core import Searcher, core_options, make_config
from finemoe.policy.models import load_model_spec
from finemoe.policy.systems import find_system
from finemoe.traces.routing_preset import load_preset
from finemoe.traces.synthetic import SyntheticRouting
from scipy.linalg import blas

MODELS = ("mixtral-8x7b", "qwen1.5-moe", "phi-3.5-moe")
WIDTHS = (64, 2048, 4096)
COSINE_TARGET, BLAS_TARGET, PASS_TARGET, GEMV_TARGET = 100.0, 15.0, 2.0, 2.0
REQUEST_ITERATIONS = 256
QUERIES = 8

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Shape:
    """A model's shape and its prefetch distance."""

    name: str
    layers: int
    experts: int
    top_k: int
    distance: int

    @property
    def searched(self) -> int:
        """Layers with a trajectory search."""
        return self.layers - self.distance


def shape_of(name: str) -> Shape:
    """Shape of a model of the paper."""
    model = load_model_spec(name)
    return Shape(name, model.layers, model.experts, model.top_k, model.prefetch_distance)


def maps_of(shape: Shape, count: int, seed: int) -> np.ndarray[Any, np.dtype[np.float16]]:
    """f16 [count, L, J]: the first `count` iterations of the model's synthetic requests."""
    routing = SyntheticRouting(load_preset(shape.name), seed)
    parts = []
    for request in range(-(-count // REQUEST_ITERATIONS)):
        parts.append(routing.routing_for(request, 16, REQUEST_ITERATIONS).gate)
    return np.concatenate(parts)[:count]


def searcher(shape: Shape, capacity: int, width: int, *, trajectory: bool) -> Searcher:
    """An empty store of that capacity that makes one kind of search."""
    options = core_options(
        find_system("finemoe"),
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        devices=1,
        slots_per_device=1,
        expert_bytes=1,
        prefetch_distance=shape.distance,
        store_capacity=capacity,
        embedding_width=width,
        embedding_work=width,
    )
    return Searcher(make_config(options | {"trajectory": trajectory, "semantic": not trajectory}))


class Turns:
    """The queries in turn, so that no contender sees the same one twice running."""

    def __init__(self, queries: list[Any], call: Callable[[Any], object]) -> None:
        self._queries = queries
        self._call = call
        self._next = self._turns()

    def _turns(self) -> Iterator[Any]:
        while True:
            yield from self._queries

    def __call__(self) -> object:
        return self._call(next(self._next))


def trajectory(shape: Shape, capacity: int, repeats: int) -> dict[str, float]:
    """Least seconds of each contender for one iteration."""
    drawn = maps_of(shape, capacity + QUERIES, seed=1)
    half, queries = drawn[:capacity], list(drawn[capacity:])
    store = searcher(shape, capacity, 0, trajectory=True)
    store.fill(half, None)
    width = shape.layers * shape.experts
    by_rows: Floats = half.astype(np.float32).reshape(capacity, width)
    by_features = np.ascontiguousarray(by_rows.T)
    squares = np.cumsum(by_rows.astype(np.float64) ** 2, axis=1)[:, shape.experts - 1 :: shape.experts]
    inverse = np.ascontiguousarray((1.0 / np.sqrt(squares)).T.astype(np.float32))
    ends = [(m + 1) * shape.experts for m in range(shape.searched)]
    rows_t, features_t, inverse_t = (torch.from_numpy(a) for a in (by_rows, by_features, inverse))
    wide = [query.astype(np.float32).reshape(-1) for query in queries]
    wide_t = [torch.from_numpy(query) for query in wide]

    def cosine(query: torch.Tensor) -> list[int]:
        similarity = torch.nn.functional.cosine_similarity
        return [int(similarity(query[None, :end], rows_t[:, :end], dim=1).argmax()) for end in ends]

    def numpy_rows(query: Floats) -> list[int]:
        return [int(((by_rows[:, :e] @ query[:e]) * inverse[m]).argmax()) for m, e in enumerate(ends)]

    def numpy_features(query: Floats) -> list[int]:
        return [int(((query[:e] @ by_features[:e]) * inverse[m]).argmax()) for m, e in enumerate(ends)]

    def torch_rows(query: torch.Tensor) -> list[int]:
        return [int((torch.mv(rows_t[:, :e], query[:e]) * inverse_t[m]).argmax()) for m, e in enumerate(ends)]

    def torch_features(query: torch.Tensor) -> list[int]:
        return [
            int((torch.mv(features_t[:e].T, query[:e]) * inverse_t[m]).argmax()) for m, e in enumerate(ends)
        ]

    agree(store, queries[0], [cosine(wide_t[0]), numpy_rows(wide[0]), torch_features(wide_t[0])])
    read = by_features.reshape(-1)[: shape.searched * capacity * (shape.experts + 2) // 2]
    contenders: dict[str, Callable[[], object]] = {
        "finemoe": Turns(queries, lambda query: store.search_iteration(query, None)),
        **plain_passes(read),
    }
    if capacity <= 1024:
        contenders |= {
            "cosine": Turns(wide_t, cosine),
            "BLAS numpy rows": Turns(wide, numpy_rows),
            "BLAS numpy features": Turns(wide, numpy_features),
            "BLAS torch rows": Turns(wide_t, torch_rows),
            "BLAS torch features": Turns(wide_t, torch_features),
        }
    return measure.interleaved(contenders, repeats)


def agree(store: Searcher, query: Any, found: list[list[int]]) -> None:
    """Every contender must find the same maps, rounding aside."""
    ours = [place for place, _ in store.search_iteration(query, None)]
    for theirs in found:
        alike = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
        if alike < 0.9:
            raise SystemExit(f"the contenders find different maps: {alike:.0%} alike")


def plain_passes(read: Floats) -> dict[str, Callable[[], object]]:
    """Ways to read the bytes once."""
    tensor = torch.from_numpy(read)
    return {
        "pass np.sum": read.sum,
        "pass np.max": read.max,
        "pass torch.sum": tensor.sum,
        "pass BLAS sasum": lambda: blas.sasum(read),
    }


def semantic(width: int, capacity: int, repeats: int) -> dict[str, float]:
    """Least seconds of one semantic search, and of matrix-vector products over the same bytes."""
    shape = Shape("semantic", 2, 2, 1, 1)
    rng = np.random.default_rng(2)
    embeddings = rng.standard_normal((capacity + QUERIES, width), np.float32).astype(np.float16)
    gate = np.full((1, 2, 2), 0.5, np.float16)
    store = searcher(shape, capacity, width, trajectory=False)
    store.fill(np.repeat(gate, capacity, axis=0), embeddings[:capacity])
    unit = embeddings.astype(np.float32)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    whole = np.ascontiguousarray(unit[:capacity])
    rows = np.ascontiguousarray(whole[: capacity // 2])
    features = np.ascontiguousarray(rows.T)
    queries, halves = list(unit[capacity:]), list(embeddings[capacity:])
    rows_t, features_t = torch.from_numpy(rows), torch.from_numpy(features)
    queries_t = [torch.from_numpy(query) for query in queries]
    if store.search_iteration(gate[0], halves[0])[0][0] != int((whole @ queries[0]).argmax()):
        raise SystemExit("the contenders find different embeddings")
    return measure.interleaved(
        {
            "finemoe": Turns(halves, lambda query: store.search_iteration(gate[0], query)),
            "GEMV numpy rows": Turns(queries, lambda query: (rows @ query).argmax()),
            "GEMV numpy features": Turns(queries, lambda query: (query @ features).argmax()),
            "GEMV torch rows": Turns(queries_t, lambda query: torch.mv(rows_t, query).argmax()),
            "GEMV torch features": Turns(queries_t, lambda query: torch.mv(features_t.T, query).argmax()),
        },
        repeats,
    )


def line(what: str, least: dict[str, float], kind: str, target: float, *, at_least: bool = False) -> None:
    """Print the ratio to the fastest contender of a kind, with the others' behind it."""
    ours_s = least["finemoe"]
    ratios = {
        name.removeprefix(kind).strip() or name: seconds / ours_s if at_least else ours_s / seconds
        for name, seconds in least.items()
        if name.startswith(kind)
    }
    pick = min if at_least else max
    name = pick(ratios, key=lambda key: ratios[key])
    ratio = ratios.pop(name)
    met = ratio >= target if at_least else ratio <= target
    sign = "≥" if at_least else "≤"
    others = ", ".join(f"{other} {value:.2f}" for other, value in ratios.items())
    print(
        f"| {what} | {kind} {name if name != kind else ''} | {ratio:.2f} | {sign} {target:g} "
        f"| {'met' if met else 'MISSED'} | {others} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=60, help="turns of the small cases; large ones take a tenth"
    )
    parser.add_argument("--small", action="store_true", help="C = 1K only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{measure.machine()}; BLAS of NumPy: {blas_of_numpy()}; torch {torch.__version__}")
    print("| search | against the fastest | ratio | target | | the others |")
    print("|---|---|---|---|---|---|")
    for name in MODELS:
        least = trajectory(shape_of(name), 1000, args.repeats)
        what = f"trajectory, {name}, C = 1K"
        line(what, least, "cosine", COSINE_TARGET, at_least=True)
        line(what, least, "BLAS", BLAS_TARGET, at_least=True)
    few = max(5, args.repeats // 10)
    for name in () if args.small else MODELS:
        line(f"trajectory, {name}, C = 32K", trajectory(shape_of(name), 32_768, few), "pass", PASS_TARGET)
    for capacity, label in ((1000, "1K"),) if args.small else ((1000, "1K"), (32_768, "32K")):
        for width in WIDTHS:
            repeats = few if capacity * width > 10_000_000 else args.repeats
            line(
                f"semantic, h = {width}, C = {label}", semantic(width, capacity, repeats), "GEMV", GEMV_TARGET
            )


def blas_of_numpy() -> str:
    """Name and version of the library, and its kernel where threadpoolctl is there to tell."""
    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    name = f"{built['name']} {built['version']}"
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return name
    kernels = {pool.get("architecture", "?") for pool in threadpool_info() if pool["user_api"] == "blas"}
    return f"{name} ({', '.join(sorted(kernels))} kernels)"


if __name__ == "__main__":
    main()

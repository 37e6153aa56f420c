"""The rules that every request of a routing trace obeys, checked on whole arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import TraceError
from .routing import Half, RequestRouting, RoutingMeta

ROW_SUM_TOLERANCE = 0.01
"""How far the probabilities of a full gate row may sum from 1: f16 keeps 1/2048, a model run in bf16 only
1/256."""


def problems(routing: RequestRouting, meta: RoutingMeta) -> Iterator[tuple[str, str]]:
    """What makes `routing` unusable: (place, problem) for each broken rule; nothing if it is sound."""
    n, shape = len(routing.gate), (meta.layers, meta.experts)
    if n == 0 or routing.gate.shape[1:] != shape:
        yield "gate", f"shape {routing.gate.shape}, expected [n ≥ 1, {meta.layers}, {meta.experts}]"
        return
    yield from _row_problems("gate", routing.gate, full=meta.gate_content == "full")
    for distance, rows in routing.speculation.items():
        if rows.shape != routing.gate.shape:
            yield f"speculation_{distance}", f"shape {rows.shape}, expected {routing.gate.shape}"
            continue
        yield from _row_problems(
            f"speculation_{distance}", rows[:, : meta.layers - distance], full=meta.gate_content == "full"
        )
    if routing.embedding is not None:
        if routing.embedding.shape != (n, meta.embedding_width):
            yield "embedding", f"shape {routing.embedding.shape}, expected ({n}, {meta.embedding_width})"
        elif not np.isfinite(routing.embedding).all():
            where = int(np.argmin(np.isfinite(routing.embedding).all(axis=1)))
            yield f"embedding, iteration {where}", "not finite"
    yield from _expert_problems(routing, meta)


def _row_problems(name: str, rows: Half, *, full: bool) -> Iterator[tuple[str, str]]:
    bad = ~((rows >= 0) & (rows <= 1))  # NaN fails both comparisons
    if bad.any():
        i, layer, j = (int(x) for x in np.argwhere(bad)[0])
        yield f"{name}, iteration {i}, layer {layer}, expert {j}", f"{rows[i, layer, j]} is not in [0, 1]"
        return
    if not full:
        return
    sums = rows.sum(axis=2, dtype=np.float32)
    far = np.abs(sums - 1) > ROW_SUM_TOLERANCE
    if far.any():
        i, layer = (int(x) for x in np.argwhere(far)[0])
        yield f"{name}, iteration {i}, layer {layer}", f"probabilities sum to {sums[i, layer]:.4f}, not 1"


def _expert_problems(routing: RequestRouting, meta: RoutingMeta) -> Iterator[tuple[str, str]]:
    offsets, cells = routing.offsets, len(routing.gate) * meta.layers
    lengths = np.diff(offsets)
    if len(offsets) != cells + 1 or offsets[0] != 0 or offsets[-1] != len(routing.experts):
        yield "offsets", f"do not divide {len(routing.experts)} experts over {cells} (iteration, layer) pairs"
        return
    if len(routing.token_counts) != len(routing.experts):
        yield "token_counts", f"{len(routing.token_counts)} values for {len(routing.experts)} experts"
        return

    def place(cell: int) -> str:
        return f"iteration {cell // meta.layers}, layer {cell % meta.layers}"

    if (lengths < meta.top_k).any():
        cell = int(np.argmax(lengths < meta.top_k))
        yield f"experts, {place(cell)}", f"{lengths[cell]} experts, a token activates {meta.top_k}"
        return
    experts = routing.experts.astype(np.int64)
    owner = np.repeat(np.arange(cells), lengths)
    wrong = experts >= meta.experts
    if wrong.any():
        at = int(np.argmax(wrong))
        yield f"experts, {place(owner[at])}", f"expert {experts[at]}, the layer has 0 … {meta.experts - 1}"
    falling = (np.diff(experts) <= 0) & (np.diff(owner) == 0)
    if falling.any():
        at = int(np.argmax(falling))
        yield f"experts, {place(owner[at])}", f"{experts[at]} before {experts[at + 1]}, must ascend"
    counts = routing.token_counts.astype(np.int64)
    sums = np.add.reduceat(counts, offsets[:-1])
    tokens = sums[:: meta.layers] // meta.top_k
    expected = np.repeat(tokens * meta.top_k, meta.layers)
    if (sums != expected).any() or (sums <= 0).any():
        cell = int(np.argmax((sums != expected) | (sums <= 0)))
        yield f"token_counts, {place(cell)}", f"sum to {sums[cell]}, not to tokens × {meta.top_k}"
        return
    outside = (counts < 1) | (counts > tokens[owner // meta.layers])
    if outside.any():
        at = int(np.argmax(outside))
        most = tokens[owner[at] // meta.layers]
        yield f"token_counts, {place(owner[at])}", f"{counts[at]} tokens for one expert, must be 1 … {most}"


def check_routing(routing: RequestRouting, meta: RoutingMeta, path: str | Path, request: int) -> None:
    """Raise `TraceError` for the first thing that is wrong with request number `request` of `path`."""
    for place, problem in problems(routing, meta):
        raise TraceError(
            path,
            problem + ".",
            place=f"request {request}, {place}",
            remedy="Record or import the trace again.",
        )

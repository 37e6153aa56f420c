"""Plain NumPy for every formula of docs/core.md, in the order of additions that the page states.

Sums run feature by feature, vectorised over the stored maps only, so that each map's sum has exactly the
page's order. Nothing here knows about the C++ core.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import numpy.typing as npt

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
P_FLOOR = float(np.float32(1e-6))


def round_f16(values: npt.ArrayLike) -> F16:
    """f16(x) of f32 values; what overflows becomes infinite without a warning."""
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float32).astype(np.float16)


def unit_embedding(embedding: npt.ArrayLike) -> F16 | None:
    """Unit-normalised f16 embedding [h]; None for a zero embedding."""
    rounded = round_f16(embedding).astype(np.float64)
    norm2 = 0.0
    for x in rounded.tolist():
        norm2 += x * x
    if norm2 == 0.0:
        return None
    return (rounded / math.sqrt(norm2)).astype(np.float32).astype(np.float16)


def semantic_scores(embeddings: F16, query: F16) -> F32:
    """f32 scores [n] of unit embeddings [n, h] against one [h]; an all-zero row scores 0."""
    total = np.zeros(len(embeddings), dtype=np.float32)
    for i in range(len(query)):
        total = total + embeddings[:, i].astype(np.float32) * np.float32(query[i])
    return total


def layer_sums(rows: F16, query: F16) -> F32:
    """f32 dot products [n] of one layer of the maps [n, J] with the query's row [J], over j in order."""
    total = np.zeros(len(rows), dtype=np.float32)
    for j in range(len(query)):
        total = total + rows[:, j].astype(np.float32) * np.float32(query[j])
    return total


def running_sums_step(running: F32, rows: F16, query: F16) -> F32:
    """The incremental form: running sums [n] after one more layer."""
    return running + layer_sums(rows, query)


def running_sums(maps: F16, query: F16) -> F32:
    """From scratch: running sums [n] of maps [n, L, J] against the query's rows 0 … m, [m + 1, J]."""
    total = np.zeros(len(maps), dtype=np.float32)
    for layer in range(len(query)):
        total = total + layer_sums(maps[:, layer], query[layer])
    return total


def inverse_norms(rows: F16) -> F32:
    """inv[l] = f32(1 / √(f64 sum of squares of rows 0 … l)) of rows [m, J], 0 where the sum is 0."""
    result = np.zeros(len(rows), dtype=np.float32)
    norm2 = 0.0
    for layer, row in enumerate(rows.astype(np.float64).tolist()):
        for x in row:
            norm2 += x * x
        result[layer] = np.float32(1.0 / math.sqrt(norm2)) if norm2 > 0.0 else np.float32(0.0)
    return result


def shares(counts: npt.ArrayLike) -> F32:
    """f32(count / sum over the last axis) of token counts [… J], divided in f64; 0 where the sum is 0."""
    tokens = np.asarray(counts, dtype=np.float64)
    totals = tokens.sum(axis=-1, keepdims=True)
    quotients: npt.NDArray[np.float64] = np.zeros_like(tokens)
    np.divide(tokens, totals, out=quotients, where=totals > 0.0)
    return quotients.astype(np.float32)


def row_inverse_norms(rows: F16) -> F32:
    """f32(1 / √(f64 sum of squares)) of each row [m, J] alone, 0 where the sum is 0."""
    return np.array([inverse_norms(row[None])[0] for row in rows], dtype=np.float32)


def activation_keys(matrices: F16, query: F16) -> F32:
    """Sums [n] of the cosines of the rows 0 … m of stored matrices [n, L, J] and of a query [m + 1, J]."""
    total = np.zeros(len(matrices), dtype=np.float32)
    own = row_inverse_norms(query)
    for layer in range(len(query)):
        stored = row_inverse_norms(matrices[:, layer])
        total = total + layer_sums(matrices[:, layer], query[layer]) * stored * own[layer]
    return total


def best_map(keys: F32, written: npt.NDArray[np.int64]) -> int:
    """Place of the largest key; among equal keys the most recently written map."""
    return max(range(len(keys)), key=lambda i: (float(keys[i]), int(written[i])))


def delta_of(score: float) -> float:
    """δ = clip(1 − score, 0, 1)."""
    return min(max(1.0 - score, 0.0), 1.0)


def delta_set(p: npt.ArrayLike, delta: float, top_k: int) -> list[int]:
    """The δ set, ascending j."""
    values = [float(x) for x in np.asarray(p)]
    order = sorted(range(len(values)), key=lambda j: (-values[j], j))
    chosen: list[int] = []
    mass = 0.0
    for j in order:
        if len(chosen) >= top_k and (mass >= delta or values[j] == 0.0):
            break
        chosen.append(j)
        mass += values[j]
    return sorted(chosen)


def select(selector: str, p: npt.ArrayLike, delta: float, top_k: int) -> list[int]:
    """The prefetch set of one row, ascending j."""
    if selector == "positive":
        return [j for j, value in enumerate(np.asarray(p).tolist()) if value > 0.0]
    return delta_set(p, 0.0 if selector == "top_k" else delta, top_k)


def delta_set_brute_force(p: npt.ArrayLike, delta: float, top_k: int) -> list[int]:
    """The same by trying all subsets: smallest that reaches δ, then largest mass, then lowest ids.

    Sets have at least K members; beyond K only experts with p > 0 count. Where no set reaches δ, everything
    with p > 0 is taken.
    """
    values = [float(x) for x in np.asarray(p)]
    positive = sum(x > 0.0 for x in values)
    largest = max(top_k, positive)
    for size in range(top_k, largest + 1):
        mass, chosen = max(
            (
                (sum(values[j] for j in s), tuple(-j for j in s))
                for s in combinations(range(len(values)), size)
            ),
        )
        if mass >= delta or size == largest:
            return [-j for j in chosen]
    raise AssertionError("unreachable: the largest size always returns")


def rank_by_tokens(p: float, tokens: int) -> float:
    """f32(1 − (1 − p)^tokens), computed in f64: the chance that one of the tokens needs the expert."""
    return float(np.float32(1.0 - math.pow(1.0 - p, float(tokens))))


def redundancy(semantic: F32 | None, trajectory: F32, distance: int, layers: int) -> F32:
    """RDY [n] of every stored map; `semantic` is None where the row has no embedding."""
    if semantic is None:
        return trajectory
    near = min(distance, layers)
    ws, wt = np.float32(near / layers), np.float32((layers - near) / layers)
    return ws * semantic + wt * trajectory


def priority(kind: str, p: float, layer: int, l_now: int, layers: int) -> tuple[float, ...]:
    """Prefetch priority, largest first."""
    if kind == "depth":
        return (p * (1.0 - (layer - l_now) / layers),)
    if kind == "layer":
        return (-layer, p)
    return (p / (layer - l_now),)


def finemoe_key(
    p: float, freq: float, layer: int, l_now: int, layers: int, expert: int
) -> tuple[float, float, int, int]:
    """Eviction key of `finemoe`, smallest goes."""
    ahead = layer - l_now if layer > l_now else layer - l_now + layers
    return (max(p, P_FLOOR) * freq, freq, -ahead, expert)


def lru_key(stamp: int, expert: int) -> tuple[int, int]:
    """Eviction key of `lru`."""
    return (stamp, expert)


def lfu_key(freq: float, stamp: int, expert: int) -> tuple[float, int, int]:
    """Eviction key of `lfu`."""
    return (freq, stamp, expert)


def lfru_key(privileged: bool, freq: float, stamp: int, expert: int) -> tuple[int, float, int, int]:
    """Eviction key of `lfru`: LFU among the others first, then LRU among the privileged."""
    return (1, 0.0, stamp, expert) if privileged else (0, freq, stamp, expert)


def activation_key(share: float, layer: int, layers: int, stamp: int, expert: int) -> tuple[float, int, int]:
    """Eviction key of `activation`; `share` is a."""
    return ((share + 1e-6) * (1.0 - layer / layers), stamp, expert)


def belady_key(next_use: float, expert: int) -> tuple[float, int]:
    """Eviction key of `belady`; `next_use` is a step, or infinity where none is known."""
    return (-next_use, expert)

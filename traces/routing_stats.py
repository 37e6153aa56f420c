"""Measures of routing: how predictable experts are from popularity, the past, stored maps and speculation.

Everywhere n is a number of iterations, L of layers, J of experts per layer, K of experts activated per token.
`chosen` is a boolean array [n, L, J] with K true values per row, one token per iteration, that is decode
only. Hits are shares of activations, between 0 and 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Chosen = npt.NDArray[np.bool_]


def top_k_mask(rows: npt.NDArray[np.floating], top_k: int) -> Chosen:
    """The K largest values of each row [..., J] as a boolean array; equal values: the lower expert first."""
    order = np.argsort(-rows.astype(np.float32), axis=-1, kind="stable")[..., :top_k]
    mask = np.zeros(rows.shape, dtype=np.bool_)
    np.put_along_axis(mask, order, True, axis=-1)
    return mask


def load_shares(chosen: Chosen) -> npt.NDArray[np.float64]:
    """Share of each layer's activations that goes to each expert, [L, J]; every row sums to 1."""
    counts = chosen.sum(axis=0, dtype=np.float64)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def static_hit(training: Chosen, served: Chosen) -> float:
    """Hits of each layer's K most popular experts of `training`, held for the whole of `served`."""
    top_k = int(served[0, 0].sum())
    popular = top_k_mask(load_shares(training), top_k)
    return float((served & popular).sum() / served.sum())


def previous_hit(requests: list[Chosen]) -> float:
    """Share of activations that the same layer also had one iteration earlier, within each request."""
    hits = sum(int((chosen[1:] & chosen[:-1]).sum()) for chosen in requests)
    return hits / sum(int(chosen[1:].sum()) for chosen in requests)


def nearest_map_hit(
    stored: npt.NDArray[np.floating],
    gate: npt.NDArray[np.floating],
    chosen: Chosen,
    *,
    distance: int,
    neighbours: int = 1,
    temperature: float = 0.05,
) -> float:
    """Hits of the paper's trajectory search with K prefetched experts per layer.

    For each layer l ≥ distance the cosine of the rows 0 … l − distance of `gate` [n, L, J] against the same
    rows of every map in `stored` [C, L, J] picks the nearest map, whose K largest values in row l are the
    prediction. With `neighbours` > 1 the nearest maps are blended with weights exp(cosine / temperature).
    """
    top_k = int(chosen[0, 0].sum())
    maps, rows = stored.astype(np.float32), gate.astype(np.float32)
    dots = np.zeros((len(rows), len(maps)), dtype=np.float32)
    map_squares, row_squares = np.zeros(len(maps), np.float32), np.zeros(len(rows), np.float32)
    hits = activations = 0
    for layer in range(distance, maps.shape[1]):
        seen = layer - distance
        dots += rows[:, seen] @ maps[:, seen].T
        map_squares += np.square(maps[:, seen]).sum(axis=1)
        row_squares += np.square(rows[:, seen]).sum(axis=1)
        scores = dots / np.sqrt(map_squares)
        if neighbours == 1:
            predicted = maps[scores.argmax(axis=1), layer]
        else:
            best = np.argpartition(-scores, neighbours, axis=1)[:, :neighbours]
            cosines = np.take_along_axis(scores, best, axis=1) / np.sqrt(row_squares)[:, None]
            weights = np.exp((cosines - cosines.max(axis=1, keepdims=True)) / temperature)
            predicted = np.einsum("nc,ncj->nj", weights, maps[best, layer])
        hits += int((top_k_mask(predicted, top_k) & chosen[:, layer]).sum())
        activations += int(chosen[:, layer].sum())
    return hits / activations


def speculation_recall(
    gate: npt.NDArray[np.floating], speculation: npt.NDArray[np.floating], *, distance: int, top_k: int
) -> float:
    """Share of the true top K of layer l + distance found in the top K of the row speculated at layer l.

    `speculation` [n, L, J] holds at layer l the row predicted for layer l + distance; its last `distance`
    layers are not read.
    """
    layers = gate.shape[1]
    truth = top_k_mask(gate[:, distance:], top_k)
    guess = top_k_mask(speculation[:, : layers - distance], top_k)
    return float((truth & guess).sum() / truth.sum())


def entropy_bits(gate: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Mean entropy in bits of each layer's rows, [L], of `gate` [n, L, J] after normalising each row."""
    rows = gate.astype(np.float64)
    rows /= rows.sum(axis=2, keepdims=True)
    logs = np.log2(rows, out=np.zeros_like(rows), where=rows > 0)
    return np.asarray(-(rows * logs).sum(axis=2).mean(axis=0))

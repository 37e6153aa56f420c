"""Measures of routing: how predictable experts are from popularity, the past, stored maps and speculation.

Everywhere n is a number of iterations, L of layers, J of experts per layer, K of experts activated per token.
`chosen` is a boolean array [n, L, J] with K true values per row, one token per iteration, that is decode
only. Hits are shares of activations, between 0 and 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .routing import RequestRouting

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
) -> float:
    """Hits of the paper's trajectory search with K prefetched experts per layer; see `map_hits`."""
    found = map_hits(stored, gate, chosen, distances=(distance,), neighbours=(neighbours,))
    return float(found[distance, neighbours].mean())


def map_hits(
    stored: npt.NDArray[np.floating],
    gate: npt.NDArray[np.floating],
    chosen: Chosen,
    *,
    distances: tuple[int, ...],
    neighbours: tuple[int, ...],
    temperature: float = 0.05,
) -> dict[tuple[int, int], npt.NDArray[np.float64]]:
    """(distance, neighbours) → each iteration's hits [n] of a trajectory search with K prefetched experts.

    For each layer l ≥ distance the cosine of the rows 0 … l − distance of `gate` [n, L, J] against the same
    rows of every map in `stored` [C, L, J] picks the nearest map, whose K largest values in row l are the
    prediction. With `neighbours` > 1 that many nearest maps are blended with weights
    exp(cosine / temperature).
    """
    top_k, layers = int(chosen[0, 0].sum()), stored.shape[1]
    maps, rows = stored.astype(np.float32), gate.astype(np.float32)
    dots = np.zeros((len(rows), len(maps)), dtype=np.float32)
    map_squares, row_squares = np.zeros(len(maps), np.float32), np.zeros(len(rows), np.float32)
    inside = {(d, k): np.zeros(len(rows)) for d in distances for k in neighbours}
    for seen in range(layers - min(distances)):
        dots += rows[:, seen] @ maps[:, seen].T
        map_squares += np.square(maps[:, seen]).sum(axis=1)
        row_squares += np.square(rows[:, seen]).sum(axis=1)
        scores = dots * (1 / np.sqrt(map_squares))
        blends = {}
        for k in neighbours:
            if 1 < k < len(maps):
                blends[k] = np.argpartition(scores, len(maps) - k, axis=1)[:, -k:]
            else:
                blends[k] = scores.argmax(axis=1)[:, None] if k == 1 else np.arange(len(maps))[None]
        for (distance, k), hits in inside.items():
            layer = seen + distance
            if layer < layers:
                if k == 1:
                    predicted = maps[blends[k][:, 0], layer]
                else:
                    cosines = np.take_along_axis(scores, blends[k], axis=1) / np.sqrt(row_squares)[:, None]
                    weights = np.exp((cosines - cosines.max(axis=1, keepdims=True)) / temperature)
                    predicted = np.einsum("nc,ncj->nj", weights, maps[blends[k], layer])
                hits += (top_k_mask(predicted, top_k) & chosen[:, layer]).sum(axis=1)
    return {(d, k): hits / (top_k * (layers - d)) for (d, k), hits in inside.items()}


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


def chosen_experts(routing: RequestRouting, first: int) -> Chosen:
    """What the iterations from `first` on activated, bool [n − first, L, J]."""
    n, layers, experts = routing.gate.shape
    chosen = np.zeros((n * layers, experts), dtype=np.bool_)
    chosen[np.repeat(np.arange(n * layers), np.diff(routing.offsets)), routing.experts] = True
    return chosen.reshape(n, layers, experts)[first:]


def summarise(
    requests: list[RequestRouting],
    top_k: int,
    *,
    distance: int,
    stored: int,
    served: int,
    rng: np.random.Generator,
) -> dict[str, float]:
    """The measures above for decode iterations; 70 % of `requests` fill the store and 30 % are served.

    `stored` maps and `served` iterations are drawn by `rng` from the two parts (all of them where there are
    fewer). Keys: static_hit, previous_hit, nearest_map_hit, entropy_bits (mean over layers), busiest_expert
    (its share over an even share, mean over layers) and, where the served requests have such rows,
    speculation_recall_<distance>.
    """
    cut = max(1, int(0.7 * len(requests)))
    chosen = [chosen_experts(routing, 1) for routing in requests]
    training, serving = np.concatenate(chosen[:cut]), np.concatenate(chosen[cut:])
    maps = np.concatenate([routing.gate[1:] for routing in requests[:cut]])
    rows = np.concatenate([routing.gate[1:] for routing in requests[cut:]])
    maps = maps[rng.permutation(len(maps))[:stored]]
    drawn = rng.permutation(len(rows))[:served]
    found = {
        "static_hit": static_hit(training, serving),
        "previous_hit": previous_hit(chosen[cut:]),
        "nearest_map_hit": nearest_map_hit(maps, rows[drawn], serving[drawn], distance=distance),
        "entropy_bits": float(entropy_bits(rows[drawn]).mean()),
        "busiest_expert": float(load_shares(training).max(axis=1).mean() * training.shape[2]),
    }
    for ahead in sorted(requests[-1].speculation):
        guesses = np.concatenate([routing.speculation[ahead][1:] for routing in requests[cut:]])
        found[f"speculation_recall_{ahead}"] = speculation_recall(
            rows[drawn], guesses[drawn], distance=ahead, top_k=top_k
        )
    return found

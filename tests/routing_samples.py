"""Small routing traces for tests: random ones that obey every rule of the format."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from finemoe.traces.routing import RequestRouting, RoutingMeta


def small_meta(**changes: object) -> RoutingMeta:
    """Two layers of four experts, top-2, unless told otherwise."""
    fields: dict[str, object] = {
        "model": "tiny",
        "layers": 2,
        "experts": 4,
        "top_k": 2,
        "expert_bytes": 1000,
        "embedding_width": 3,
        "source": "recorded",
        "gate_content": "full",
    }
    return RoutingMeta(**{**fields, **changes})  # type: ignore[arg-type]


def random_request(
    rng: np.random.Generator, meta: RoutingMeta, tokens: list[int], *, embedding: bool = True
) -> RequestRouting:
    """One request whose iteration i has tokens[i] tokens, each with its own top K."""
    n, shape = len(tokens), (meta.layers, meta.experts)

    def rows() -> npt.NDArray[np.float16]:
        weights = rng.random((n, *shape)) + 0.01
        return np.asarray(weights / weights.sum(axis=2, keepdims=True), dtype=np.float16)

    experts, counts, lengths = [], [], []
    for iteration in range(n):
        for _ in range(meta.layers):
            drawn = rng.random((tokens[iteration], meta.experts)).argsort(axis=1)[:, : meta.top_k]
            here, times = np.unique(drawn, return_counts=True)
            experts.append(here)
            counts.append(times)
            lengths.append(len(here))
    speculation = {}
    for distance in meta.speculation:
        speculation[distance] = rows()
        speculation[distance][:, meta.layers - distance :] = 0
    return RequestRouting(
        gate=rows(),
        experts=np.concatenate(experts).astype(np.uint16),
        token_counts=np.concatenate(counts).astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        embedding=rng.standard_normal((n, meta.embedding_width)).astype(np.float16)
        if embedding and meta.embedding_width
        else None,
        speculation=speculation,
    )


def assert_same(left: RequestRouting, right: RequestRouting) -> None:
    """Both hold the same bytes in every array."""
    assert left.speculation.keys() == right.speculation.keys()
    assert (left.embedding is None) == (right.embedding is None)
    pairs = [
        (getattr(left, name), getattr(right, name)) for name in ("gate", "experts", "token_counts", "offsets")
    ]
    pairs += [(left.speculation[d], right.speculation[d]) for d in left.speculation]
    if left.embedding is not None:
        pairs.append((left.embedding, right.embedding))
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()

"""Small routing traces for tests of the analysis: random rows, chosen experts, embeddings, speculation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from finemoe.traces.routing import RequestRouting, RoutingMeta
from finemoe.traces.routing_file import write_routing
from routing_samples import random_request, small_meta


def analysis_meta(**changes: object) -> RoutingMeta:
    """Five layers of six experts, top-2, with embeddings and speculation one layer ahead."""
    fields: dict[str, object] = {"layers": 5, "experts": 6, "embedding_width": 4, "speculation": (1,)}
    return small_meta(**{**fields, **changes})


def write_trace(
    path: Path, meta: RoutingMeta, *, requests: int = 10, seed: int = 0, embedding: bool = True
) -> list[RequestRouting]:
    """Write a trace of that many requests, each a prompt of five tokens and 5 … 12 decode iterations."""
    rng = np.random.default_rng(seed)
    written = []
    for _ in range(requests):
        tokens = [5] + [1] * int(rng.integers(5, 13))
        written.append(random_request(rng, meta, tokens, embedding=embedding))
    write_routing(path, meta, written)
    return written

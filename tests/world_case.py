"""Small worlds for tests: those of the contract, and a core's options."""

from __future__ import annotations

import numpy as np
from finemoe.policy.contract.routing import ListedRouting, MadeRouting, routing_of
from finemoe.policy.contract.worlds import (
    World,
    cell,
    decisions_of,
    random_world,
    serve,
    small_machine,
    small_model,
)
from finemoe.policy.core import Options
from hypothesis import strategies as st

__all__ = [
    "ListedRouting",
    "MadeRouting",
    "World",
    "cell",
    "decisions_of",
    "plain_options",
    "routing_of",
    "serve",
    "small_machine",
    "small_model",
    "worlds",
]


def plain_options(
    *, layers: int, experts: int, top_k: int, slots_per_device: int, **others: int | float | str | bool
) -> Options:
    """A core's options: one device, experts of one byte, demand loads only, LRU; `others` wins."""
    return {
        "layers": layers,
        "experts": experts,
        "top_k": top_k,
        "devices": 1,
        "slots_per_device": slots_per_device,
        "expert_bytes": 1,
        "predictor": "none",
        "semantic": False,
        "trajectory": False,
        "targets": "distance",
        "popular_start": False,
        "selector": "delta",
        "priority": "distance",
        "prefetch_distance": 1,
        "store_capacity": 1,
        "embedding_width": 0,
        "embedding_work": 0,
        "eviction": "lru",
        "frequency": "run",
        "frequency_decay": 1.0,
        "rank_prefill_by_tokens": False,
        "load_shape": "expert",
        "layer_quota": 0,
        "search_blocks": False,
        "prefetch_blocks": False,
        "preempt_scope": "device",
        **others,
    }


def worlds() -> st.SearchStrategy[World]:
    """Random worlds that run in a few milliseconds."""
    return st.integers(0, 2**32 - 1).map(lambda seed: random_world(np.random.default_rng(seed)))

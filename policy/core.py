"""Python face of the policy core: its configuration for a system, and the core itself.

`Core`, `Feed` and `Searcher` are the compiled classes of csrc/; docs/core.md specifies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from .._core import (
    CHUNK_OPEN,
    CHUNK_READY,
    DEVICE_SHIFT,
    FORWARD_PENDING,
    MORE_CHUNKS,
    SEARCH_PENDING,
    Core,
    CoreConfig,
    Feed,
    Searcher,
)
from .systems import System

__all__ = [
    "CHUNK_OPEN",
    "CHUNK_READY",
    "DEVICE_SHIFT",
    "FORWARD_PENDING",
    "MORE_CHUNKS",
    "OUTBOXES",
    "SEARCH_PENDING",
    "Core",
    "CoreConfig",
    "Feed",
    "Searcher",
    "core_options",
    "make_config",
]

#: Bits of an event's mask that say that a device or the search worker has commands.
OUTBOXES = SEARCH_PENDING | -(1 << DEVICE_SHIFT)

Options = dict[str, int | float | str | bool]


def core_options(
    system: System,
    *,
    layers: int,
    experts: int,
    top_k: int,
    devices: int,
    slots_per_device: int,
    expert_bytes: int,
    prefetch_distance: int,
    store_capacity: int,
    embedding_width: int,
    embedding_work: int,
    frequency: Literal["run", "residency"] = "run",
    frequency_decay: float = 1.0,
    rank_prefill_by_tokens: bool = False,
    preempt_scope: Literal["device", "all"] = "device",
) -> Options:
    """The core's configuration for a system, as plain values (they go into the decision log's metadata).

    embedding_width: values of the routing's embeddings, 0 where it has none. embedding_work: width charged as
    search work for one of them, the model's own.
    """
    return {
        "layers": layers,
        "experts": experts,
        "top_k": top_k,
        "devices": devices,
        "slots_per_device": slots_per_device,
        "expert_bytes": expert_bytes,
        "predictor": system.predictor,
        "semantic": system.semantic,
        "trajectory": system.trajectory,
        "prefetch_distance": prefetch_distance,
        "store_capacity": store_capacity,
        "embedding_width": embedding_width,
        "embedding_work": embedding_work,
        "eviction": system.eviction,
        "frequency": frequency,
        "frequency_decay": frequency_decay,
        "rank_prefill_by_tokens": rank_prefill_by_tokens,
        "load_shape": system.load_shape,
        "search_blocks": False,  # no system of the table waits for a search
        "preempt_scope": preempt_scope,
        "preloaded": system.preloaded,
    }


def make_config(options: Mapping[str, int | float | str | bool]) -> CoreConfig:
    """CoreConfig from `core_options`; CoreError names a value that is out of range."""
    return CoreConfig(**options)

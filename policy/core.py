"""Python face of the policy core: its configuration for a system, and the core itself.

`Core`, `Feed` and `Searcher` are the compiled classes of csrc/; docs/core.md specifies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

from .._core import (
    CHUNK_OPEN,
    CHUNK_READY,
    DEVICE_SHIFT,
    FORWARD_PENDING,
    MORE_CHUNKS,
    PREFETCH_OPEN,
    SEARCH_PENDING,
    Core,
    CoreConfig,
    Feed,
    Searcher,
)
from .system import System

__all__ = [
    "CHUNK_OPEN",
    "CHUNK_READY",
    "DEVICE_SHIFT",
    "FORWARD_PENDING",
    "MORE_CHUNKS",
    "OUTBOXES",
    "POLICY_OPTIONS",
    "PREFETCH_OPEN",
    "SEARCH_PENDING",
    "Core",
    "CoreConfig",
    "Feed",
    "Searcher",
    "core_options",
    "layer_quota",
    "make_config",
    "make_core",
    "owned_experts",
    "popular_experts",
    "total_slots",
]

#: Bits of an event's mask that say that a device or the search worker has commands.
OUTBOXES = SEARCH_PENDING | -(1 << DEVICE_SHIFT)

if TYPE_CHECKING:
    from numpy.typing import NDArray

Options = dict[str, int | float | str | bool]

#: Options that are the user's policy's, not the core's.
POLICY_OPTIONS = ("policy", "policy_digest", "policy_seed")


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
    seed: int = 0,
) -> Options:
    """The core's configuration for a system, as plain values (they go into the decision log's metadata).

    embedding_width: values of the routing's embeddings, 0 where it has none. embedding_work: width charged as
    search work for one of them, the model's own. seed: of a user's policy, which only then is an option, like
    the policy's name and the digest of its source.
    """
    slots = total_slots(layers, experts, devices, slots_per_device)
    options: Options = {
        "layers": layers,
        "experts": experts,
        "top_k": top_k,
        "devices": devices,
        "slots_per_device": slots_per_device,
        "expert_bytes": expert_bytes,
        "predictor": system.predictor,
        "semantic": system.semantic,
        "trajectory": system.trajectory,
        "targets": system.targets,
        "popular_start": system.popular_start,
        "selector": system.selector,
        "priority": system.priority,
        "prefetch_distance": prefetch_distance,
        "store_capacity": store_capacity,
        "embedding_width": embedding_width,
        "embedding_work": embedding_work,
        "eviction": system.eviction,
        "frequency": frequency,
        "frequency_decay": frequency_decay,
        "rank_prefill_by_tokens": rank_prefill_by_tokens,
        "load_shape": system.load_shape,
        "layer_quota": layer_quota(slots, layers, experts, top_k) if system.layer_cache else 0,
        "search_blocks": system.search_blocks,
        "prefetch_blocks": system.prefetch_blocks,
        "preempt_scope": preempt_scope,
    }
    if system.policy is not None and "plugin" in (system.predictor, system.eviction):
        from .plugin_load import load_policy

        digest = load_policy(system.policy).digest
        options |= {"policy": system.policy, "policy_digest": digest, "policy_seed": seed}
    return options


def owned_experts(layers: int, experts: int, devices: int, device: int) -> int:
    """How many experts live on a device: ids are dealt out one by one."""
    return len(range(device, layers * experts, devices))


def total_slots(layers: int, experts: int, devices: int, slots_per_device: int) -> int:
    """Slots over all devices: a device never has more than it owns experts."""
    owned = (owned_experts(layers, experts, devices, device) for device in range(devices))
    return sum(min(slots_per_device, count) for count in owned)


def layer_quota(slots: int, layers: int, experts: int, top_k: int) -> int:
    """Experts that each layer keeps of `slots` over all devices, of which the top K stage prefetches.

    0: less than one per layer; the cache is then one for all layers.
    """
    return experts if slots >= layers * experts else max(0, (slots - top_k) // layers)


def popular_experts(
    counts: NDArray[np.int64], *, devices: int, slots_per_device: int, top_k: int
) -> list[int]:
    """Ids to preload: per device those with most tokens in `counts` [L, J], ties to the lower id.

    A device that cannot hold all its experts keeps slots free for those passing through: as many as one token
    may need there, min(K, experts of a layer on the device), and at least one.
    """
    layers, experts = counts.shape
    kept: list[int] = []
    for device in range(devices):
        owned = np.arange(device, layers * experts, devices)
        if slots_per_device >= len(owned):
            kept += owned.tolist()
            continue
        passing = min(top_k, -(-experts // devices), slots_per_device)
        order = np.argsort(-counts.ravel()[owned], kind="stable")
        kept += owned[order[: slots_per_device - passing]].tolist()
    return sorted(kept)


def make_config(options: Mapping[str, int | float | str | bool]) -> CoreConfig:
    """CoreConfig from `core_options`; CoreError names a value that is out of range."""
    return CoreConfig(**{name: value for name, value in options.items() if name not in POLICY_OPTIONS})


def make_core(options: Mapping[str, int | float | str | bool], log_iterations: int = 0) -> Core:
    """The core of these options, with the user's policy where they name one.

    Raises CoreError for a value out of range, SettingError for a policy that cannot be loaded or whose source
    is not the one of the options, PolicyError where its file or its constructor raises.
    """
    config = make_config(options)
    if "policy" not in options:
        return Core(config, log_iterations)
    from .plugin_load import guarded_policy

    return Core(config, log_iterations, policy=guarded_policy(options))

"""What the observer is told of a core, and what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from ..core import owned_experts


class ObservedCore(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a core (`core_options`, docs/core.md) that say what it may do."""

    layers: int
    experts: int
    devices: int
    slots_per_device: int
    expert_bytes: int
    predictor: str
    semantic: bool
    trajectory: bool
    targets: str
    prefetch_distance: int
    store_capacity: int
    embedding_width: int
    embedding_work: int
    eviction: str
    frequency: str
    frequency_decay: float
    load_shape: str
    layer_quota: int
    search_blocks: bool
    preempt_scope: str

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ObservedCore:
        """From all options of a core."""
        return cls(**{name: options[name] for name in cls.__struct_fields__})

    def slots(self, device: int) -> int:
        """S of a device: never more than the experts it owns."""
        owned = owned_experts(self.layers, self.experts, self.devices, device)
        return min(self.slots_per_device, owned)


@dataclass
class Counters:
    """What an observer can count of a core; lists are [phase][layer], prefill first."""

    layers: int
    activated: list[list[int]] = field(init=False)
    hits: list[list[int]] = field(init=False)
    late: list[list[int]] = field(init=False)
    misses: list[list[int]] = field(init=False)
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    useful_bytes: int = 0
    wasted_bytes: int = 0
    unused_bytes: int = 0
    demand_loads: int = 0
    prefetch_loads: int = 0
    evictions: int = 0
    preemptions: int = 0
    failed_prefetches: int = 0

    def __post_init__(self) -> None:
        for name in ("activated", "hits", "late", "misses"):
            setattr(self, name, [[0] * self.layers for _ in range(2)])

    def values(self) -> dict[str, Any]:
        """A copy of all counters by name."""
        return {name: value for name, value in asdict(self).items() if name != "layers"}

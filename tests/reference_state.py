"""The reference core's values: configuration, counters, and the state of experts and loads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from finemoe.errors import CoreError

Command = tuple[Any, ...]
PHASES = ("prefill", "decode")
MAX_DEVICES = 57  # bits 6 … 62 of an event's mask
CHOICES = {
    "predictor": ("none", "map", "speculate", "activation", "oracle", "plugin"),
    "targets": ("distance", "later"),
    "selector": ("delta", "top_k", "positive"),
    "priority": ("distance", "depth", "layer"),
    "eviction": ("finemoe", "lru", "lfu", "lfru", "activation", "belady", "plugin"),
    "frequency": ("run", "residency"),
    "load_shape": ("expert", "layer"),
    "preempt_scope": ("device", "all"),
}


@dataclass(frozen=True)
class Config:
    """`CoreConfig` of docs/core.md, field by field."""

    layers: int
    experts: int
    top_k: int
    devices: int
    slots_per_device: int
    expert_bytes: int
    predictor: str = "map"
    semantic: bool = True
    trajectory: bool = True
    targets: str = "distance"
    popular_start: bool = False
    selector: str = "delta"
    priority: str = "distance"
    prefetch_distance: int = 1
    store_capacity: int = 4
    embedding_width: int = 0
    embedding_work: int = 0
    eviction: str = "finemoe"
    layer_quota: int = 0
    frequency: str = "run"
    frequency_decay: float = 1.0
    rank_prefill_by_tokens: bool = False
    load_shape: str = "expert"
    search_blocks: bool = False
    prefetch_blocks: bool = False
    preempt_scope: str = "device"

    def slots(self, device: int) -> int:
        """S of a device: never more than the experts it owns."""
        return min(self.slots_per_device, self.owned(device))

    def owned(self, device: int) -> int:
        """How many experts live on a device."""
        return len(range(device, self.layers * self.experts, self.devices))

    @property
    def counts_rows(self) -> bool:
        """Whether every gate says how many tokens of each row each expert received."""
        return self.eviction == "activation" or self.predictor in ("activation", "plugin")

    @property
    def has_policy(self) -> bool:
        """Whether a user's object decides."""
        return "plugin" in (self.predictor, self.eviction)

    def validate(self) -> None:
        """CoreError names what is out of range."""
        for name, choices in CHOICES.items():
            check(getattr(self, name) in choices, f"{name} is one of {choices}")
        check(
            min(self.layers, self.experts, self.devices, self.slots_per_device) >= 1, "sizes are at least 1"
        )
        check(self.devices <= MAX_DEVICES, f"at most {MAX_DEVICES} devices")
        check(1 <= self.top_k <= self.experts, f"top_k {self.top_k} is outside 1 … {self.experts}")
        check(self.prefetch_distance >= 1 and self.store_capacity >= 1, "distance and capacity start at 1")
        check(self.layer_quota >= 0, "a quota is not negative")
        check(
            self.predictor == "activation" or (self.targets == "distance" and not self.popular_start),
            "targets and popular_start are for predictor `activation`",
        )


@dataclass
class Counters:
    """What the core counts; lists are [phase][layer] with phases in the order of PHASES."""

    layers: int
    activated: list[list[int]] = field(init=False)
    hits: list[list[int]] = field(init=False)
    late: list[list[int]] = field(init=False)
    misses: list[list[int]] = field(init=False)
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    useful_bytes: int = 0
    wasted_bytes: int = 0
    demand_loads: int = 0
    prefetch_loads: int = 0
    evictions: int = 0
    preemptions: int = 0
    dropped: int = 0
    searches: int = 0
    late_searches: int = 0
    skipped_updates: int = 0
    failed_prefetches: int = 0
    unused_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("activated", "hits", "late", "misses"):
            setattr(self, name, [[0] * self.layers for _ in PHASES])

    def values(self) -> dict[str, Any]:
        """A copy of all counters by name."""
        return {name: value for name, value in asdict(self).items() if name != "layers"}


@dataclass
class Expert:
    """State of one expert; `offset` counts only while partial."""

    p: float
    status: str = "absent"
    slot: int = -1
    pinned: bool = False
    freq: float = 1.0
    stamp: int = 0
    unused: bool = False
    kept: bool = False
    privileged: bool = False
    spare: bool = False
    failures: int = 0
    offset: int = 0


@dataclass
class Flight:
    """The load in flight of a device."""

    expert: int
    slot: int
    offset: int
    kind: str
    iteration: int
    asked_to_stop: bool = False


def check(condition: bool, problem: str) -> None:
    """Reject an event: CoreError unless the condition holds."""
    if not condition:
        raise CoreError(problem)

"""The reference core's devices: expert states, slots, queues, pump, eviction and counters."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from finemoe.errors import CoreError
from reference_formulas import belady_key, finemoe_key, lfu_key, lru_key, priority

Command = tuple[Any, ...]
PHASES = ("prefill", "decode")


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
    prefetch_distance: int = 1
    store_capacity: int = 4
    embedding_width: int = 0
    embedding_work: int = 0
    eviction: str = "finemoe"
    frequency: str = "run"
    frequency_decay: float = 1.0
    rank_prefill_by_tokens: bool = False
    load_shape: str = "expert"
    search_blocks: bool = False
    preempt_scope: str = "device"
    preloaded: bool = False

    def slots(self, device: int) -> int:
        """S of a device: never more than the experts it owns."""
        return min(self.slots_per_device, len(range(device, self.layers * self.experts, self.devices)))


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


class Devices:
    """Everything below the events: who lies where, what loads next, who has to go."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.l_now = config.layers - 1  # as after the end of an iteration −1: the current step is −1
        self.iteration = -1
        self.gates = 0
        self.out: list[Command] = []
        self.counters = Counters(config.layers)
        start = float(np.float32(1.0 / config.experts))
        self.states = [Expert(p=start) for _ in range(config.layers * config.experts)]
        self.slots: list[list[int]] = [[-1] * config.slots(g) for g in range(config.devices)]
        self.flights: list[Flight | None] = [None] * config.devices
        self.queues: list[set[int]] = [set() for _ in range(config.devices)]
        self.demands: list[set[int]] = [set() for _ in range(config.devices)]
        self.future: dict[int, frozenset[int]] = {}
        if config.preloaded:
            for e, state in enumerate(self.states):
                state.status, state.slot = "resident", e // config.devices
                self.slots[e % config.devices][state.slot] = e

    # -- small questions

    def layer_of(self, expert: int) -> int:
        return expert // self.config.experts

    def device_of(self, expert: int) -> int:
        return expert % self.config.devices

    def flight_of(self, expert: int) -> Flight:
        """The load that brings `expert`; raises CoreError where it is not in flight."""
        if 0 <= expert < len(self.states):
            flight = self.flights[self.device_of(expert)]
            if flight is not None and flight.expert == expert:
                return flight
        raise CoreError(f"expert {expert} is not in flight")

    def partial_of(self, device: int) -> int | None:
        """The device's partial expert."""
        for e in self.slots[device]:
            if e >= 0 and self.states[e].status == "partial":
                return e
        return None

    # -- leaving a slot

    def free_slot(self, expert: int) -> None:
        """Make an expert absent and its slot free."""
        state = self.states[expert]
        self.slots[self.device_of(expert)][state.slot] = -1
        state.status, state.slot, state.unused, state.offset = "absent", -1, False, 0

    def drop_partial(self, expert: int) -> None:
        """Give up a partial expert: its bytes are wasted."""
        self.counters.dropped += 1
        self.counters.wasted_bytes += self.states[expert].offset
        self.free_slot(expert)

    def evict(self, expert: int) -> None:
        """Evict a victim."""
        state = self.states[expert]
        self.counters.evictions += 1
        if state.unused:
            self.counters.wasted_bytes += self.config.expert_bytes
        if self.config.frequency == "residency":
            state.freq = 1.0
        self.free_slot(expert)

    def victim(self, device: int) -> int | None:
        """The resident, unpinned expert of a device with the smallest eviction key."""
        return min(
            (
                e
                for e in self.slots[device]
                if e >= 0 and self.states[e].status == "resident" and not self.states[e].pinned
            ),
            key=self.eviction_key,
            default=None,
        )

    def eviction_key(self, expert: int) -> tuple[float, ...]:
        state, layer = self.states[expert], self.layer_of(expert)
        if self.config.eviction == "lru":
            return lru_key(state.stamp, expert)
        if self.config.eviction == "lfu":
            return lfu_key(state.freq, state.stamp, expert)
        if self.config.eviction == "belady":
            return belady_key(self.next_use(expert), expert)
        return finemoe_key(state.p, state.freq, layer, self.l_now, self.config.layers, expert)

    def next_use(self, expert: int) -> float:
        """The next step after the current one that is known to require the expert, else infinity."""
        now = self.iteration * self.config.layers + self.l_now
        return min((s for s, needed in self.future.items() if s > now and expert in needed), default=math.inf)

    # -- the pump

    def pump(self) -> None:
        """Start what every idle device should load next, in ascending order."""
        for device in range(self.config.devices):
            if self.flights[device] is not None:
                continue
            if self.demands[device]:
                self._start_demand(device)
            elif not self._prefetch_held_back():
                self._start_prefetch(device)

    def _prefetch_held_back(self) -> bool:
        if self.config.preempt_scope != "all":
            return False
        pinned_flight = any(f is not None and self.states[f.expert].pinned for f in self.flights)
        return any(self.demands) or pinned_flight

    def _start_demand(self, device: int) -> None:
        expert = min(self.demands[device])
        self.demands[device].remove(expert)
        if self.states[expert].status == "partial":
            self._load(expert, self.states[expert].slot, "demand", -1)
            return
        place = self._room(device)
        if place is None:
            partial = self.partial_of(device)
            assert partial is not None, "a chunk never needs more slots than the device has"
            assert not self.states[partial].pinned, "a pinned partial expert is never reclaimed"
            place = (self.states[partial].slot, -1)
            self.drop_partial(partial)
        self._load(expert, place[0], "demand", place[1])

    def _start_prefetch(self, device: int) -> None:
        partial = self.partial_of(device)
        if partial is not None:
            self._load(partial, self.states[partial].slot, "prefetch", -1)
            return
        oracle = self.config.predictor == "oracle"
        expert = self.oracle_choice(device) if oracle else self.queue_choice(device)
        if expert is None:
            return
        place = self._room(device)
        if place is not None:
            self.queues[device].discard(expert)
            self.states[expert].stamp = self.gates
            self._load(expert, place[0], "prefetch", place[1])

    def oracle_choice(self, device: int) -> int | None:
        """The next expert that will be missing, unless whoever leaves for it is needed by then."""
        now = self.iteration * self.config.layers + self.l_now
        mine = range(device, len(self.states), self.config.devices)
        absent = [e for e in mine if self.states[e].status == "absent"]
        missing = [(s, e) for s in self.future if s > now for e in absent if e in self.future[s]]
        if not missing:
            return None
        step, expert = min(missing)
        victim = self.victim(device)
        if -1 not in self.slots[device] and victim is not None and self.next_use(victim) <= step:
            return None
        return expert

    def queue_choice(self, device: int) -> int | None:
        """The queued expert of the largest priority."""
        return max(
            self.queues[device],
            key=lambda e: (priority(self.states[e].p, self.layer_of(e), self.l_now), -e),
            default=None,
        )

    def _room(self, device: int) -> tuple[int, int] | None:
        """(slot, evicted expert or −1): the lowest free slot, else the victim's."""
        if -1 in self.slots[device]:
            return self.slots[device].index(-1), -1
        victim = self.victim(device)
        if victim is None:
            return None
        slot = self.states[victim].slot
        self.evict(victim)
        return slot, victim

    def _load(self, expert: int, slot: int, kind: str, evicts: int) -> None:
        device, state = self.device_of(expert), self.states[expert]
        offset = state.offset
        state.status, state.slot = "loading", slot
        self.slots[device][slot] = expert
        self.flights[device] = Flight(expert, slot, offset, kind, self.iteration)
        size = self.config.expert_bytes - offset
        self.out.append(("Load", expert, device, slot, offset, size, kind, evicts))

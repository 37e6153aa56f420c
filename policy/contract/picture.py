"""What an outside observer knows of a policy core: its devices, its counters, its requirement.

Built from events and commands alone; `rules` checks commands against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .observed import Counters, ObservedCore
from .searches import SearchObserver


def rule(holds: object, text: str) -> None:
    """Raise AssertionError with the rule's text unless it holds."""
    if not holds:
        raise AssertionError(text)


@dataclass
class Transfer:
    """A load in flight as its commands tell it."""

    expert: int
    slot: int
    offset: int
    kind: str
    iteration: int
    asked_to_stop: bool = False


@dataclass
class DeviceView:
    """One device as seen from outside."""

    slots: list[int]
    transfer: Transfer | None = None
    partial: dict[int, int] = field(default_factory=dict)  # expert → bytes done

    def holds_room(self) -> bool:
        return -1 in self.slots


class Picture:
    """The picture, and what every event does to it before its commands."""

    def __init__(self, config: ObservedCore) -> None:
        self.config = config
        self.total = config.layers * config.experts
        self.devices = [DeviceView([-1] * config.slots(g)) for g in range(config.devices)]
        self.resident: set[int] = set()
        self.pinned: set[int] = set()
        self.unused: set[int] = set()
        self.kept: set[int] = set()
        self.privileged: set[int] = set()
        self.spare: set[int] = set()  # who may be, where the rule cannot be followed
        self.uncovered: set[int] = set()
        self.chunk: set[int] = set()
        self.chunk_size = 0
        self.layer = config.layers - 1
        self.iteration = -1
        self.open = False
        self.aborted = False
        self.failures: dict[int, int] = {}
        self.gates = 0
        self.stamps = [0] * self.total
        self.freq = [1.0] * self.total
        self.decode = False
        self.searches = SearchObserver(config)
        self.counters = Counters(config.layers)

    @property
    def layer_done(self) -> bool:
        """Whether the current layer is wholly computed."""
        return not self.chunk and not self.uncovered

    def computable(self) -> list[int]:
        """Members of the current chunk that could be computed now, as ids."""
        return sorted(self.chunk & self.resident)

    # -- what an event does to the picture before its commands

    def _begin_iteration(self, rows: Sequence[Any]) -> None:
        self.open, self.layer = True, -1
        self.iteration += 1
        self.decode = rows[0].phase == "decode"

    def _seed_store(self, *_: Any) -> None:
        assert self.iteration < 0

    def _preload(self, experts: Sequence[int]) -> None:
        assert self.iteration < 0
        self.resident = set(experts)
        self.kept = set(experts)
        for device in range(self.config.devices):
            mine = sorted(e for e in experts if e % self.config.devices == device)
            self.devices[device].slots[: len(mine)] = mine

    def _gate(self, layer: int, probabilities: Any, experts: Sequence[int], *counts: Any) -> None:
        rule(self.layer_done, "rule 3: one requirement at a time")
        base = layer * self.config.experts
        self.layer = layer
        self.gates += 1
        wanted = range(self.config.experts) if self.config.load_shape == "layer" else experts
        required = {base + j for j in wanted}
        loading = {d.transfer.expert for d in self.devices if d.transfer is not None}
        activated = {base + j for j in experts}
        phase = int(self.decode)
        for name, count in (
            ("activated", len(activated)),
            ("hits", len(activated & self.resident)),
            ("late", len(activated & loading)),
            ("misses", len(activated - self.resident - loading)),
        ):
            getattr(self.counters, name)[phase][layer] += count
        self.pinned = required & (self.resident | loading)
        self.useful(required & self.unused)
        self.spare -= required
        self.uncovered = required
        for e in required:
            self.stamps[e] = self.gates
            self.freq[e] += 1.0
        self._privilege(sorted(required & self.resident))
        rule(
            not any(device.partial for device in self.devices),
            "a partial expert resumes before the next gate",
        )

    def _computed(self, layer: int, experts: Sequence[int]) -> None:
        ids = set(experts)
        assert ids <= self.chunk & self.resident
        self.chunk -= ids
        self.pinned -= ids
        if self.layer_done and self.config.layer_quota:
            self._shrink_layer()

    def _end_iteration(self, finished: Sequence[int]) -> None:
        assert self.layer_done
        self.freq = [freq * self.config.frequency_decay for freq in self.freq]
        self.open = False
        rule(not any(device.partial for device in self.devices), "a partial expert resumes before the end")

    def _search_done(self, ticket: int) -> None:
        pass

    def _speculation(self, layer: int, target: int, probabilities: Any) -> None:
        assert layer < target

    def _foresight(self, step: int, required: Any) -> None:
        pass

    def _loaded(self, expert: int) -> None:
        transfer = self.landed(expert, self.config.expert_bytes)
        self.resident.add(expert)
        self.failures[expert] = 0
        if transfer.kind == "prefetch" and expert not in self.pinned:
            self.unused.add(expert)
        elif transfer.kind == "prefetch":
            self.counters.useful_bytes += self.config.expert_bytes

    def _paused(self, expert: int, bytes_done: int) -> None:
        transfer = self.landed(expert, bytes_done)
        assert transfer.asked_to_stop
        device = self.device(expert)
        rule(not device.partial, "rule 6: at most one partial expert")
        device.partial[expert] = bytes_done
        past = expert // self.config.experts <= self.layer
        ended = transfer.iteration != self.iteration or not self.open
        if expert in self.pinned:
            self.counters.useful_bytes += bytes_done
        elif past or ended:
            self.waste_partial(device, expert)

    def _load_failed(self, expert: int, reason: str) -> None:
        transfer = self.landed(expert, -1)
        self.device(expert).slots[transfer.slot] = -1
        if transfer.kind == "prefetch":
            self.counters.wasted_bytes += transfer.offset
        if expert in self.pinned:
            self.failures[expert] = self.failures.get(expert, 0) + 1
        else:
            self.counters.failed_prefetches += 1

    # -- parts

    def device(self, expert: int) -> DeviceView:
        return self.devices[expert % self.config.devices]

    def demands(self, g: int) -> list[int]:
        """Chunk members of a device that are neither resident nor in flight, ascending."""
        transfer = self.devices[g].transfer
        flying = -1 if transfer is None else transfer.expert
        return sorted(e for e in self.chunk - self.resident if e % self.config.devices == g and e != flying)

    @property
    def follows_rule(self) -> bool:
        """Whether events and commands tell who is evicted."""
        return self.config.eviction in ("lru", "lfu", "lfru")

    def settled(self, layer: int) -> set[int]:
        """Experts of a layer that count against its quota, or may."""
        flights = {d.transfer.expert for d in self.devices if d.transfer is not None}
        spare = self.spare if self.follows_rule else set()
        used = (self.resident - self.unused - spare) | (flights & self.pinned)
        return {e for e in used if e // self.config.experts == layer}

    def first_out(self, victims: set[int]) -> int:
        """Who of these the rule evicts, where it can be followed."""
        visits = {e: 0.0 if e in self.privileged else self.freq[e] for e in victims}
        keys: dict[str, Callable[[int], tuple[float, ...]]] = {
            "lru": lambda e: (self.stamps[e], e),
            "lfu": lambda e: (self.freq[e], self.stamps[e], e),
            "lfru": lambda e: (e in self.privileged, visits[e], self.stamps[e], e),
        }
        return min(victims, key=keys[self.config.eviction])

    def _shrink_layer(self) -> None:
        """The layer is wholly computed: what exceeds its quota is spare."""
        settled = self.settled(self.layer)
        loose = settled - self.kept
        if not self.follows_rule and len(settled) > self.config.layer_quota:
            self.spare |= loose
        while self.follows_rule and len(settled) > self.config.layer_quota and loose:
            expert = self.first_out(loose)
            self.spare.add(expert)
            settled.remove(expert)
            loose.remove(expert)

    def leave(self, expert: int) -> None:
        """An expert is evicted; its slot is the caller's."""
        if expert in self.unused:
            self.unused.remove(expert)
            self.counters.wasted_bytes += self.config.expert_bytes
        if self.config.frequency == "residency":
            self.freq[expert] = 1.0
        self.privileged.discard(expert)
        self.spare.discard(expert)
        self.resident.remove(expert)
        self.counters.evictions += 1

    def _privilege(self, hits: list[int]) -> None:
        """The protected part of each device's cache: half of its slots, for what was hit last."""
        for e in hits:
            slots = self.device(e).slots
            protected = self.privileged & set(slots)
            if len(protected - {e}) >= len(slots) // 2 > 0:
                self.privileged.remove(min(protected - {e}, key=lambda other: (self.stamps[other], other)))
            if len(slots) >= 2:
                self.privileged.add(e)

    def landed(self, expert: int, bytes_done: int) -> Transfer:
        device = self.device(expert)
        transfer = device.transfer
        assert transfer is not None, "nothing is in flight on the device"
        rule(transfer.expert == expert, "another expert is in flight")
        device.transfer = None
        if bytes_done >= 0:
            moved = bytes_done - transfer.offset
            whole = int(bytes_done == self.config.expert_bytes)
            if transfer.kind == "demand":
                self.counters.demand_bytes += moved
                self.counters.demand_loads += whole
            else:
                self.counters.prefetch_bytes += moved
                self.counters.prefetch_loads += whole
        return transfer

    def useful(self, experts: set[int]) -> None:
        self.unused -= experts
        self.counters.useful_bytes += len(experts) * self.config.expert_bytes

    def waste_partial(self, device: DeviceView, expert: int) -> None:
        self.counters.wasted_bytes += device.partial.pop(expert)
        device.slots[device.slots.index(expert)] = -1

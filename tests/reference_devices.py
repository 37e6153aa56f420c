"""The reference core's devices: queues, demands and the pump that gives every idle device its next load."""

from __future__ import annotations

from reference_eviction import Slots
from reference_formulas import priority
from reference_plugin import UserPolicy
from reference_state import Config, Flight


class Devices(Slots):
    """Everything below the events."""

    def __init__(self, config: Config, policy: UserPolicy | None = None) -> None:
        super().__init__(config, policy)
        self.queues: list[set[int]] = [set() for _ in range(config.devices)]
        self.demands: list[set[int]] = [set() for _ in range(config.devices)]

    def prefetch_open(self) -> bool:
        """Bit 5 of the mask: prefetches of the next layer are still to come."""
        following = self.l_now + 1
        return self.config.prefetch_blocks and any(
            flight is not None and following in map(self.layer_of, (flight.expert, *queue))
            for flight, queue in zip(self.flights, self.queues, strict=True)
        )

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
        quota_victim = self.quota_victim(expert)
        if quota_victim is not None:
            place = self._take_over(quota_victim)
        elif -1 in self.slots[device]:
            place = self.slots[device].index(-1), -1
        elif (victim := self.victim(device)) is not None:
            place = self._take_over(victim)
        else:
            partial = self.partial_of(device)
            assert partial is not None, "a chunk never needs more slots than the device has"
            assert not self.states[partial].pinned, "a pinned partial expert is never reclaimed"
            place = self.states[partial].slot, -1
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
        if -1 in self.slots[device]:
            place = self.slots[device].index(-1), -1
        elif (victim := self.prefetch_victim(device)) is not None:
            place = self._take_over(victim)
        else:
            return
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
        victim = self.prefetch_victim(device)
        if -1 not in self.slots[device] and victim is not None and self.next_use(victim) <= step:
            return None
        return expert

    def queue_choice(self, device: int) -> int | None:
        """The queued expert of the largest priority."""
        return max(self.queues[device], key=lambda e: (*self._priority(e), -e), default=None)

    def _priority(self, expert: int) -> tuple[float, ...]:
        config, p = self.config, self.states[expert].p
        return priority(config.priority, p, self.layer_of(expert), self.l_now, config.layers)

    def _take_over(self, victim: int) -> tuple[int, int]:
        """(slot, evicted expert) of a victim that leaves now."""
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

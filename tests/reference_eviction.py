"""The reference core's slots: who lies where, who may leave, and who has to go first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from reference_activation import Activations
from reference_formulas import activation_key, belady_key, finemoe_key, lfru_key, lfu_key, lru_key
from reference_plugin import ExpertView, UserPolicy
from reference_state import Command, Config, Counters, Expert, Flight, check

T = TypeVar("T")


class Slots:
    """Expert states, slot tables and eviction; `l_now` and `iteration` say where the run is."""

    def __init__(self, config: Config, policy: UserPolicy | None = None) -> None:
        config.validate()
        check(config.has_policy == (policy is not None), "a policy comes with `plugin` and only with it")
        self.config = config
        self.policy = policy
        self.aborted = False
        self.l_now = -1
        self.iteration = -1
        self.gates = 0
        self.out: list[Command] = []
        self.counters = Counters(config.layers)
        start = float(np.float32(1.0 / config.experts))
        self.states = [Expert(p=start) for _ in range(config.layers * config.experts)]
        self.slots: list[list[int]] = [[-1] * config.slots(g) for g in range(config.devices)]
        self.flights: list[Flight | None] = [None] * config.devices
        self.future: dict[int, frozenset[int]] = {}
        self.activations = Activations(config.layers, config.experts)

    # -- small questions

    def layer_of(self, expert: int) -> int:
        return expert // self.config.experts

    def device_of(self, expert: int) -> int:
        return expert % self.config.devices

    def held(self, device: int) -> list[int]:
        """The experts that have a slot of the device."""
        return [e for e in self.slots[device] if e >= 0]

    def flight_of(self, expert: int) -> Flight:
        """The load that brings `expert`; raises CoreError where it is not in flight."""
        flight = self.flights[self.device_of(expert)] if 0 <= expert < len(self.states) else None
        check(flight is not None and flight.expert == expert, f"expert {expert} is not in flight")
        assert flight is not None
        return flight

    def partial_of(self, device: int) -> int | None:
        """The device's partial expert."""
        for e in self.held(device):
            if self.states[e].status == "partial":
                return e
        return None

    def settled(self, layer: int) -> list[int]:
        """Experts of a layer that count against its quota: in use, not merely prefetched."""
        base = layer * self.config.experts
        return [e for e in range(base, base + self.config.experts) if self._is_settled(self.states[e])]

    def _is_settled(self, state: Expert) -> bool:
        if state.status == "resident":
            return not state.unused and not state.spare
        return state.status == "loading" and state.pinned

    # -- entering and leaving a slot

    def keep(self, experts: Sequence[int]) -> None:
        """Make these experts resident for good; every slot is still free."""
        for e in experts:
            table, state = self.slots[self.device_of(e)], self.states[e]
            state.status, state.slot, state.kept = "resident", table.index(-1), True
            table[state.slot] = e

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
        state.privileged = state.spare = False
        self.free_slot(expert)

    def give_privileges(self, required: Sequence[int]) -> None:
        """`lfru`: what the gate finds resident is privileged, the least recent of too many no longer."""
        for e in required:
            device = self.device_of(e)
            most = len(self.slots[device]) // 2
            if self.states[e].status != "resident" or most == 0:
                continue
            self.states[e].privileged = True
            privileged = [other for other in self.held(device) if self.states[other].privileged]
            if len(privileged) > most:
                privileged.remove(e)
                oldest = min(privileged, key=lambda other: (self.states[other].stamp, other))
                self.states[oldest].privileged = False

    def enforce_quota(self, layer: int) -> None:
        """Settled experts of a layer that is wholly computed become spare until it is within its quota."""
        while len(settled := self.settled(layer)) > self.config.layer_quota:
            victim = self.first_to_go(settled)
            if victim is None:
                return
            self.states[victim].spare = True

    # -- victims

    def first_to_go(self, experts: Iterable[int]) -> int | None:
        """Of these, the resident expert of the smallest eviction key that is neither pinned nor kept."""
        candidates = [e for e in experts if self.may_leave(self.states[e])]
        return min(candidates, key=self.eviction_key, default=None)

    def may_leave(self, state: Expert) -> bool:
        return state.status == "resident" and not state.pinned and not state.kept

    def victim(self, device: int) -> int | None:
        """Who leaves for a demand load: with a quota, first of all who is not settled in its layer."""
        staged = self.staged_victim(device) if self.config.layer_quota > 0 else None
        return self.first_to_go(self.held(device)) if staged is None else staged

    def prefetch_victim(self, device: int) -> int | None:
        """Who leaves for a prefetch: with a quota nobody who is settled or may be soon."""
        if self.config.layer_quota > 0:
            return self.staged_victim(device)
        return self.first_to_go(self.held(device))

    def staged_victim(self, device: int) -> int | None:
        """Of the experts that a layer has beside its quota, who leaves first."""
        began = self.iteration * self.config.layers  # gates before this iteration's first
        unused = [e for e in self.held(device) if self.states[e].unused]
        past = [e for e in unused if self.layer_of(e) <= self.l_now or self.states[e].stamp < began]
        return self.first_to_go(past + [e for e in self.held(device) if self.states[e].spare])

    def quota_victim(self, expert: int) -> int | None:
        """Who leaves for a demand load of a layer that has its quota."""
        settled = self.settled(self.layer_of(expert))
        if self.config.layer_quota == 0 or len(settled) < self.config.layer_quota:
            return None
        device = self.device_of(expert)
        return self.first_to_go(e for e in settled if self.device_of(e) == device)

    def eviction_key(self, expert: int) -> tuple[float, ...]:
        state, layer, config = self.states[expert], self.layer_of(expert), self.config
        if config.eviction == "lru":
            return lru_key(state.stamp, expert)
        if config.eviction == "lfu":
            return lfu_key(state.freq, state.stamp, expert)
        if config.eviction == "lfru":
            return lfru_key(state.privileged, state.freq, state.stamp, expert)
        if config.eviction == "activation":
            share = self.activations.share(layer, expert % config.experts)
            return activation_key(share, layer, config.layers, state.stamp, expert)
        if config.eviction == "belady":
            return belady_key(self.next_use(expert), expert)
        if config.eviction == "plugin":
            return (self.user_key(expert), state.stamp, expert)
        return finemoe_key(state.p, state.freq, layer, self.l_now, config.layers, expert)

    def next_use(self, expert: int) -> float:
        """The next step after the current one that is known to require the expert, else infinity."""
        now = self.iteration * self.config.layers + self.l_now
        return min((s for s, needed in self.future.items() if s > now and expert in needed), default=math.inf)

    # -- the user's policy

    def ask(self, question: Callable[[UserPolicy], T]) -> T:
        """The policy's answer; an exception, also that of a useless answer, ends the run."""
        assert self.policy is not None
        try:
            return question(self.policy)
        except BaseException:
            self.aborted = True
            raise

    def user_key(self, expert: int) -> float:
        state, config = self.states[expert], self.config
        view = ExpertView(
            layer=self.layer_of(expert),
            expert=expert % config.experts,
            probability=state.p,
            frequency=state.freq,
            last_used=state.stamp,
            layer_now=self.l_now,
            layers=config.layers,
        )

        def question(policy: UserPolicy) -> float:
            value = float(policy.eviction_key(view))
            check(not math.isnan(value), f"the eviction key of expert {expert} is not a number")
            return value

        return self.ask(question)

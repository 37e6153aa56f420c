"""The rules of DESIGN.md, checked from outside: an observer that sees only events and commands.

It never asks the core. It keeps its own picture of the devices (what is resident, partial, in flight, pinned)
and raises AssertionError where a command breaks a rule. The random walk uses the same picture as its world.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .picture import DeviceView, Picture, Transfer, rule
from .searches import Command

ORDER = {"Abort": 0, "PreemptPrefetch": 1, "Wait": 2, "Search": 3, "WaitSearch": 3, "Load": 4}


class RuleObserver(Picture):
    """Feed every accepted event and its commands to `observe`, in order."""

    def observe(
        self,
        event: str,
        arguments: Sequence[Any],
        commands: Sequence[Command],
    ) -> None:
        """Check the commands that followed one accepted event; raises AssertionError."""
        rule(not self.aborted, "nothing is accepted after an abort")
        getattr(self, f"_{event}")(*arguments)
        self.searches.expect(event, arguments, commands, self.layer)
        places = [ORDER[c[0]] for c in commands]
        rule(places == sorted(places), f"commands out of order: {commands}")
        for name in ("PreemptPrefetch", "Load"):
            devices = [c[1] if name == "PreemptPrefetch" else c[2] for c in commands if c[0] == name]
            rule(devices == sorted(set(devices)), f"{name}: devices out of order: {commands}")
        # A preemption is caused by the chunk whose Wait follows it: take that chunk in first.
        for command in sorted(commands, key=lambda c: c[0] != "Wait"):
            handler = getattr(self, f"_on_{command[0]}", None)
            if handler is not None:
                handler(*command[1:])
        self._after(event, commands)

    def check_counters(self, counters: dict[str, Any]) -> None:
        """Compare with the core's counters; `dropped` cannot be seen from outside."""
        self.count_unused()
        spent = self.counters.useful_bytes + self.counters.wasted_bytes + self.counters.unused_bytes
        rule(self.counters.prefetch_bytes == spent, "prefetch bytes are useful, wasted or unused")
        mine = self.counters.values() | self.searches.counters()
        for name, value in mine.items():
            rule(counters[name] == value, f"{name}: core {counters[name]}, outside {value}")

    def count_unused(self) -> None:
        """Bring the unused prefetch bytes up to date."""
        held = sum(bytes_ for d in self.devices for e, bytes_ in d.partial.items() if e not in self.pinned)
        flights = [d.transfer for d in self.devices if d.transfer is not None]
        held += sum(t.offset for t in flights if t.kind == "prefetch")
        self.counters.unused_bytes = len(self.unused) * self.config.expert_bytes + held

    # -- commands

    def _on_Wait(self, experts: Sequence[int]) -> None:  # noqa: N802
        members = set(experts)
        rule(list(experts) == sorted(members), "a wait set ascends")
        rule(not self.chunk, "rule 4: a chunk follows when the one before is computed")
        rule(members and members <= self.uncovered, "rule 4: chunks split the requirement")
        rule(self.pinned <= members, "rule 3: what is resident or in flight goes first")
        rule(self.uncovered & self.kept <= members, "rule 4: kept experts are in the first chunk")
        for g, device in enumerate(self.devices):
            mine = sum(e % self.config.devices == g for e in members - self.kept)
            left = sum(e % self.config.devices == g for e in self.uncovered - self.kept)
            room = sum(e not in self.kept for e in device.slots)
            rule(mine == min(left, room), "rule 4: a chunk takes what the device can hold")
        self.uncovered -= members
        self.chunk = members
        self.chunk_size = len(members)
        self.pinned |= members

    def _on_PreemptPrefetch(self, g: int) -> None:  # noqa: N802
        transfer = self.devices[g].transfer
        assert transfer is not None, "rule 6: nothing to preempt"
        rule(
            transfer.kind == "prefetch" and transfer.expert not in self.pinned,
            "rule 6: only a prefetch stops",
        )
        rule(not transfer.asked_to_stop, "rule 6: asked once")
        everywhere = self.config.preempt_scope == "all"
        rule(
            any(self.demands(h) for h in range(self.config.devices) if everywhere or h == g),
            "rule 6: no demand",
        )
        transfer.asked_to_stop = True
        self.counters.preemptions += 1

    def _on_Load(  # noqa: N802
        self, expert: int, g: int, slot: int, offset: int, size: int, kind: str, evicts: int
    ) -> None:
        config = self.config
        rule(g == expert % config.devices and 0 <= expert < self.total, "an expert lives on its own device")
        device = self.devices[g]
        rule(device.transfer is None, "rule 5: one load in flight")
        rule(expert not in self.resident, "a resident expert is not loaded again")
        rule(
            offset == device.partial.get(expert, 0) and offset + size == config.expert_bytes,
            "offset and bytes",
        )
        rule(0 <= slot < len(device.slots), "rule 2: the slot exists")
        demands = self.demands(g)
        if kind == "demand":
            rule(demands and expert == demands[0], "rule 6: demand loads in ascending id")
        else:
            self._check_prefetch(g, expert)
            if expert not in device.partial:
                self.stamps[expert] = self.gates
        self._check_slot(device, expert, slot, kind, evicts)
        device.partial.pop(expert, None)
        device.slots[slot] = expert
        device.transfer = Transfer(expert, slot, offset, kind, self.iteration)

    def _on_Abort(self, expert: int, reason: str) -> None:  # noqa: N802
        rule(self.failures.get(expert) == 3, "Abort follows the third failure in a row")
        self.aborted = True

    # -- parts

    def _check_prefetch(self, g: int, expert: int) -> None:
        everywhere = self.config.preempt_scope == "all"
        held_back = range(self.config.devices) if everywhere else [g]
        rule(not any(self.demands(h) for h in held_back), "rule 6: demand before prefetch")
        if everywhere:
            flights = [d.transfer.expert for d in self.devices if d.transfer is not None]
            rule(not self.pinned & set(flights), "rule 6: no prefetch beside a demand (scope all)")
        rule(expert not in self.pinned, "what is required is loaded on demand")
        partial = self.devices[g].partial
        rule(not partial or expert in partial, "rule 6: the partial prefetch resumes first")
        if self.config.predictor != "oracle":
            ahead = expert // self.config.experts > self.layer
            rule(
                self.open and (ahead or (expert in self.uncovered and expert in partial)), "rule 5: too late"
            )

    def _check_slot(self, device: DeviceView, expert: int, slot: int, kind: str, evicts: int) -> None:
        if expert in device.partial:
            rule(device.slots[slot] == expert and evicts == -1, "a partial expert goes on in its own slot")
            return
        victims = (self.resident & set(device.slots)) - self.pinned - self.kept
        in_layer, staged = self._quota_victims(expert, victims)
        # Where the rule cannot be followed from outside, nobody sees who is spare.
        sure = self.follows_rule
        if kind == "demand" and in_layer and (sure or (evicts >= 0 and device.holds_room())):
            victims = in_layer
        elif device.holds_room():
            rule(evicts == -1 and slot == device.slots.index(-1), "the lowest free slot comes first")
            return
        elif self.config.layer_quota and (kind == "prefetch" or (sure and staged)):
            victims = staged
        if not victims:
            rule(kind == "demand" and evicts == -1 and device.slots[slot] in device.partial, "rule 7")
            self.waste_partial(device, device.slots[slot])
            return
        rule(device.slots[slot] == evicts, "rule 2: the load names its victim")
        rule(evicts in victims, "rules 1 and 7: neither pinned, nor kept, nor in flight")
        rule(not sure or self.first_out(victims) == evicts, f"{self.config.eviction} takes another one")
        self.leave(evicts)

    def _quota_victims(self, expert: int, victims: set[int]) -> tuple[set[int], set[int]]:
        """(who leaves for a demand of this expert's layer, who leaves before others), with a layer quota."""
        if not self.config.layer_quota:
            return set(), set()
        settled = self.settled(expert // self.config.experts)
        began = self.iteration * self.config.layers  # gates before this iteration's first
        past = {e for e in self.unused if e // self.config.experts <= self.layer or self.stamps[e] < began}
        enough = len(settled) >= self.config.layer_quota
        return settled & victims if enough else set(), (past | self.spare) & victims

    def _after(self, event: str, commands: Sequence[Command]) -> None:
        waited = any(c[0] == "Wait" for c in commands)
        rule(waited or event != "gate", "every gate opens a chunk")
        rule(not waited or event in ("gate", "computed"), "only a gate or a finished chunk opens one")
        rule(self.chunk or not self.uncovered, "rule 4: the next chunk follows at once")
        rule(self.aborted == any(n >= 3 for n in self.failures.values()), "three failures abort")
        if self.aborted:
            rule(not any(c[0] == "Load" for c in commands), "nothing starts after an abort")
            return
        demanded = [self.demands(g) for g in range(self.config.devices)]
        flights = [d.transfer for d in self.devices if d.transfer is not None]
        everywhere = self.config.preempt_scope == "all"
        busy = everywhere and (any(demanded) or any(t.expert in self.pinned for t in flights))
        for g, device in enumerate(self.devices):
            rule(len(device.partial) <= 1, "rule 6: at most one partial expert")
            held = [e for e in device.slots if e >= 0]
            rule(len(held) == len(set(held)), "rule 2: an expert has one slot")
            if device.transfer is None:
                rule(not demanded[g], "rule 5: an idle device takes its demand")
                rule(not device.partial or busy, "rule 5: an idle device resumes its partial prefetch")
            elif waited and device.transfer.expert not in self.pinned and demanded[g]:
                rule(device.transfer.asked_to_stop, "rule 6: a prefetch in the way is stopped")
        slots = {e for d in self.devices for e in d.slots if e >= 0}
        held_any = self.resident | {e for d in self.devices for e in d.partial} | {t.expert for t in flights}
        rule(slots == held_any, "rule 2: what is held has a slot and nothing else has")

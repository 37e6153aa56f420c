"""The engine process: steps of the scheduler, layer by layer, against one core."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import simpy

from ..policy.core import (
    CHUNK_OPEN,
    CHUNK_READY,
    DEVICE_SHIFT,
    FORWARD_PENDING,
    MORE_CHUNKS,
    OUTBOXES,
    PREFETCH_OPEN,
    SEARCH_PENDING,
    Core,
    Feed,
)
from ..serving.logs import IterationLog
from .engine_parts import ComputeTimes, GateFeed, Shape
from .events import ENGINE, Timer
from .foresight import Foresight
from .host_memory import make_links
from .link import Copies, hand_over
from .placement import Placement
from .search_worker import SearchWorker

if TYPE_CHECKING:
    from ..calibration.profile import HardwareProfile
    from ..policy.system import System
    from ..serving.scheduler import Step
    from .memory import MemoryPlan

_READY_WHOLE = CHUNK_READY | MORE_CHUNKS  # only the first: the whole layer can be computed

Process = Generator[simpy.Event, None, None]


class Engine:
    """Runs iterations in simulated time and notes each in an IterationLog."""

    def __init__(
        self,
        env: simpy.Environment,
        core: Core,
        feed: GateFeed,
        model: Shape,
        compute: ComputeTimes,
        profile: HardwareProfile,
        system: System,
        prefetch_distance: int,
        memory: MemoryPlan,
    ) -> None:
        self._env = env
        self._core = core
        self._feed = feed
        self._layers = model.layers
        self._experts = model.experts
        self._compute = compute
        self._slowdown = profile.copy_slowdown
        self._as_ready = system.compute_order == "as_ready"
        self._speculated = [
            system.speculated(layer, model.layers, prefetch_distance) for layer in range(model.layers)
        ]
        self._speculates = system.predictor == "speculate"
        self._copies = Copies()
        self.links, self.host_memory = make_links(
            env, core, profile, memory, self._copies, self.deliver, write_back=system.write_back
        )
        self.placement = Placement(profile.devices) if memory.replicated else None
        self.worker = SearchWorker(env, core, profile, self.deliver)
        self.foresight = None
        if system.predictor == "oracle" and isinstance(feed, Feed):  # a log has its own
            self.foresight = Foresight(core, feed, model.layers)
        self.log = IterationLog()
        self.compute_s = 0.0
        self._stall_s = self._search_wait_s = self._computed_s = 0.0  # of the iteration
        self._link_busy_s = 0.0  # of all links, until the end of the last iteration
        self._ended_s = 0.0
        self._timer = Timer(env, ENGINE)
        # While the forward pass waits for loads: the mask bits that end the wait, when it began, and the
        # computation that follows it.
        self._wakes = 0
        self._stalled_s = self._then_s = 0.0
        self._mask = 0  # the last that was delivered
        self._totals = core.totals()

    def deliver(self, mask: int) -> None:
        """Hand the core's commands to those who carry them out; wake the forward pass where it can go on."""
        if mask >> DEVICE_SHIFT:
            hand_over(self._core, self.links)
        if mask & SEARCH_PENDING:
            self.worker.drain()
        self._mask = mask
        if mask & self._wakes:
            self._wakes = 0
            self._stall_s += self._env.now - self._stalled_s
            self._timer.fire(self._compute_s(self._then_s))

    def link_busy_until(self, now_s: float) -> float:
        """Busy seconds of all links together, copies in flight included."""
        return sum(link.busy_until(now_s) for link in self.links)

    def iterate(self, step: Step) -> Process:
        """One step of the scheduler, all layers."""
        env, core, feed = self._env, self._core, self._feed
        start_s = env.now
        link_busy_s = self._link_busy_s if start_s == self._ended_s else self.link_busy_until(start_s)
        self._stall_s = self._search_wait_s = self._computed_s = 0.0
        tokens, states = step.tokens, step.requests
        feed.select(
            [state.request.index for state in states],
            [state.generated for state in states],
            [state.step_tokens for state in states],
            step.phase == "prefill",
        )
        counts = feed.token_counts()
        attention_s, overhead_s, exchange_s, gate_s = self._dense_s(step)
        expert_s = (self._compute.expert_s(counts) + exchange_s).tolist()
        copying = self.links[0] if self.placement is None else self._copies
        start, part_by_part = self._timer.start, self._as_ready

        mask = feed.begin_iteration(core, env.now)
        if mask & OUTBOXES:
            self.deliver(mask)
        if mask & FORWARD_PENDING:
            yield from self._searches(mask)
        for layer in range(self._layers):
            layer_s = attention_s + gate_s * len(self._speculated[layer])
            if copying.busy:
                layer_s *= self._slowdown
            self._computed_s += layer_s
            yield start(layer_s)
            mask = feed.gate(core, layer, env.now)
            if mask & OUTBOXES:
                self.deliver(mask)
            if self._speculates:
                for target in self._speculated[layer]:
                    mask = feed.speculation(core, layer, target, env.now)
                    self.deliver(mask)
            if mask & FORWARD_PENDING:
                yield from self._searches(mask)
                mask = self._mask
            if mask & _READY_WHOLE == CHUNK_READY:
                yield start(self._compute_s(expert_s[layer]))
            elif part_by_part or mask & MORE_CHUNKS:
                mask = yield from self._parts(layer, mask, exchange_s, counts[layer].tolist())
                if mask & PREFETCH_OPEN:
                    yield from self._prefetches(mask)
                continue
            else:
                yield self._stall(CHUNK_READY, expert_s[layer])
            mask = core.computed_chunk(env.now)
            if mask & OUTBOXES:
                self.deliver(mask)
            if mask & PREFETCH_OPEN:
                yield from self._prefetches(mask)
        self._computed_s += overhead_s
        yield start(overhead_s)
        mask = core.end_iteration(env.now, [state.request.index for state in states if state.last])
        if mask & OUTBOXES:
            self.deliver(mask)
        self._note(step, start_s, tokens, link_busy_s)

    def _compute_s(self, seconds: float) -> float:
        """Expert computation that starts now takes this long: it is slower while any copy runs."""
        if self._copies.in_flight:
            seconds *= self._slowdown
        self._computed_s += seconds
        return seconds

    def _stall(self, wakes: int, then_s: float) -> Timer:
        """Wait until the core returns one of the bits `wakes`, then compute for `then_s`."""
        self._wakes = wakes
        self._stalled_s = self._env.now
        self._then_s = then_s
        return self._timer.wait()

    def _dense_s(self, step: Step) -> tuple[float, float, float, float]:
        """Attention of a layer, what an iteration costs beside its layers, a layer's exchange, and a router
        applied ahead: the slowest device's, where several have dense weights."""
        compute = self._compute
        times = []
        for part in (step,) if self.placement is None else self.placement.split(step):
            tokens, context, pairs = _sizes(part)
            attention_s = compute.attention_s(tokens, context, score_pairs=pairs)
            overhead_s = compute.iteration_overhead_s(tokens, len(part.requests), context, score_pairs=pairs)
            gate_s = compute.gate_s(tokens) if self._speculates else 0.0
            times.append((attention_s, overhead_s, compute.exchange_s(tokens), gate_s))
        attention_s, overhead_s, exchange_s, gate_s = map(max, zip(*times, strict=True))
        return attention_s, overhead_s, exchange_s, gate_s

    def _searches(self, mask: int) -> Process:
        """Wait for the searches that the core says to wait for; `_mask` is that of the last event then."""
        self._mask = mask
        for _, ticket in self._core.take_forward():
            began_s = self._env.now
            yield self.worker.wait(ticket, self._timer)
            self._search_wait_s += self._env.now - began_s

    def _prefetches(self, mask: int) -> Process:
        """Wait until nothing is being prefetched for the next layer any more."""
        stall_s = self._stall_s
        while mask & PREFETCH_OPEN:
            yield self._stall(-1, 0.0)
            mask = self._mask
        self._search_wait_s += self._stall_s - stall_s
        self._stall_s = stall_s

    def _parts(
        self, layer: int, mask: int, exchange_s: float, counts: list[int]
    ) -> Generator[simpy.Event, None, int]:
        """A layer in several parts: chunk by chunk, or whatever is resident while the rest is loaded.

        Returns the last event's mask.
        """
        core = self._core
        first = layer * self._experts
        wakes = -1 if self._as_ready else CHUNK_READY
        while mask & CHUNK_OPEN:
            part = core.chunk_ready() if self._as_ready or mask & CHUNK_READY else []
            if not part:
                yield self._stall(wakes, 0.0)
                mask = self._mask
                continue
            experts = [expert - first for expert in part]
            part_s = self._compute.experts_time_s(layer, experts, [counts[j] for j in experts])
            yield self._timer.start(self._compute_s(part_s + exchange_s))
            exchange_s = 0.0  # once per layer, with its first part
            mask = core.computed(layer, part, self._env.now)
            if mask & OUTBOXES:
                self.deliver(mask)
        return mask

    def _note(self, step: Step, start_s: float, tokens: int, link_busy_s: float) -> None:
        now_s = self._ended_s = self._env.now
        self._link_busy_s = self.link_busy_until(now_s)
        self.compute_s += self._computed_s
        before, self._totals = self._totals, self._core.totals()
        activated, hits, late, demand_bytes = (
            now - then for now, then in zip(self._totals, before, strict=True)
        )
        self.log.append(
            start_s,
            now_s,
            step.phase,
            len(step.requests),
            tokens,
            activated,
            hits,
            late,
            activated - hits - late,
            demand_bytes,
            self._stall_s,
            self._search_wait_s,
            self._computed_s,
            link_busy_s,
            self._link_busy_s,
        )


def _sizes(step: Step) -> tuple[int, int, int]:
    """New tokens, KV positions read, and query-key pairs of a step."""
    if step.phase == "prefill":
        prompts = [state.request.prompt_tokens for state in step.requests]
        return sum(prompts), sum(prompts), sum(n * (n + 1) // 2 for n in prompts)
    context = sum(state.context_tokens + 1 for state in step.requests)
    return len(step.requests), context, context

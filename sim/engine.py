"""The engine process: steps of the scheduler, layer by layer, against one core."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import simpy

from ..policy.core import (
    CHUNK_OPEN,
    CHUNK_READY,
    DEVICE_SHIFT,
    MORE_CHUNKS,
    SEARCH_PENDING,
    Core,
    Feed,
)
from ..serving.logs import IterationLog
from .compute import ComputeModel
from .events import ENGINE, Timer
from .foresight import Foresight
from .link import Copies, Link
from .search_worker import SearchWorker

if TYPE_CHECKING:
    from ..calibration.profile import HardwareProfile
    from ..policy.models import ModelSpec
    from ..policy.systems import System
    from ..serving.scheduler import Step

_OUTBOXES = SEARCH_PENDING | -(1 << DEVICE_SHIFT)
_READY_WHOLE = CHUNK_READY | MORE_CHUNKS

Process = Generator[simpy.Event, None, None]


class Engine:
    """Runs iterations in simulated time and notes each in an IterationLog."""

    def __init__(
        self,
        env: simpy.Environment,
        core: Core,
        feed: Feed,
        model: ModelSpec,
        compute: ComputeModel,
        profile: HardwareProfile,
        system: System,
    ) -> None:
        self._env = env
        self._core = core
        self._feed = feed
        self._layers = model.layers
        self._experts = model.experts
        self._compute = compute
        self._slowdown = profile.copy_slowdown
        self._as_ready = system.compute_order == "as_ready"
        self._copies = Copies()
        self.links = [
            Link(env, core, device, profile, self._copies, self.deliver) for device in range(profile.devices)
        ]
        self._link_of = {1 << device: link for device, link in enumerate(self.links)}
        self.worker = SearchWorker(env, core, profile, self.deliver)
        self.foresight = Foresight(core, feed, model.layers) if system.predictor == "oracle" else None
        self.log = IterationLog()
        self.compute_s = 0.0
        self._stall_s = 0.0
        self._mask = 0
        self._timer = Timer(env, ENGINE)
        self._wake = Timer(env, ENGINE)
        self._asleep = False
        self._totals = core.totals()

    def deliver(self, mask: int) -> None:
        """Hand the core's commands to those who carry them out; wake the forward pass where it can go on."""
        if mask & _OUTBOXES:
            devices = mask >> DEVICE_SHIFT
            while devices:
                self._link_of[devices & -devices].drain()
                devices &= devices - 1
            if mask & SEARCH_PENDING:
                self.worker.drain()
        if self._asleep and (mask & CHUNK_READY or self._as_ready):
            self._asleep = False
            self._mask = mask
            self._wake.fire()

    def iterate(self, step: Step) -> Process:
        """One step of the scheduler, all layers."""
        env, core, feed = self._env, self._core, self._feed
        start_s, compute_before_s = env.now, self.compute_s
        self._stall_s = 0.0
        tokens, context, pairs = _sizes(step)
        states = step.requests
        feed.select(
            [state.request.index for state in states],
            [state.generated for state in states],
            [state.step_tokens for state in states],
            step.phase == "prefill",
        )
        counts = feed.token_counts(self._layers)
        expert_s = (self._compute.expert_s(counts) + self._compute.exchange_s(tokens)).tolist()
        attention_s = self._compute.attention_s(tokens, context, score_pairs=pairs)
        overhead_s = self._compute.iteration_overhead_s(tokens, len(states), context, score_pairs=pairs)
        slow_attention_s = attention_s * self._slowdown
        first_link, start = self.links[0], self._timer.start

        mask = feed.begin_iteration(core, env.now)
        if mask & _OUTBOXES:
            self.deliver(mask)
        for layer in range(self._layers):
            layer_s = slow_attention_s if first_link.busy else attention_s
            self.compute_s += layer_s
            yield start(layer_s)
            mask = feed.gate(core, layer, env.now)
            if mask & _OUTBOXES:
                self.deliver(mask)
            if mask & _READY_WHOLE == CHUNK_READY:
                yield self._computing(expert_s[layer])
                mask = core.computed_chunk(env.now)
                if mask & _OUTBOXES:
                    self.deliver(mask)
            else:
                yield from self._chunks(layer, mask, expert_s[layer], tokens, counts[layer].tolist())
        self.compute_s += overhead_s
        yield start(overhead_s)
        mask = core.end_iteration(env.now)
        if mask & _OUTBOXES:
            self.deliver(mask)
        self._note(step, start_s, tokens, self.compute_s - compute_before_s)

    def _computing(self, seconds: float) -> Timer:
        """A timer for expert computation, slower while any copy runs."""
        if self._copies.in_flight:
            seconds *= self._slowdown
        self.compute_s += seconds
        return self._timer.start(seconds)

    def _chunks(self, layer: int, mask: int, whole_s: float, tokens: int, counts: list[int]) -> Process:
        """A layer that has to wait for loads, or that goes through in several parts."""
        core, env = self._core, self._env
        first = layer * self._experts
        in_parts = bool(mask & MORE_CHUNKS)
        exchange_s = self._compute.exchange_s(tokens)  # once per layer, with its first part
        while mask & CHUNK_OPEN:
            ready = bool(mask & CHUNK_READY)
            part = core.chunk_ready() if (in_parts if ready else self._as_ready) else []
            if not ready and not part:
                began_s = env.now
                self._asleep = True
                yield self._wake.wait()
                self._stall_s += env.now - began_s
                mask = self._mask
                continue
            if not part:
                yield self._computing(whole_s)
                mask = core.computed_chunk(env.now)
            else:
                in_parts = True
                experts = [expert - first for expert in part]
                part_s = self._compute.experts_time_s(layer, experts, [counts[j] for j in experts])
                yield self._computing(part_s + exchange_s)
                exchange_s = 0.0
                mask = core.computed(layer, part, env.now)
            if mask & _OUTBOXES:
                self.deliver(mask)

    def _note(self, step: Step, start_s: float, tokens: int, compute_s: float) -> None:
        before, self._totals = self._totals, self._core.totals()
        activated, hits, late, demand_bytes = (
            now - then for now, then in zip(self._totals, before, strict=True)
        )
        self.log.append(
            start_s,
            self._env.now,
            step.phase,
            len(step.requests),
            tokens,
            activated,
            hits,
            late,
            activated - hits - late,
            demand_bytes,
            self._stall_s,
            0.0,
            compute_s,
        )


def _sizes(step: Step) -> tuple[int, int, int]:
    """New tokens, KV positions read, and query-key pairs of a step."""
    if step.phase == "prefill":
        prompts = [state.request.prompt_tokens for state in step.requests]
        return sum(prompts), sum(prompts), sum(n * (n + 1) // 2 for n in prompts)
    context = sum(state.context_tokens + 1 for state in step.requests)
    return len(step.requests), context, context

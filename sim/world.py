"""The simulated world: one system, one cache size, one list of requests."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import simpy

from ..errors import PolicyError
from ..policy.core import Feed, make_core, popular_experts
from ..serving.decisions import decision_table
from ..serving.logs import RequestLog
from ..serving.outcome import CellOutcome, Progress, counted
from ..serving.prior import fill_store
from ..serving.scheduler import Scheduler
from .cell import CellInputs, cell_options, inactive_notes, plan_cell
from .compute import ComputeModel
from .engine import Engine
from .events import ARRIVAL, ENGINE, Timer
from .host_memory import ssd_note
from .popularity import popularity

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from ..serving.request import RequestState
    from ..traces.requests import Request
    from ..traces.routing import RequestRouting

_PROGRESS_EVERY = 64  # iterations


def run_cell(
    inputs: CellInputs,
    on_progress: Callable[[Progress], None],
    on_decisions: Callable[[pa.Table], None] | None = None,
) -> CellOutcome:
    """Serve the requests in simulated time. Deterministic: same inputs, same outcome.

    `on_decisions` is given the decision log once, as soon as its last iteration is over; without it, the log
    is in the outcome.
    """
    return _World(inputs, on_progress, on_decisions).run()


class _World:
    def __init__(
        self,
        inputs: CellInputs,
        on_progress: Callable[[Progress], None],
        on_decisions: Callable[[pa.Table], None] | None,
    ) -> None:
        self._inputs = inputs
        self._on_progress = on_progress
        self._on_decisions = on_decisions
        self._plan = plan_cell(inputs)
        settings, model = inputs.settings, inputs.model
        self._options = cell_options(inputs, self._plan)
        self._log_iterations = -1 if settings.decisions == "all" else settings.decisions
        self._core = make_core(self._options, self._log_iterations)
        distance = int(self._options["prefetch_distance"])
        self._speculation = inputs.system.speculated_distances(model.layers, distance)
        self._prepare()
        self._env = simpy.Environment()
        self._feed = Feed(model.layers, model.experts, inputs.routing.meta.embedding_width)
        compute = ComputeModel(model, inputs.expert_dtype, inputs.profile, peer_link=settings.peer_link)
        self._engine = Engine(
            self._env,
            self._core,
            self._feed,
            model,
            compute,
            inputs.profile,
            inputs.system,
            distance,
            self._plan,
        )
        # Offline: one prompt after another, all there from the start.
        batch = 1 if settings.offline else settings.max_num_seqs
        self._scheduler = Scheduler(batch, settings.token_budget, self._plan.max_kv_tokens)
        self._request_log = RequestLog()
        self._not_counted = {request.index for request in islice(inputs.requests, settings.warmup)}
        self._admitted_s: dict[int, float] = {}
        self._first_token_s: dict[int, float] = {}
        self._still_to_come = len(inputs.requests)
        self._idle: simpy.Event | None = None
        self._peak_kv_tokens = 0
        self._counting = False
        self._before = self._reading()

    def run(self) -> CellOutcome:
        env, core = self._env, self._core
        env.process(self._arrivals())
        try:
            env.run(until=env.process(self._serve()))
        except PolicyError as error:
            raise error.at(f"iteration {len(self._engine.log)}") from error.__cause__
        if self._on_decisions is not None:
            self._hand_over()
        now, before = self._reading(), self._before
        counters = counted(now.counters, before.counters)
        busy_s = {name: value - before.busy_s[name] for name, value in now.busy_s.items()}
        counted_s = now.time_s - before.time_s
        return CellOutcome(
            requests=self._request_log,
            iterations=self._engine.log,
            counters=counters,
            per_layer={name: value - before.per_layer[name] for name, value in now.per_layer.items()},
            decisions=decision_table(core.take_log(), self._options) if self._log_iterations else None,
            memory_bytes=self._plan.peak_memory_bytes(self._peak_kv_tokens),
            busy_s=busy_s,
            run_s=env.now,
            counted_s=counted_s,
            notes=(
                *self._plan.warnings,
                *inactive_notes(self._inputs, self._plan.slots, int(self._options["layer_quota"])),
                *ssd_note(counters, busy_s.get("ssd", 0.0), counted_s),
            ),
        )

    def _reading(self) -> _Reading:
        engine = self._engine
        counters = self._core.counters()
        counters["bytes_moved"] = sum(link.bytes_moved for link in engine.links)
        busy_s = {
            "link": engine.link_busy_until(self._env.now),
            "compute": engine.compute_s,
            "search": engine.worker.busy_s,
        }
        if engine.host_memory is not None:
            counters |= engine.host_memory.counters()
            busy_s["ssd"] = engine.host_memory.busy_until(self._env.now)
        return _Reading(self._env.now, counters, self._core.layer_counts(), busy_s)

    def _prepare(self) -> None:
        """What the core knows and holds before the first request: its store, and preloaded experts."""
        inputs, system = self._inputs, self._inputs.system
        if inputs.training:
            fill_store(self._core, system, self._options, map(self._routing, inputs.training))
        if system.preload == "all":
            self._core.preload(range(inputs.model.routed_experts()))
        elif system.preload == "popular":
            kept = popular_experts(
                popularity(inputs),
                devices=inputs.profile.devices,
                slots_per_device=self._plan.slots_per_device,
                top_k=inputs.model.top_k,
            )
            self._core.preload(kept)

    def _routing(self, request: Request) -> RequestRouting:
        return self._inputs.routing.routing_for(
            request.index, request.prompt_tokens, request.output_tokens, self._speculation
        )

    def _arrivals(self) -> Generator[simpy.Event, None, None]:
        for request in self._inputs.requests:
            wait_s = 0.0 if self._inputs.settings.offline else request.arrival_s - self._env.now
            if wait_s > 0.0:
                yield Timer(self._env, ARRIVAL).start(wait_s)
            self._scheduler.add(request)
            self._still_to_come -= 1
            if self._idle is not None:
                idle, self._idle = self._idle, None
                idle.succeed()

    def _serve(self) -> Generator[simpy.Event, None, None]:
        env, scheduler, engine = self._env, self._scheduler, self._engine
        yield Timer(env, ENGINE).start(0.0)
        iterations = 0
        while True:
            step = scheduler.next_step()
            if step is None:
                if self._still_to_come == 0:
                    return
                self._idle = simpy.Event(env)
                yield self._idle
                yield Timer(env, ARRIVAL).start(0.0)  # requests that arrive at this very moment come along
                continue
            if step.phase == "prefill":
                for state in step.requests:
                    self._admit(state)
                self._peak_kv_tokens = max(self._peak_kv_tokens, scheduler.kv_reserved_tokens)
            if engine.foresight is not None:
                engine.deliver(engine.foresight.before(step, scheduler.running_states, env.now))
            yield from engine.iterate(step)
            if step.phase == "prefill":
                for state in step.requests:
                    self._first_token_s[state.request.index] = env.now
            for state in scheduler.finish_step(step):
                self._finish(state)
            iterations += 1
            if iterations == self._log_iterations + 1:  # the log ended when this iteration began
                self._hand_over()
            if iterations == 1 or iterations % _PROGRESS_EVERY == 0:
                self._report(iterations)

    def _hand_over(self) -> None:
        """Give away the decision log, once."""
        on_decisions, self._on_decisions = self._on_decisions, None
        if on_decisions is not None and self._log_iterations:
            self._log_iterations = 0
            on_decisions(decision_table(self._core.take_log(), self._options))

    def _report(self, iterations: int) -> None:
        self._on_progress(
            Progress(self._env.now, iterations, len(self._request_log), len(self._inputs.requests))
        )

    def _admit(self, state: RequestState) -> None:
        request = state.request
        if not self._counting and request.index not in self._not_counted:
            self._counting = True
            self._before = self._reading()
        routing = self._routing(request)
        self._feed.add(
            request.index,
            routing.gate,
            routing.experts,
            routing.token_counts,
            routing.offsets,
            routing.embedding,
            routing.speculation,
        )
        self._admitted_s[request.index] = self._env.now
        if self._engine.placement is not None:
            self._engine.placement.admit(state)

    def _finish(self, state: RequestState) -> None:
        request = state.request
        if self._engine.placement is not None:
            self._engine.placement.finish(state)
        self._feed.remove(request.index)
        admitted_s = self._admitted_s.pop(request.index)
        self._request_log.append(
            request.index,
            admitted_s if self._inputs.settings.offline else request.arrival_s,
            admitted_s,
            self._first_token_s.pop(request.index),
            self._env.now,
            request.prompt_tokens,
            request.output_tokens,
            request.index not in self._not_counted,
        )


@dataclass(frozen=True)
class _Reading:
    """The totals at one moment."""

    time_s: float
    counters: dict[str, int]
    per_layer: dict[str, NDArray[np.int64]]
    busy_s: dict[str, float]

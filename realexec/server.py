"""One cell of a real grid: requests arrive by the wall clock, a real model answers them in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import PolicyError
from ..serving.logs import IterationLog, RequestLog
from ..serving.outcome import CellOutcome, Progress, counted
from ..serving.scheduler import Scheduler, Step
from .forward import BatchForward

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..serving.grid import CellSink
    from ..serving.request import RequestState
    from ..serving.settings import RunSettings
    from ..traces.requests import Request
    from .observed import InOrder, RoutingObserver

_PROGRESS_EVERY_S = 0.2
_WRITING_S = 0.1  # that writing one request's routing may take


class CellServer:
    """Serves `requests` with a model of `load_model` whose core and cache are fresh.

    `tokens` gives the prompt of a served request by its place. Greedy; every request gets exactly its
    output tokens. Times are wall-clock seconds since the run began, of the transfer engine's clock.
    """

    def __init__(
        self,
        model: Any,
        settings: RunSettings,
        requests: Sequence[Request],
        tokens: Callable[[int, int], list[int]],
        observer: RoutingObserver,
        routing: InOrder,
        sink: CellSink,
    ) -> None:
        self._handle = model.finemoe
        self._runtime = self._handle.runtime
        self._runtime.observer = self._observer = observer
        self._settings, self._requests, self._sink = settings, requests, sink
        self._tokens, self._routing = tokens, routing
        batch = 1 if settings.offline else settings.max_num_seqs
        longest = max(r.prompt_tokens + r.output_tokens for r in requests)
        # Room for all that may run: --max-num-seqs alone bounds the batch.
        self._scheduler = Scheduler(batch, settings.token_budget, batch * longest)
        self._forward = BatchForward(model, batch)
        self._place = {request.index: place for place, request in enumerate(requests)}
        self._to_come = 0  # place of the next arrival
        self._log, self._request_log = IterationLog(), RequestLog()
        self._admitted_s: dict[int, float] = {}
        self._first_token_s: dict[int, float] = {}
        self._counting = False
        self._compute_s = 0.0
        self._reported_s = -_PROGRESS_EVERY_S
        self._began_s: float = self._runtime.engine.now()
        self._before = self._reading()

    def run(self) -> CellOutcome:
        """Serve all requests."""
        while True:
            self._arrive()
            step = self._scheduler.next_step()
            if step is None:
                if self._to_come == len(self._requests):
                    break
                self._idle()
                continue
            try:
                self._iterate(step)
            except PolicyError as error:
                raise error.at(f"iteration {len(self._log)}") from error.__cause__
        ended = self._reading()  # before what is under way at the end moves on
        if self._settings.decisions:
            self._sink.decisions(self._handle.decisions())
        self._routing.write()
        return self._outcome(ended)

    def _now(self) -> float:
        return float(self._runtime.engine.now()) - self._began_s

    def _idle(self) -> None:
        """Nothing to do until the next arrival: time for what was put off."""
        self._runtime.engine.check()
        wait_s = self._requests[self._to_come].arrival_s - self._now()
        if wait_s > _WRITING_S and self._routing.waiting:
            self._routing.write(most=1)
        else:
            time.sleep(max(wait_s, 0.0))

    def _arrive(self) -> None:
        now_s = self._now()
        while self._to_come < len(self._requests):
            request = self._requests[self._to_come]
            if not self._settings.offline and request.arrival_s > now_s:
                break
            self._scheduler.add(request)
            self._to_come += 1

    def _iterate(self, step: Step) -> None:
        if step.phase == "prefill":
            for state in step.requests:
                self._admit(state)
        before, start_s = self._marks(), self._now()
        if step.phase == "prefill":
            prompts = [
                (s.request.index, self._tokens(self._place[s.request.index], s.request.prompt_tokens))
                for s in step.requests
            ]
            self._forward.prefill(prompts)
        else:
            self._forward.decode()
        self._runtime.end([state.request.index for state in step.requests if state.last])
        end_s = self._now()
        self._note(step, start_s, end_s, before, self._marks())
        for state in step.requests:
            self._first_token_s.setdefault(state.request.index, end_s)
        for state in self._scheduler.finish_step(step):
            self._finish(state.request, end_s)
        if end_s - self._reported_s >= _PROGRESS_EVERY_S:
            self._reported_s = end_s
            self._sink.progress(Progress(end_s, len(self._log), len(self._request_log), len(self._requests)))

    def _admit(self, state: RequestState) -> None:
        index = state.request.index
        if not self._counting and self._counted(index):
            self._counting = True
            self._before = self._reading()
        self._admitted_s[index] = self._now()

    def _counted(self, index: int) -> bool:
        return self._place[index] >= self._settings.warmup

    def _finish(self, request: Request, now_s: float) -> None:
        index = request.index
        self._forward.finish(index)
        self._routing.add(self._place[index], self._observer.take(index))
        admitted_s = self._admitted_s.pop(index)
        self._request_log.append(
            index,
            admitted_s if self._settings.offline else request.arrival_s,
            admitted_s,
            self._first_token_s.pop(index),
            now_s,
            request.prompt_tokens,
            request.output_tokens,
            self._counted(index),
        )

    def _note(self, step: Step, start_s: float, end_s: float, before: _Marks, after: _Marks) -> None:
        activated, hits, late, demand_bytes = (
            now - then for now, then in zip(after.totals, before.totals, strict=True)
        )
        stall_s = after.stall_s - before.stall_s
        search_wait_s = after.search_wait_s - before.search_wait_s
        compute_s = max(0.0, end_s - start_s - stall_s - search_wait_s)
        self._compute_s += compute_s
        self._log.append(
            start_s,
            end_s,
            step.phase,
            len(step.requests),
            step.tokens,
            activated,
            hits,
            late,
            activated - hits - late,
            demand_bytes,
            stall_s,
            search_wait_s,
            compute_s,
            before.link_busy_s,
            after.link_busy_s,
        )

    def _marks(self) -> _Marks:
        times = self._runtime.times
        devices = self._runtime.engine.statistics()["devices"]
        return _Marks(
            totals=self._runtime.core.totals(),
            stall_s=times.stall_s,
            search_wait_s=times.search_wait_s,
            link_busy_s=sum(device["busy_s"] for device in devices),
        )

    def _reading(self) -> _Reading:
        runtime = self._runtime
        engine = runtime.engine.statistics()
        counters = runtime.core.counters()
        counters["bytes_moved"] = sum(device["bytes"] for device in engine["devices"])
        return _Reading(
            time_s=self._now(),
            counters=counters,
            per_layer=runtime.core.layer_counts(),
            link_busy_s=sum(device["busy_s"] for device in engine["devices"]),
            search_s=engine["search_s"],
            compute_s=self._compute_s,
        )

    def _outcome(self, ended: _Reading) -> CellOutcome:
        before = self._before
        return CellOutcome(
            requests=self._request_log,
            iterations=self._log,
            counters=counted(ended.counters, before.counters),
            per_layer={name: value - before.per_layer[name] for name, value in ended.per_layer.items()},
            decisions=None,
            memory_bytes={
                "dense_weights": self._forward.dense_bytes,
                "expert_slots": sum(a.slots * a.slab_bytes for a in self._runtime.arenas),
                "kv_cache": self._forward.peak_kv_bytes,
            },
            busy_s={
                "link": ended.link_busy_s - before.link_busy_s,
                "compute": ended.compute_s - before.compute_s,
                "search": ended.search_s - before.search_s,
            },
            run_s=ended.time_s,
            counted_s=ended.time_s - before.time_s,
            notes=(),
        )


@dataclass(frozen=True)
class _Marks:
    """What is read before and after each step."""

    totals: tuple[int, int, int, int]
    stall_s: float
    search_wait_s: float
    link_busy_s: float


@dataclass(frozen=True)
class _Reading:
    """The totals at one moment."""

    time_s: float
    counters: dict[str, int]
    per_layer: dict[str, NDArray[np.int64]]
    link_busy_s: float
    search_s: float
    compute_s: float

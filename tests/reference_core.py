"""A slow, plain-Python model of the whole policy core, written from docs/core.md alone.

Every event is a method that returns the commands it emitted, as tuples:
("Search", ticket, kind, layer, target, work, blocking), ("WaitSearch", ticket), ("PreemptPrefetch", device),
("Wait", (expert, …)), ("Load", expert, device, slot, offset, bytes, kind, evicts), ("Abort", expert, reason).
A rejected event raises CoreError and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from reference_formulas import F16, round_f16, unit_embedding
from reference_plugin import UserPolicy
from reference_predictions import Predictions, Row
from reference_state import PHASES, Command, Config, Flight, check

MAX_FAILURES = 3


class ReferenceCore(Predictions):
    """The policy core, event by event."""

    def __init__(self, config: Config, policy: UserPolicy | None = None) -> None:
        super().__init__(config, policy)
        self.preloaded = False
        self.rest: list[int] = []
        self.chunk: set[int] = set()

    def counter_values(self) -> dict[str, Any]:
        """All counters by name."""
        held = sum(s.offset for s in self.states if s.status == "partial" and not s.pinned)
        held += sum(f.offset for f in self.flights if f is not None and f.kind == "prefetch")
        unused = sum(state.unused for state in self.states)
        self.counters.unused_bytes = self.config.expert_bytes * unused + held
        return self.counters.values()

    def residents(self, device: int) -> list[int]:
        """Resident experts of a device in the order of its slots."""
        return [e for e in self.held(device) if self.states[e].status == "resident"]

    # -- before the first iteration

    def preload(self, experts: Sequence[int]) -> list[Command]:
        self.accepting()
        check(self.iteration < 0 and not self.preloaded, "experts are preloaded once, before all iterations")
        check(all(a < b for a, b in pairwise(experts)), "experts ascend strictly")
        check(all(0 <= e < len(self.states) for e in experts), "an expert is out of range")
        for device, table in enumerate(self.slots):
            kept = sum(self.device_of(e) == device for e in experts)
            check(kept < len(table) or kept == self.config.owned(device), f"device {device} has no slot left")
            check(table == [-1] * len(table), "nothing was loaded yet")
        self.preloaded = True
        self.keep(experts)
        return self.finish()

    # -- the iteration

    def begin_iteration(self, rows: Sequence[Row]) -> list[Command]:
        self.accepting()
        check(not self.open, "an iteration is open")
        check(len(rows) > 0, "an iteration has at least one row")
        for row in rows:
            check(row.phase in PHASES and row.tokens >= 1, f"bad row {row}")
            check(row.phase == rows[0].phase, "an iteration is either prefill or decode")
        embeddings = [self._embedding(row) for row in rows]
        self.open, self.l_now = True, -1
        self.iteration += 1
        self.rows, self.embeddings, self.gate_rows = list(rows), embeddings, []
        self.search_before_gates()
        return self.finish()

    def gate(
        self,
        layer: int,
        probabilities: npt.ArrayLike,
        experts: Sequence[int],
        token_counts: Sequence[int],
        row_counts: npt.ArrayLike | None = None,
    ) -> list[Command]:
        self.accepting()
        config = self.config
        check(self.open, "no iteration is open")
        check(layer == self.l_now + 1 < config.layers, f"layer {layer} does not follow layer {self.l_now}")
        check(not self.chunk and not self.rest, f"layer {self.l_now} is not computed")
        self.check_experts(experts)
        check(len(token_counts) == len(experts), "one token count per expert")
        check(min(token_counts) > 0, "every expert has tokens")
        gate_rows = self.probabilities(probabilities)
        counts = self._row_counts(experts, token_counts, row_counts)

        self.l_now = layer
        self.gates += 1
        self.gate_rows.append(gate_rows)
        if config.counts_rows:
            self.activations.grow([row.request for row in self.rows], layer, counts)
        base = layer * config.experts
        wanted = range(config.experts) if config.load_shape == "layer" else experts
        required = [base + j for j in wanted]
        for e in required:
            self.states[e].freq += 1.0
            self.states[e].stamp = self.gates
        self._look_up([base + j for j in experts])
        if config.eviction == "lfru":
            self.give_privileges(required)
        for e in required:
            state = self.states[e]
            if state.status in ("resident", "loading"):
                if state.unused:
                    state.unused = False
                    self.counters.useful_bytes += config.expert_bytes
                state.pinned = True
                state.spare = False
        self._leave_queues(set(required))
        self.rest = required
        self._next_chunk()
        self.search_after_gate(counts)
        return self.finish()

    def computed(self, layer: int, experts: Sequence[int]) -> list[Command]:
        self.accepting()
        check(self.open and layer == self.l_now, f"layer {layer} is not the current one")
        self.check_experts(experts, layer)
        for e in experts:
            check(
                e in self.chunk and self.states[e].status == "resident", f"expert {e} cannot be computed now"
            )
        for e in experts:
            self.states[e].pinned = False
            self.chunk.remove(e)
        if not self.chunk and self.rest:
            self._next_chunk()
        elif not self.chunk and self.config.layer_quota > 0:
            self.enforce_quota(layer)
        return self.finish()

    def end_iteration(self, finished: Sequence[int] = ()) -> list[Command]:
        self.accepting()
        config = self.config
        check(self.open and self.l_now == config.layers - 1, "the last layer has no gate yet")
        check(not self.chunk and not self.rest, "the last layer is not computed")
        check(len(set(finished)) == len(finished), "a request finishes once")
        self.open = False
        for queue in self.queues:
            self.counters.dropped += len(queue)
            queue.clear()
        for work in self.pending:
            if work.kind != "update" and not work.abandoned:
                work.abandoned = True
                self.counters.late_searches += 1
        for state in self.states:
            state.freq *= config.frequency_decay
        self.issue_updates(finished)
        self.activations.forget(finished)
        if config.predictor == "plugin":
            self.ask(lambda policy: policy.end_iteration(list(finished)))
        return self.finish()

    # -- transfers

    def loaded(self, expert: int) -> list[Command]:
        self.accepting()
        flight, state = self.flight_of(expert), self.states[expert]
        self._moved(flight, self.config.expert_bytes)
        if flight.kind == "demand":
            self.counters.demand_loads += 1
        else:
            self.counters.prefetch_loads += 1
        state.status, state.offset, state.failures = "resident", 0, 0
        state.unused = flight.kind == "prefetch" and not state.pinned
        if flight.kind == "prefetch" and state.pinned:
            self.counters.useful_bytes += self.config.expert_bytes
        return self.finish()

    def paused(self, expert: int, bytes_done: int) -> list[Command]:
        self.accepting()
        flight, state = self.flight_of(expert), self.states[expert]
        check(flight.asked_to_stop, f"expert {expert} was not asked to stop")
        check(
            flight.offset <= bytes_done < self.config.expert_bytes, f"{bytes_done} bytes done is out of range"
        )
        self._moved(flight, bytes_done)
        state.status, state.offset = "partial", bytes_done
        ended = flight.iteration != self.iteration or not self.open
        if state.pinned:
            self.counters.useful_bytes += bytes_done
            self.demands[self.device_of(expert)].add(expert)
        elif ended or self.layer_of(expert) <= self.l_now:
            self.drop_partial(expert)
        return self.finish()

    def load_failed(self, expert: int, reason: str) -> list[Command]:
        self.accepting()
        flight = self.flight_of(expert)
        state, device = self.states[expert], self.device_of(expert)
        if flight.kind == "prefetch":
            self.counters.wasted_bytes += flight.offset
        self.flights[device] = None
        self.free_slot(expert)
        if state.pinned:
            state.failures += 1
            if state.failures == MAX_FAILURES:
                self.aborted = True
                self.out.append(("Abort", expert, reason))
            else:
                self.demands[device].add(expert)
        else:
            self.counters.failed_prefetches += 1
        return self.finish()

    # -- parts of the events

    def _embedding(self, row: Row) -> F16 | None:
        width = self.config.embedding_width
        if row.embedding is None or width == 0:
            return None
        check(
            row.embedding.shape == (width,), f"request {row.request}: the embedding has not {width} features"
        )
        check(
            bool(np.isfinite(round_f16(row.embedding)).all()),
            f"request {row.request}: the embedding is not finite",
        )
        return unit_embedding(row.embedding)

    def _row_counts(
        self, experts: Sequence[int], token_counts: Sequence[int], row_counts: npt.ArrayLike | None
    ) -> npt.NDArray[np.int64]:
        """The tokens [B, J] of every row; empty where nobody asks for them."""
        check(
            (row_counts is not None) == self.config.counts_rows,
            "row counts come with `activation` and `plugin`",
        )
        if row_counts is None:
            return np.zeros((0, self.config.experts), dtype=np.int64)
        counts = np.asarray(row_counts, dtype=np.int64)
        check(counts.shape == (len(self.rows), self.config.experts), "row counts have the shape [B, J]")
        check(bool((counts >= 0).all()), "row counts are not negative")
        totals = np.zeros(self.config.experts, dtype=np.int64)
        totals[list(experts)] = token_counts
        check(bool((counts.sum(axis=0) == totals).all()), "row counts sum to the token counts")
        return counts

    def _look_up(self, activated: list[int]) -> None:
        counters, phase = self.counters, PHASES.index(self.rows[0].phase)
        for e in activated:
            counters.activated[phase][self.l_now] += 1
            outcome = {"resident": counters.hits, "loading": counters.late}.get(
                self.states[e].status, counters.misses
            )
            outcome[phase][self.l_now] += 1

    def _leave_queues(self, required: set[int]) -> None:
        for queue in self.queues:
            leaving = {e for e in queue if self.layer_of(e) <= self.l_now}
            self.counters.dropped += len(leaving - required)
            queue -= leaving

    def _next_chunk(self) -> None:
        config = self.config
        chunk: list[int] = []
        for device in range(config.devices):
            mine = [e for e in self.rest if self.device_of(e) == device]
            ready = [e for e in mine if self.states[e].pinned]
            more = [e for e in mine if not self.states[e].pinned]
            taken = sum(self.states[e].pinned or self.states[e].kept for e in self.held(device))
            chunk += ready + more[: config.slots(device) - taken]
        self.chunk = set(chunk)
        self.rest = [e for e in self.rest if e not in self.chunk]
        for e in self.chunk:
            state = self.states[e]
            state.pinned = True
            if state.status in ("absent", "partial"):
                self.demands[self.device_of(e)].add(e)
        for device, flight in enumerate(self.flights):
            demanded = any(self.demands) if config.preempt_scope == "all" else bool(self.demands[device])
            if not demanded or flight is None or flight.asked_to_stop:
                continue
            if flight.kind == "prefetch" and not self.states[flight.expert].pinned:
                flight.asked_to_stop = True
                self.counters.preemptions += 1
                self.out.append(("PreemptPrefetch", device))
        self.out.append(("Wait", tuple(sorted(self.chunk))))

    def _moved(self, flight: Flight, bytes_done: int) -> None:
        """A load stopped at `bytes_done`: the device is idle again and the bytes are counted."""
        self.flights[self.device_of(flight.expert)] = None
        if flight.kind == "demand":
            self.counters.demand_bytes += bytes_done - flight.offset
        else:
            self.counters.prefetch_bytes += bytes_done - flight.offset

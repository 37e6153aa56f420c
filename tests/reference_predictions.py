"""The reference core's predictions: searches, store updates, speculation, foresight, and their effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from reference_devices import Devices
from reference_formulas import F16, F32, delta_of, rank_by_tokens, round_f16, select
from reference_plugin import UserPolicy, all_embeddings, checked
from reference_state import Command, Config, check
from reference_store import ActivationStore, ReferenceStore

MAX_UPDATES = 1024


@dataclass(frozen=True)
class Row:
    """One request in an iteration."""

    request: int
    phase: str
    tokens: int
    embedding: npt.NDArray[np.float32] | None = None


@dataclass
class Work:
    """A search or an update that the worker has not done yet.

    `rows` [B, layers so far, J]: gate rows, or shares of activation matrices.
    """

    ticket: int
    kind: str
    targets: range
    rows: F16
    embeddings: list[F16 | None]
    abandoned: bool = False


class Predictions(Devices):
    """The map store, the worker's pending work and the events that bring predictions."""

    def __init__(self, config: Config, policy: UserPolicy | None = None) -> None:
        super().__init__(config, policy)
        make_store = ActivationStore if config.predictor == "activation" else ReferenceStore
        self.store = make_store(config.layers, config.experts, config.embedding_width, config.store_capacity)
        self.stored = 0  # maps in the store once every update issued so far is done
        self.pending: list[Work] = []
        self.next_ticket = 0
        self.open = False
        self.rows: list[Row] = []
        self.embeddings: list[F16 | None] = []
        self.gate_rows: list[F16] = []
        self.future_end = 0

    def seed_store(
        self, maps: npt.ArrayLike, embeddings: npt.ArrayLike, written: npt.ArrayLike
    ) -> list[Command]:
        self.accepting()
        config = self.config
        maps, embeddings = np.asarray(maps), np.asarray(embeddings)
        n = len(maps)
        check(self.iteration < 0, "the store is seeded before the first iteration")
        check(n <= config.store_capacity, f"{n} maps exceed the capacity {config.store_capacity}")
        check(maps.shape[1:] == (config.layers, config.experts), "maps have the shape [n, L, J]")
        check(embeddings.shape == (n, config.embedding_width), "embeddings have the shape [n, h]")
        check(
            np.shape(written) == (n,) and len(set(np.asarray(written).tolist())) == n,
            "one distinct age per map",
        )
        self.store.seed(maps, embeddings, written)
        self.stored = n
        return self.finish()

    def speculation(self, layer: int, target: int, probabilities: npt.ArrayLike) -> list[Command]:
        self.accepting()
        check(self.config.predictor == "speculate", "the predictor is not `speculate`")
        check(self.open and layer == self.l_now, f"layer {layer} is not the current one")
        check(layer < target < self.config.layers, f"target {target} is not a later layer")
        rows = self.probabilities(probabilities)
        self._take_result(target, [(p, 0.0, row) for p, row in zip(rows, self.rows, strict=True)])
        return self.finish()

    def search_done(self, ticket: int) -> list[Command]:
        self.accepting()
        tickets = [work.ticket for work in self.pending]
        check(ticket in tickets, f"ticket {ticket} is not pending")
        place = tickets.index(ticket)
        check(all(work.abandoned for work in self.pending[:place]), f"ticket {ticket} is not the oldest")
        work = self.pending[place]
        del self.pending[: place + 1]
        if work.kind == "update":
            self.store.update(work.rows[0], work.embeddings[0], self.config.prefetch_distance)
        elif not work.abandoned:  # an abandoned one was counted late at the end of its iteration
            targets = [target for target in work.targets if target > self.l_now]
            if not targets:
                self.counters.late_searches += 1
            else:
                self._take_search(work, targets)
        return self.finish()

    def foresight(self, step: int, required: Sequence[Sequence[int]]) -> list[Command]:
        self.accepting()
        config, now = self.config, self.iteration * self.config.layers + self.l_now
        check(config.eviction == "belady" or config.predictor == "oracle", "nobody may know the future")
        check(step > now and step >= 0, f"step {step} is past")
        check(step <= max(self.future_end, now + 1), f"steps before {step} are missing")
        check(
            all(0 <= e < len(self.states) for experts in required for e in experts),
            "an expert is out of range",
        )
        known = {s: needed for s, needed in self.future.items() if s < step}
        known.update((s, frozenset(experts)) for s, experts in enumerate(required, start=step))
        self.future, self.future_end = known, step + len(required)
        return self.finish()

    # -- parts of the events

    def finish(self) -> list[Command]:
        if not self.aborted:
            self.pump()
        commands, self.out = self.out, []
        return commands

    def accepting(self) -> None:
        check(not self.aborted, "the run was aborted")

    def probabilities(self, probabilities: npt.ArrayLike) -> F16:
        rows = round_f16(probabilities)
        check(rows.shape == (len(self.rows), self.config.experts), "probabilities have the shape [B, J]")
        check(bool(((rows >= 0.0) & (rows <= 1.0)).all()), "probabilities lie in [0, 1]")
        return rows

    def check_experts(self, experts: Sequence[int], layer: int = 0) -> None:
        """Strictly ascending, not empty, and of one layer: ids, or j with layer 0."""
        base = layer * self.config.experts
        check(len(experts) > 0, "at least one expert")
        check(all(a < b for a, b in pairwise(experts)), "experts ascend strictly")
        check(base <= experts[0] and experts[-1] < base + self.config.experts, f"experts of layer {layer}")

    def search_before_gates(self) -> None:
        """What `begin_iteration` predicts."""
        config = self.config
        near = range(min(config.prefetch_distance, config.layers))
        with_embedding = sum(e is not None for e in self.embeddings)
        if config.predictor == "map" and config.semantic and self.stored and with_embedding:
            none = np.zeros((len(self.rows), 0, config.experts), dtype=np.float16)
            self._search("semantic", near, none, with_embedding * self.stored * config.embedding_work)
        if config.popular_start:
            for layer in near:
                p = self.activations.popular(layer)
                if p is not None:
                    self._take_result(layer, [(p, 0.0, None)], "top_k")
        if config.predictor == "plugin":
            rows = [(row.request, row.phase, row.tokens) for row in self.rows]
            embeddings = all_embeddings(self.embeddings, config.embedding_width)
            self._ask_for_predictions(lambda policy: policy.begin_iteration(rows, embeddings))

    def search_after_gate(self, row_counts: npt.NDArray[np.int64]) -> None:
        """What the gate of layer l_now predicts."""
        config, layer = self.config, self.l_now
        if config.targets == "later":
            targets = range(layer + 1, config.layers)
        else:
            target = layer + config.prefetch_distance
            targets = range(target, min(target + 1, config.layers))
        work = len(self.rows) * self.stored * config.experts
        if targets and self.stored and config.predictor == "map" and config.trajectory:
            self._search("trajectory", targets, np.stack(self.gate_rows, axis=1), work)
        if targets and self.stored and config.predictor == "activation":
            rows = [self.activations.rows(row.request)[: layer + 1] for row in self.rows]
            self._search("trajectory", targets, np.stack(rows), work)
        if config.predictor == "plugin":
            probabilities = self.gate_rows[-1].astype(np.float32)
            counts = row_counts.astype(np.int32)
            self._ask_for_predictions(lambda policy: policy.gate(layer, probabilities, counts))

    def _ask_for_predictions(self, question: Callable[[UserPolicy], Mapping[int, npt.ArrayLike]]) -> None:
        config = self.config
        answer = self.ask(lambda policy: checked(question(policy), self.l_now, config.layers, config.experts))
        for target, p in answer:
            self._take_result(target, [(p, 0.0, None)])

    def _search(self, kind: str, targets: range, rows: F16, work: int) -> None:
        self._issue(
            Work(self.next_ticket, kind, targets, rows, self.embeddings), work, self.config.search_blocks
        )

    def _issue(self, item: Work, work: int, blocking: bool) -> None:
        self.next_ticket += 1
        self.counters.searches += item.kind != "update"
        self.pending.append(item)
        target = item.targets[-1] if item.targets else -1
        self.out.append(("Search", item.ticket, item.kind, self.l_now, target, work, blocking))
        if blocking:
            self.out.append(("WaitSearch", item.ticket))

    def issue_updates(self, finished: Sequence[int]) -> None:
        """One update per row (predictor `map`) or per row whose request has finished (`activation`)."""
        config, values = self.config, self.config.layers * self.config.experts
        if config.predictor == "map":
            maps = np.stack(self.gate_rows, axis=1)
            for i, embedding in enumerate(self.embeddings):
                width = 0 if embedding is None else config.embedding_work
                self._issue_update(maps[i : i + 1], embedding, width + values)
        if config.predictor == "activation":
            for row in self.rows:
                if row.request in finished:
                    self._issue_update(self.activations.rows(row.request)[None], None, values)

    def _issue_update(self, rows: F16, embedding: F16 | None, width: int) -> None:
        if sum(work.kind == "update" for work in self.pending) >= MAX_UPDATES:
            self.counters.skipped_updates += 1
            return
        update = Work(self.next_ticket, "update", range(0), rows, [embedding])
        self._issue(update, self.stored * width, False)
        self.stored = min(self.stored + 1, self.config.store_capacity)

    def _take_search(self, work: Work, targets: list[int]) -> None:
        found: list[tuple[int, float, Row]] = []  # place of the best map, δ, row
        for row, rows, embedding in zip(self.rows, work.rows, work.embeddings, strict=True):
            if work.kind == "trajectory":
                best, score = self.store.trajectory(rows)
            elif embedding is not None:
                best, score = self.store.semantic(embedding)
            else:
                continue
            found.append((best, delta_of(score), row))
        for target in targets:
            self._take_result(
                target, [(self.store.maps[best, target], delta, row) for best, delta, row in found]
            )

    def _take_result(
        self, target: int, rows: Sequence[tuple[F16 | F32, float, Row | None]], selector: str = ""
    ) -> None:
        """Use every (p [J], δ, its row of the batch, if any) that predicts layer `target`."""
        config, base = self.config, target * self.config.experts
        rank = [0.0] * config.experts
        chosen: set[int] = set()
        for p, delta, row in rows:
            by_tokens = config.rank_prefill_by_tokens and row is not None and row.phase == "prefill"
            for j, value in enumerate(p.tolist()):
                if by_tokens and row is not None:
                    value = rank_by_tokens(value, row.tokens)
                rank[j] = max(rank[j], value)
            chosen.update(select(selector or config.selector, p, delta, config.top_k))
        for j in range(config.experts):
            e = base + j
            self.states[e].p = rank[j]
            queue = self.queues[self.device_of(e)]
            self.counters.dropped += e in queue
            queue.discard(e)
            if j in chosen and self.states[e].status == "absent":
                queue.add(e)

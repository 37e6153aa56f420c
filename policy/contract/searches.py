"""The observer's view of searches and updates: which ones an event must issue (rule 10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .observed import ObservedCore

Command = tuple[Any, ...]


class SearchObserver:
    """Follows tickets and stored maps; `pending` holds (ticket, kind, abandoned, last target)."""

    def __init__(self, config: ObservedCore) -> None:
        self.config = config
        self.pending: list[tuple[int, str, bool, int]] = []
        self.next_ticket = 0
        self.stored = 0
        self.with_embedding: list[bool] = []
        self.requests: list[int] = []
        self.issued = 0
        self.late = 0
        self.skipped = 0

    def counters(self) -> dict[str, int]:
        """The search counters as seen from outside."""
        return {"searches": self.issued, "late_searches": self.late, "skipped_updates": self.skipped}

    def done_next(self) -> list[int]:
        """Tickets that may be reported done now: everything up to the first that is not abandoned."""
        tickets = []
        for ticket, _, abandoned, _ in self.pending:
            tickets.append(ticket)
            if not abandoned:
                break
        return tickets

    def expect(self, event: str, arguments: Sequence[Any], commands: Sequence[Command], layer: int) -> None:
        """Check that exactly the due searches were issued; raises AssertionError."""
        expected: list[Command] = []
        config = self.config
        if event == "seed_store":
            self.stored = len(arguments[0])
        elif event == "search_done":
            self._done(arguments[0], layer)
        elif event == "begin_iteration":
            self.with_embedding = [self._has_embedding(row.embedding) for row in arguments[0]]
            self.requests = [row.request for row in arguments[0]]
            rows = sum(self.with_embedding)
            if config.predictor == "map" and config.semantic and self.stored and rows:
                near = min(config.prefetch_distance, config.layers) - 1
                self._issue(expected, "semantic", -1, near, rows * self.stored * config.embedding_work)
        elif event == "gate":
            target = layer + config.prefetch_distance
            if config.targets == "later" and layer + 1 < config.layers:
                target = config.layers - 1
            asks = (config.predictor == "map" and config.trajectory) or config.predictor == "activation"
            if asks and target < config.layers and self.stored:
                work = len(self.with_embedding) * self.stored * config.experts
                self._issue(expected, "trajectory", layer, target, work)
        elif event == "end_iteration":
            self._end(expected, layer, arguments[0])
        assert [c for c in commands if c[0] in ("Search", "WaitSearch")] == expected, "rule 10: searches"

    def _has_embedding(self, embedding: Any) -> bool:
        if embedding is None or not self.config.embedding_width:
            return False
        return bool(np.any(np.asarray(embedding, dtype=np.float16) != 0))

    def _issue(self, expected: list[Command], kind: str, layer: int, target: int, work: int) -> None:
        ticket = self.next_ticket
        blocking = self.config.search_blocks and kind != "update"
        expected.append(("Search", ticket, kind, layer, target, work, blocking))
        if blocking:
            expected.append(("WaitSearch", ticket))
        self.pending.append((ticket, kind, False, target))
        self.next_ticket += 1
        self.issued += kind != "update"

    def _done(self, ticket: int, layer: int) -> None:
        while True:
            oldest, kind, abandoned, target = self.pending.pop(0)
            if oldest == ticket:
                break
            assert abandoned, "rule 10: in ticket order"
        self.late += kind != "update" and not abandoned and target <= layer

    def _end(self, expected: list[Command], layer: int, finished: Sequence[int]) -> None:
        config = self.config
        self.late += sum(kind != "update" and not abandoned for _, kind, abandoned, _ in self.pending)
        self.pending = [(n, kind, abandoned or kind != "update", t) for n, kind, abandoned, t in self.pending]
        widths: list[int] = []
        if config.predictor == "map":
            widths = [config.embedding_work * has for has in self.with_embedding]
        elif config.predictor == "activation":
            widths = [0 for request in self.requests if request in finished]
        for width in widths:
            if sum(kind == "update" for _, kind, _, _ in self.pending) >= 1024:
                self.skipped += 1
                continue
            self._issue(expected, "update", layer, -1, self.stored * (width + config.layers * config.experts))
            self.stored = min(self.stored + 1, config.store_capacity)

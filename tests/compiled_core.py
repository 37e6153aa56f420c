"""The compiled core behind the reference's methods, its log and its outboxes compared after every event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from finemoe import _core
from reference_formulas import round_f16
from reference_predictions import Row
from reference_state import Command, Config
from small_policy import policy_for

COMMANDS = ("Search", "WaitSearch", "PreemptPrefetch", "Wait", "Load", "Abort")
FIRST_COMMAND = 12  # RecordKind of csrc/types.hpp: events come first
SEARCHES = ("semantic", "trajectory", "update")
LOADS = ("demand", "prefetch")


class CompiledCore:
    """The compiled core behind the reference's methods: commands come from its log, in their total order.

    Its outboxes are drained after every event and must hold the same commands, each consumer's in order; the
    mask that the event returns must say which of them do.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.mask = 0
        self.policy = policy_for(config)
        self.core = _core.Core(_core.CoreConfig(**asdict(config)), log_iterations=1 << 40, policy=self.policy)

    def preload(self, experts: Sequence[int]) -> list[Command]:
        return self._after(self.core.preload(list(experts)))

    def begin_iteration(self, rows: Sequence[Row]) -> list[Command]:
        width = self.config.embedding_width
        given = [r.embedding is not None and width > 0 for r in rows]
        embeddings = np.zeros((len(rows), width), dtype=np.float16)
        for i, r in enumerate(rows):
            if given[i] and r.embedding is not None:
                embeddings[i] = round_f16(r.embedding)
        tuples = [(r.request, r.phase, r.tokens, has) for r, has in zip(rows, given, strict=True)]
        return self._after(self.core.begin_iteration(tuples, embeddings if any(given) else None))

    def gate(
        self,
        layer: int,
        probabilities: npt.ArrayLike,
        experts: Sequence[int],
        token_counts: Sequence[int],
        row_counts: npt.NDArray[np.int32] | None = None,
    ) -> list[Command]:
        rows = np.asarray(probabilities)
        mask = self.core.gate(layer, rows, list(experts), list(token_counts), row_counts=row_counts)
        return self._after(mask)

    def speculation(self, layer: int, target: int, probabilities: npt.ArrayLike) -> list[Command]:
        return self._after(self.core.speculation(layer, target, np.asarray(probabilities)))

    def search_done(self, ticket: int) -> list[Command]:
        return self._after(self.core.search_done(ticket))

    def loaded(self, expert: int) -> list[Command]:
        return self._after(self.core.loaded(expert))

    def paused(self, expert: int, bytes_done: int) -> list[Command]:
        return self._after(self.core.paused(expert, bytes_done))

    def load_failed(self, expert: int, reason: str) -> list[Command]:
        return self._after(self.core.load_failed(expert, reason))

    def computed(self, layer: int, experts: Sequence[int]) -> list[Command]:
        return self._after(self.core.computed(layer, list(experts)))

    def end_iteration(self, finished: Sequence[int] = ()) -> list[Command]:
        return self._after(self.core.end_iteration(finished=list(finished)))

    def residents(self, device: int) -> list[int]:
        return self.core.residents(device)

    def seed_store(
        self, maps: npt.ArrayLike, embeddings: npt.ArrayLike, written: npt.ArrayLike
    ) -> list[Command]:
        units = np.asarray(embeddings, dtype=np.float16) if self.config.embedding_width else None
        halves = np.asarray(maps, dtype=np.float16)
        return self._after(self.core.seed_store(halves, units, np.asarray(written).tolist()))

    def foresight(self, step: int, required: Sequence[Sequence[int]]) -> list[Command]:
        return self._after(self.core.foresight(step, [list(ids) for ids in required]))

    def counter_values(self) -> dict[str, Any]:
        """All counters by name, misses derived."""
        counts = {name: value.tolist() for name, value in self.core.layer_counts().items()}
        other = np.array(counts["activated"]) - counts["hits"] - counts["late"]
        return dict(self.core.counters()) | counts | {"misses": other.tolist()}

    def _after(self, mask: int) -> list[Command]:
        commands = self._logged()
        forward, searches = self.core.take_forward(), self.core.take_searches()
        devices = [self.core.take_device(g) for g in range(self.config.devices)]
        # A Wait goes into no box, and the reason of an Abort is asked for.
        assert forward == [c[:2] for c in commands if c[0] in ("WaitSearch", "Abort")]
        assert [self.core.abort_reason()] == ([c[2] for c in commands if c[0] == "Abort"] or [""])
        assert searches == [c for c in commands if c[0] == "Search"]
        for g, box in enumerate(devices):
            mine = {"PreemptPrefetch": 1, "Load": 2}
            assert box == [c for c in commands if c[0] in mine and c[mine[c[0]]] == g]
        flags = {_core.FORWARD_PENDING: forward, _core.SEARCH_PENDING: searches}
        flags |= {1 << _core.DEVICE_SHIFT + g: box for g, box in enumerate(devices)}
        assert all(bool(mask & bit) == bool(box) for bit, box in flags.items())
        self._check_queries(mask)
        self.mask = mask
        return commands

    def _check_queries(self, mask: int) -> None:
        """What the core says when asked is what the last event's mask said."""
        assert self.core.chunk_resident() == bool(mask & _core.CHUNK_READY)
        assert self.core.prefetch_open() == bool(mask & _core.PREFETCH_OPEN)
        experts, slots = self.core.chunk_slots()
        assert bool(len(experts)) == bool(mask & _core.CHUNK_OPEN)
        assert experts[slots >= 0].tolist() == self.core.chunk_ready()
        assert slots.tolist() == [self.core.slot(e) for e in experts.tolist()]

    def _logged(self) -> list[Command]:
        log: dict[str, Any] = self.core.take_log()
        columns = {key: value.tolist() for key, value in log.items() if not isinstance(value, tuple)}
        kinds = columns["kind"]
        experts, texts = (lists(*log[name]) for name in ("experts", "reason"))
        return [
            command({key: value[i] for key, value in columns.items()}, experts[i], texts[i])
            for i, kind in enumerate(kinds)
            if kind >= FIRST_COMMAND
        ]


def lists(values: Any, ends: npt.NDArray[np.int64]) -> list[Any]:
    """A list column of the log, one slice per record."""
    return [values[begin:end] for begin, end in pairwise([0, *ends.tolist()])]


def command(record: dict[str, Any], experts: npt.NDArray[np.int32], reason: bytes) -> Command:
    """One record of the log as the tuple that the reference returns."""
    name = COMMANDS[record["kind"] - FIRST_COMMAND]
    if name == "Search":
        kind = SEARCHES[record["detail"]]
        return (name, record["ticket"], kind, *(record[k] for k in ("layer", "target", "work", "blocking")))
    if name == "Load":
        place = (record[k] for k in ("expert", "device", "slot", "offset", "bytes"))
        return (name, *place, LOADS[record["detail"]], record["evicts"])
    if name == "Wait":
        return (name, tuple(experts.tolist()))
    if name == "Abort":
        return (name, record["expert"], reason.decode())
    return (name, record["ticket" if name == "WaitSearch" else "device"])

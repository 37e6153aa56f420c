"""`finemoe replay`: a recorded log, fed to a fresh core, must give the same commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import CoreError, TraceError
from ..policy.core import Core, make_config
from .decisions import FIRST_COMMAND, KINDS, LISTS, NUMBERS, decision_table, read_decisions

_CONTEXT_ROWS = 6
_SHOWN = ("sub_kind", *NUMBERS)


@dataclass(frozen=True)
class Divergence:
    """The first place where the fresh core does something else than the log says."""

    sequence: int
    iteration: int
    logged: str
    replayed: str
    context: tuple[str, ...]  # the rows of the log before it


@dataclass(frozen=True)
class ReplayReport:
    """What a replay compared, and where it first differed, if anywhere."""

    path: Path
    events: int
    commands: int
    iterations: int
    divergence: Divergence | None


def replay(results: str | Path) -> ReplayReport:
    """Feed a results directory's (or file's) decision log to a fresh core and compare every command.

    Raises TraceError where there is no readable log.
    """
    path = Path(results)
    if path.is_dir():
        path = path / "decisions.parquet"
    table, options = read_decisions(path)
    try:
        core = Core(make_config(options), -1)
    except (CoreError, TypeError) as error:
        raise TraceError(path, f"its core configuration is not valid ({error}).") from None
    rows = _Rows(table, int(options["layers"]), int(options["experts"]))
    rejected_at, rejection = len(rows), ""
    for index in np.flatnonzero(rows.kind < FIRST_COMMAND).tolist():
        try:
            rows.feed(core, index)
        except CoreError as error:
            rejected_at, rejection = index, str(error)
            break
    fresh = _Rows(decision_table(core.take_log(), options), rows.layers, rows.experts)
    first = _first_difference(rows, fresh)
    if first is None and rejection:
        first = rejected_at
    divergence = None
    if first is not None:
        replayed = fresh.describe(first) if first < len(fresh) else "nothing"
        if first >= rejected_at:
            replayed = f"rejected: {rejection}"
        divergence = Divergence(
            sequence=first,
            iteration=int(rows.column("iteration")[min(first, len(rows) - 1)]),
            logged=rows.describe(first) if first < len(rows) else "nothing",
            replayed=replayed,
            context=tuple(
                rows.describe(i) for i in range(max(0, first - _CONTEXT_ROWS), min(first, len(rows)))
            ),
        )
    events = int(np.count_nonzero(rows.kind < FIRST_COMMAND))
    iterations = int(np.count_nonzero(rows.kind == KINDS.index("begin_iteration")))
    return ReplayReport(path, events, len(rows) - events, iterations, divergence)


class _Rows:
    """A decision table as NumPy columns, with random access to its lists."""

    def __init__(self, table: pa.Table, layers: int, experts: int) -> None:
        table = table.combine_chunks()
        self.layers, self.experts = layers, experts
        self._table = table
        names = pa.array(KINDS)
        self.kind = np.asarray(
            pc.index_in(table["kind"].combine_chunks().dictionary_decode(), names).fill_null(-1)
        )
        self._columns: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.kind)

    def column(self, name: str) -> Any:
        """A column as NumPy values; strings as objects."""
        if name not in self._columns:
            chunk = self._table[name].combine_chunks()
            if pa.types.is_dictionary(chunk.type):
                chunk = chunk.dictionary_decode()
            self._columns[name] = chunk.to_numpy(zero_copy_only=False)
        return self._columns[name]

    def list_parts(self, name: str) -> tuple[Any, Any]:
        """Offsets and values of a list column."""
        key = f"{name} list"
        if key not in self._columns:
            chunk = self._table[name].combine_chunks()
            self._columns[key] = (chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=False))
        parts: tuple[Any, Any] = self._columns[key]
        return parts

    def items(self, name: str, index: int) -> Any:
        offsets, values = self.list_parts(name)
        return values[offsets[index] : offsets[index + 1]]

    def describe(self, index: int) -> str:
        """One line: sequence, kind, and the fields that are set."""
        shown = [f"#{index}", f"{self.column('time_s')[index]:.9g}s", KINDS[self.kind[index]]]
        for name in _SHOWN:
            value = self.column(name)[index]
            if value is not None and value != -1:
                shown.append(f"{name}={value}")
        experts = self.items("experts", index)
        if len(experts):
            shown.append(f"experts={experts.tolist()}")
        reason = self.column("reason")[index]
        return " ".join([*shown, reason] if reason else shown)

    def feed(self, core: Core, index: int) -> None:
        """Play the event of that row."""
        feeder = _FEEDERS[KINDS[self.kind[index]]]
        feeder(self, core, index, float(self.column("time_s")[index]))


def _first_difference(logged: _Rows, fresh: _Rows) -> int | None:
    n = min(len(logged), len(fresh))
    differs = logged.kind[:n] != fresh.kind[:n]
    for name in ("time_s", "iteration", "blocking", "reason", *_SHOWN):
        differs |= logged.column(name)[:n] != fresh.column(name)[:n]
    for name in LISTS:
        differs |= _lists_differ(logged.list_parts(name), fresh.list_parts(name), n)
    if differs.any():
        return int(np.argmax(differs))
    return n if len(logged) != len(fresh) else None


def _lists_differ(one: tuple[Any, Any], other: tuple[Any, Any], n: int) -> Any:
    """Per row, whether two list columns differ: by length, or by the first value that differs."""
    lengths = [np.diff(offsets[: n + 1]) for offsets, _ in (one, other)]
    differs = lengths[0] != lengths[1]
    same = int(np.argmax(differs)) if differs.any() else n  # up to here the offsets agree
    end = int(one[0][same])
    unequal = np.flatnonzero(one[1][:end] != other[1][:end])
    if unequal.size:
        differs[np.searchsorted(one[0][: same + 1], unequal[0], side="right") - 1] = True
    return differs


def _seed_store(rows: _Rows, core: Core, i: int, time_s: float) -> None:
    ages, values = rows.items("requests", i), rows.items("values", i)
    size = len(ages) * rows.layers * rows.experts
    core.seed_store(values[:size], values[size:] if len(values) > size else None, ages.tolist(), time_s)


def _begin_iteration(rows: _Rows, core: Core, i: int, time_s: float) -> None:
    flags = rows.items("phases", i).tolist()
    made = [
        (request, "decode" if flag & 1 else "prefill", tokens, bool(flag & 2))
        for request, tokens, flag in zip(
            rows.items("requests", i).tolist(), rows.items("tokens", i).tolist(), flags, strict=True
        )
    ]
    embeddings = rows.items("values", i)
    core.begin_iteration(made, embeddings if len(embeddings) else None, time_s)


def _gate(rows: _Rows, core: Core, i: int, time_s: float) -> None:
    experts, counts = rows.items("experts", i).tolist(), rows.items("token_counts", i).tolist()
    core.gate(int(rows.column("layer")[i]), rows.items("values", i), experts, counts, time_s)


def _foresight(rows: _Rows, core: Core, i: int, time_s: float) -> None:
    ends = np.cumsum(rows.items("token_counts", i))
    steps = np.split(rows.items("experts", i), ends)[:-1]
    core.foresight(int(rows.column("ticket")[i]), [step.tolist() for step in steps], time_s)


_FEEDERS: dict[str, Callable[[_Rows, Core, int, float], object]] = {
    "seed_store": _seed_store,
    "begin_iteration": _begin_iteration,
    "gate": _gate,
    "speculation": lambda rows, core, i, t: core.speculation(
        int(rows.column("layer")[i]), int(rows.column("target")[i]), rows.items("values", i), t
    ),
    "search_done": lambda rows, core, i, t: core.search_done(int(rows.column("ticket")[i]), t),
    "loaded": lambda rows, core, i, t: core.loaded(int(rows.column("expert")[i]), t),
    "paused": lambda rows, core, i, t: core.paused(
        int(rows.column("expert")[i]), int(rows.column("bytes")[i]), t
    ),
    "load_failed": lambda rows, core, i, t: core.load_failed(
        int(rows.column("expert")[i]), str(rows.column("reason")[i]), t
    ),
    "computed": lambda rows, core, i, t: core.computed(
        int(rows.column("layer")[i]), rows.items("experts", i).tolist(), t
    ),
    "end_iteration": lambda rows, core, i, t: core.end_iteration(t),
    "foresight": _foresight,
}

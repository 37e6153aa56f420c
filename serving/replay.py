"""`finemoe replay`: a recorded log, fed to a fresh core, must give the same commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import CoreError, SettingError, TraceError
from ..policy.core import POLICY_OPTIONS, Core, core_options, make_core
from ..policy.systems import find_system
from .decisions import (
    FIRST_COMMAND,
    KINDS,
    LISTS,
    NUMBERS,
    Decisions,
    kind_codes,
    list_parts,
    log_table,
    read_decisions,
)

_CONTEXT_ROWS = 6
_SHOWN = ("sub_kind", *NUMBERS)
#: What the binding raises for values that no event can have.
_UNFIT = (TypeError, ValueError, RuntimeError, OverflowError, IndexError, MemoryError)
#: Options of 64 bits; the other whole numbers have 32.
_WIDE_OPTIONS = ("expert_bytes", "embedding_work", "policy_seed")


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
    divergence: Divergence | None  # of the core's decisions
    alterations: tuple[str, ...]  # in what the log is not the one that was written

    @property
    def identical(self) -> bool:
        """The log is the one that was written, and the fresh core decided all of it again."""
        return self.divergence is None and not self.alterations


def replay(results: str | Path) -> ReplayReport:
    """Feed a results directory's (or file's) decision log to a fresh core and compare every command.

    Then what the core cannot know is compared with the digests of the writer: whether rows are missing at the
    end, say, or fields that decide nothing were changed. Raises TraceError where there is no readable log.
    """
    path = Path(results)
    if path.is_dir():
        path = path / "decisions.parquet"
    log = read_decisions(path)
    core = _fresh_core(path, log.options)
    rows = _Rows(log.table, log.options["layers"], log.options["experts"])
    rejected_at, rejection = len(rows), ""
    for index in np.flatnonzero(rows.kind < FIRST_COMMAND).tolist():
        try:
            rows.feed(core, index)
        except CoreError as error:
            rejected_at, rejection = index, str(error)
        except _UNFIT as error:
            about = str(error).partition("(): ")[2] or str(error)  # without the name of the binding's method
            rejected_at, rejection = index, f"no event has these values ({about.splitlines()[0]})"
        if rejection:
            break
    fresh = _Rows(log_table(core.take_log()), rows.layers, rows.experts)
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
    return ReplayReport(
        path, events, len(rows) - events, iterations, divergence, _alterations(log, rows.column("sequence"))
    )


def _fresh_core(path: Path, options: dict[str, Any]) -> Core:
    """A core of the log's options, which were read from a file and may be anything."""

    def refuse(problem: str) -> TraceError:
        remedy = "Run the simulation again for an unaltered log."
        return TraceError(path, problem, place="metadata finemoe.core", remedy=remedy)

    known = core_options(
        find_system("lru"),
        layers=1,
        experts=1,
        top_k=1,
        devices=1,
        slots_per_device=1,
        expert_bytes=1,
        prefetch_distance=1,
        store_capacity=1,
        embedding_width=0,
        embedding_work=0,
    )
    if "plugin" in (options.get("predictor"), options.get("eviction")):
        known |= dict(zip(POLICY_OPTIONS, ("", "", 0), strict=True))
    for key, example in known.items():
        if key not in options:
            raise refuse(f"the option {key} is missing.")
        value = options[key]
        if type(value) is not type(example) and not (type(example) is float and type(value) is int):
            raise refuse(f"{key} is {value!r}, which is not of type {type(example).__name__}.")
        bits = 63 if key in _WIDE_OPTIONS else 31
        if type(value) is int and not -(1 << bits) <= value < 1 << bits:
            raise refuse(f"{key} is {value}, beyond {bits + 1} bits.")
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise refuse(f"{unknown[0]} is no option of the core.")
    try:
        return make_core(options, -1)
    except SettingError as error:
        raise TraceError(
            path, f"its policy cannot decide again: {error}", place="metadata finemoe.core"
        ) from error
    except CoreError as error:
        raise refuse(f"its core options are not valid ({error}).") from None
    except _UNFIT as error:
        shown = ", ".join(f"{key} {value}" for key, value in options.items() if type(value) is int)
        raise refuse(f"no core can be built with these options ({type(error).__name__}: {shown}).") from None


def _alterations(log: Decisions, sequence: Any) -> tuple[str, ...]:
    """In what the log differs from the one that was written, the place first where one is known."""
    found = []
    misplaced = np.flatnonzero(sequence != np.arange(len(sequence)))
    if misplaced.size:
        first = int(misplaced[0])
        found.append(f"row {first} has the sequence {sequence[first]}")
    missing = log.written_rows - len(sequence)
    if missing:
        where = "" if misplaced.size else " at the end"
        rows = f"{abs(missing):,} of {log.written_rows:,} rows are missing" if missing > 0 else ""
        found.append((rows or f"{-missing:,} rows follow the {log.written_rows:,} that were written") + where)
    else:  # otherwise every column differs
        found += [f"column {name} was altered" for name in log.altered_columns]
    if log.options_altered:
        found.append("the core's options were altered")
    return tuple(found)


class _Rows:
    """A decision table as NumPy columns, with random access to its lists."""

    def __init__(self, table: pa.Table, layers: int, experts: int) -> None:
        self.layers, self.experts = layers, experts
        self._table = table.combine_chunks()
        self.kind = kind_codes(self._table["kind"].combine_chunks(), "kind")
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
            self._columns[key] = list_parts(self._table[name].combine_chunks())
        parts: tuple[Any, Any] = self._columns[key]
        return parts

    def items(self, name: str, index: int) -> Any:
        offsets, values = self.list_parts(name)
        return values[offsets[index] : offsets[index + 1]]

    def gate_rows(self, index: int) -> Any:
        """The row's `values` as gate rows [B, J]; CoreError where they are none."""
        values = self.items("values", index)
        if len(values) % self.experts:
            raise CoreError(f"{len(values)} values are no rows of {self.experts} probabilities")
        return values.reshape(-1, self.experts)

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
    differs |= logged.column("time_s")[:n].view(np.int64) != fresh.column("time_s")[:n].view(np.int64)
    for name in ("iteration", "blocking", "reason", *_SHOWN):
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
    values = [
        part[:end].view(np.uint16) if part.dtype == np.float16 else part[:end] for _, part in (one, other)
    ]
    unequal = np.flatnonzero(values[0] != values[1])
    if unequal.size:
        differs[np.searchsorted(one[0][: same + 1], unequal[0], side="right") - 1] = True
    return differs


def _seed_store(rows: _Rows, core: Core, i: int, time_s: float) -> None:
    ages, values = rows.items("requests", i), rows.items("values", i)
    size = len(ages) * rows.layers * rows.experts
    core.seed_store(values[:size], values[size:] if len(values) > size else None, ages.tolist(), time_s)


def _begin_iteration(rows: _Rows, core: Core, i: int, time_s: float) -> None:
    parts = [rows.items(name, i).tolist() for name in ("requests", "tokens", "phases")]
    if len({len(part) for part in parts}) > 1:
        raise CoreError(f"{len(parts[0])} requests, {len(parts[1])} tokens and {len(parts[2])} phases")
    made = [
        (request, "decode" if flag & 1 else "prefill", tokens, bool(flag & 2))
        for request, tokens, flag in zip(*parts, strict=True)
    ]
    embeddings = rows.items("values", i)
    core.begin_iteration(made, embeddings if len(embeddings) else None, time_s)


def _gate(rows: _Rows, core: Core, i: int, time_s: float) -> None:
    experts, counts = rows.items("experts", i).tolist(), rows.items("token_counts", i).tolist()
    # After the token counts of the experts come those of each row, where the predictor needs them.
    row_counts = np.array(counts[len(experts) :], np.int32).reshape(-1, rows.experts)
    core.gate(
        int(rows.column("layer")[i]),
        rows.gate_rows(i),
        experts,
        counts[: len(experts)],
        time_s,
        row_counts if row_counts.size else None,
    )


def _foresight(rows: _Rows, core: Core, i: int, time_s: float) -> None:
    ends = np.cumsum(rows.items("token_counts", i))
    steps = np.split(rows.items("experts", i), ends)[:-1]
    core.foresight(int(rows.column("ticket")[i]), [step.tolist() for step in steps], time_s)


_FEEDERS: dict[str, Callable[[_Rows, Core, int, float], object]] = {
    "seed_store": _seed_store,
    "preload": lambda rows, core, i, t: core.preload(rows.items("experts", i).tolist(), t),
    "begin_iteration": _begin_iteration,
    "gate": _gate,
    "speculation": lambda rows, core, i, t: core.speculation(
        int(rows.column("layer")[i]), int(rows.column("target")[i]), rows.gate_rows(i), t
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
    "end_iteration": lambda rows, core, i, t: core.end_iteration(t, rows.items("requests", i).tolist()),
    "foresight": _foresight,
}

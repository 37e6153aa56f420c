"""`finemoe replay`: a recorded log, fed to a fresh core, must give the same commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CoreError, SettingError, TraceError
from ..policy.core import POLICY_OPTIONS, Core, core_options, make_core
from ..policy.systems import find_system
from .decisions import FIRST_COMMAND, KINDS, LISTS, Decisions, log_table, read_decisions
from .log_rows import SHOWN, LogRows

_CONTEXT_ROWS = 6
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
    rows = LogRows(log.table, log.options["layers"], log.options["experts"])
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
    fresh = LogRows(log_table(core.take_log()), rows.layers, rows.experts)
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


def _first_difference(logged: LogRows, fresh: LogRows) -> int | None:
    n = min(len(logged), len(fresh))
    differs = logged.kind[:n] != fresh.kind[:n]
    differs |= logged.column("time_s")[:n].view(np.int64) != fresh.column("time_s")[:n].view(np.int64)
    for name in ("iteration", "blocking", "reason", *SHOWN):
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

"""The rules of the core, checked over a run's decision log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...serving.decisions import FIRST_COMMAND, KINDS
from .observed import ObservedCore
from .picture import rule
from .rules import RuleObserver
from .searches import Command

if TYPE_CHECKING:
    import pyarrow as pa

    from ...serving.outcome import CellOutcome

Logged = dict[str, Any]


class LoggedRow(NamedTuple):
    """One request's part of a logged iteration."""

    request: int
    phase: str
    tokens: int
    embedding: list[float] | None


def check_rules(outcome: CellOutcome) -> None:
    """Raise AssertionError for a command that breaks a rule, or a counter that is not what the log says.

    The log is to hold the whole run (`decisions = "all"`), all of it counted.
    """
    decisions = outcome.decisions
    assert decisions is not None, "the run kept no decisions"
    options = json.loads(decisions.schema.metadata[b"finemoe.core"])
    observer = RuleObserver(ObservedCore.of(options))
    for event, arguments, commands in logged_events(decisions, int(options["embedding_width"])):
        observer.observe(event, arguments, commands)
    counters: dict[str, Any] = dict(outcome.counters)
    for name, counted in outcome.per_layer.items():
        counters[name] = counted.tolist()
    observer.count_unused()
    seen = observer.counters
    seen.wasted_bytes += seen.unused_bytes  # as the world ends
    for name, value in (seen.values() | observer.searches.counters()).items():
        if name in counters:
            rule(counters[name] == value, f"{name}: core {counters[name]}, by the log {value}")


def logged_events(
    decisions: pa.Table, embedding_width: int
) -> Iterator[tuple[str, tuple[Any, ...], list[Command]]]:
    """Every event of a log with its arguments and the commands that followed it."""
    event: tuple[str, tuple[Any, ...]] | None = None
    commands: list[Command] = []
    for row in decisions.to_pylist():
        kind = row["kind"]
        if KINDS.index(kind) >= FIRST_COMMAND:
            commands.append((kind, *_COMMANDS[kind](row)))
            continue
        if event is not None:
            yield *event, commands
        arguments = _rows(row, embedding_width) if kind == "begin_iteration" else _EVENTS[kind](row)
        event, commands = (kind, arguments), []
    if event is not None:
        yield *event, commands


def _rows(row: Logged, width: int) -> tuple[list[LoggedRow]]:
    values = np.asarray(row["values"], np.float16).reshape(-1, width) if row["values"] else None
    return (
        [
            LoggedRow(
                request,
                "decode" if flags & 1 else "prefill",
                tokens,
                values[place].tolist() if values is not None and flags & 2 else None,
            )
            for place, (request, tokens, flags) in enumerate(
                zip(row["requests"], row["tokens"], row["phases"], strict=True)
            )
        ],
    )


def _fields(*names: str) -> Callable[[Logged], tuple[Any, ...]]:
    return lambda row: tuple(row[name] for name in names)


def _required(row: Logged) -> tuple[int, list[Sequence[int]]]:
    ends = np.cumsum(row["token_counts"])
    return row["ticket"], [part.tolist() for part in np.split(np.asarray(row["experts"]), ends)[:-1]]


_EVENTS: dict[str, Callable[[Logged], tuple[Any, ...]]] = {
    "seed_store": _fields("requests"),
    "preload": _fields("experts"),
    "gate": _fields("layer", "values", "experts", "token_counts"),
    "speculation": _fields("layer", "target", "values"),
    "search_done": _fields("ticket"),
    "loaded": _fields("expert"),
    "paused": _fields("expert", "bytes"),
    "load_failed": _fields("expert", "reason"),
    "computed": _fields("layer", "experts"),
    "end_iteration": _fields("requests"),
    "foresight": _required,
}
_COMMANDS: dict[str, Callable[[Logged], tuple[Any, ...]]] = {
    "Search": _fields("ticket", "sub_kind", "layer", "target", "work", "blocking"),
    "WaitSearch": _fields("ticket"),
    "PreemptPrefetch": _fields("device"),
    "Wait": _fields("experts"),
    "Load": _fields("expert", "device", "slot", "offset", "bytes", "sub_kind", "evicts"),
    "Abort": _fields("expert", "reason"),
}

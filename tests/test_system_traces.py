"""Every page of docs/systems: its traces, worked by hand there, are what both cores do."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_core import CompiledCore
from finemoe.policy.systems import SYSTEMS
from page_traces import PAGES, QUESTIONS, Player, Trace, equations, question_of, sides, traces
from reference_core import ReferenceCore

TRACES = traces()


@pytest.mark.parametrize("trace", TRACES, ids=str)
def test_the_compiled_core_does_what_the_page_says(trace: Trace) -> None:
    player = Player(trace, CompiledCore(trace.config()))
    for events, counts, commands, _ in trace.rows:
        if question_of(events) is None:
            assert (events, *player.row(events)) == (events, counts, commands)


@pytest.mark.parametrize("trace", TRACES, ids=str)
def test_the_plain_core_gives_the_pages_numbers(trace: Trace) -> None:
    core = ReferenceCore(trace.config())
    player = Player(trace, core)
    for events, counts, answer, _ in trace.rows:
        question = question_of(events)
        if question is None:
            assert (events, *player.row(events)) == (events, counts, answer)
            continue
        values = [float(QUESTIONS[question[0]](core, expert)) for expert in question[1]]
        said = [float(number.replace("∞", "inf")) for number in answer.split(", ")]
        assert said == pytest.approx(values, rel=1e-3), events


@pytest.mark.parametrize(
    ("page", "equation"),
    [(path.stem, found) for path in sorted(PAGES.glob("*.md")) for found in equations(path.read_text("utf-8"))],
)
def test_every_equation_of_the_pages_holds(page: str, equation: str) -> None:
    values = sides(equation)
    assert all(value == pytest.approx(values[0], abs=6e-4) for value in values), page


@pytest.mark.parametrize("name", [*SYSTEMS])
def test_every_system_has_a_trace_worked_by_hand(name: str) -> None:
    worked_elsewhere = {"finemoe": "worked-example.md", "map-tsd": "worked-example.md"}
    if name in worked_elsewhere:
        assert worked_elsewhere[name] in Path(PAGES / "finemoe.md").read_text("utf-8")
    else:
        assert name in {trace.system for trace in TRACES}

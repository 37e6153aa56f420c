"""The search worker: one thing at a time, in ticket order, and nothing for an iteration that is over."""

from __future__ import annotations

import pytest
from finemoe.policy.systems import SYSTEMS
from hypothesis import given, settings
from world_case import World, decisions_of, serve, worlds


@pytest.mark.parametrize("system", [name for name, row in SYSTEMS.items() if row.predictor == "map"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(world=worlds())
def test_searches_end_when_the_worker_has_done_them_one_after_another(system: str, world: World) -> None:
    inputs = world.cell(system)
    outcome = serve(inputs)
    rows = (
        decisions_of(outcome)
        .select(["time_s", "iteration", "kind", "sub_kind", "ticket", "work"])
        .to_pylist()
    )
    over_s = {row["iteration"]: row["time_s"] for row in rows if row["kind"] == "end_iteration"}
    free_s, expected = 0.0, {}
    for row in rows:
        if row["kind"] != "Search":
            continue
        start_s = max(row["time_s"], free_s)
        if row["sub_kind"] != "update" and over_s[row["iteration"]] < start_s:
            continue  # abandoned while it waited
        free_s = start_s + inputs.profile.search_latency_s + row["work"] / inputs.profile.search_rate
        expected[row["ticket"]] = free_s
    done = {row["ticket"]: row["time_s"] for row in rows if row["kind"] == "search_done"}
    in_time = {ticket: time_s for ticket, time_s in expected.items() if time_s < outcome.run_s}
    assert list(done) == list(in_time)
    assert list(done.values()) == pytest.approx(list(in_time.values()), rel=1e-12)

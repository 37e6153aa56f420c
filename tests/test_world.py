"""What the simulated world tells the oracle. What holds for every system is in the contract."""

from __future__ import annotations

from finemoe.policy.contract.worlds import with_another_future
from finemoe.traces.requests import Request
from world_case import MadeRouting, cell, decisions_of, serve, small_machine, small_model


def test_the_oracle_knows_the_future_of_running_requests() -> None:
    model = small_model(2, 4, 1)
    requests = [Request(0, 0.0, 3, 4)]
    inputs = cell("oracle", model, small_machine(), MadeRouting(model), requests, slots=4, settings={})
    one, other = serve(inputs), serve(with_another_future(inputs, 0, 3))
    told, changed = (
        [row for row in decisions_of(outcome).to_pylist() if row["kind"] == "foresight"]
        for outcome in (one, other)
    )
    assert told[0] == changed[0]  # the prefill
    assert told[1] != changed[1]  # the decode iterations, before the prefill has begun
    assert told[1]["iteration"] == -1

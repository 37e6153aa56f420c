"""Conservation over a long run of every system, and that the check notices what is off."""

from __future__ import annotations

import pytest
from finemoe.policy.contract.conservation import check_conservation
from finemoe.policy.systems import SYSTEMS
from finemoe.traces.requests import Request
from world_case import MadeRouting, cell, serve, small_machine, small_model


@pytest.mark.parametrize("system", [*SYSTEMS])
def test_over_many_seconds_and_a_warm_up(system: str) -> None:
    """A slow machine: the run takes many bins of the time series, idle ones among them."""
    model = small_model(layers=4, experts=8, top_k=2)
    machine = small_machine(2, link_bandwidth=1e7, memory_bandwidth=1e8, peak_flops=1e11, peer_bandwidth=1e8)
    requests = [Request(i, 3.0 * (i // 3) + 40.0 * (i > 5), 5 + i, 3 + 2 * i) for i in range(9)]
    inputs = cell(
        system,
        model,
        machine,
        MadeRouting(model, embedding_width=3),
        requests,
        slots=12,
        settings={"max_num_seqs": 2, "warmup": 2},
    )
    outcome = serve(inputs)
    assert outcome.run_s > 40.0
    check_conservation(outcome, inputs)


@pytest.mark.parametrize("column", ["stall_s", "link_busy_end_s", "tokens", "hits"])
def test_a_figure_that_is_off_is_noticed(column: str) -> None:
    model = small_model(layers=2, experts=4, top_k=1)
    requests = [Request(0, 0.0, 5, 4), Request(1, 0.0, 5, 4)]
    inputs = cell("lru", model, small_machine(), MadeRouting(model), requests, slots=3, settings={})
    outcome = serve(inputs)
    check_conservation(outcome, inputs)
    outcome.iterations.table()[column][2] += 1
    with pytest.raises(AssertionError):
        check_conservation(outcome, inputs)

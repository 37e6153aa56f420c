"""The transfer engine on real memory: what a forward pass computes with is what the files hold."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from finemoe.policy.systems import SYSTEMS
from finemoe.serving.decisions import decision_table
from finemoe.serving.replay import replay
from transfer_case import ForwardPass, Weights, running

ITERATIONS = 40


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("system", [name for name, row in SYSTEMS.items() if row.group == "system"])
def test_every_system_computes_with_the_right_bytes(
    weights: Weights, tmp_path: Path, system: str, devices: int
) -> None:
    with running(ForwardPass(weights, weights.source(), system, devices=devices)) as forward:
        for _ in range(ITERATIONS):
            forward.iterate()
        forward.engine.drain()
        statistics = forward.engine.statistics()
        counters = forward.core.counters()
    assert forward.compared >= ITERATIONS * 4 * 2
    loads = sum(device["loads"] for device in statistics["devices"])
    assert loads == counters["demand_loads"] + counters["prefetch_loads"]
    moved = sum(device["bytes"] for device in statistics["devices"])
    assert moved == counters["demand_bytes"] + counters["prefetch_bytes"]
    assert (loads == 0) == (system == "no-offload")
    pq.write_table(decision_table(forward.core.take_log(), forward.options), tmp_path / "decisions.parquet")
    assert replay(tmp_path).identical

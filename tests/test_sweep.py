"""Grids over machines and rates: their cells and folders, where they saturate, and OVERLOADED's factor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from finemoe import simulate
from finemoe.errors import CapacityError, SettingError
from finemoe.serving.cells import CellKey, cell_labels, cell_names
from finemoe.serving.metrics import CellSummary, Load, load
from finemoe.serving.output_folder import check_output
from finemoe.serving.settings_file import resolve
from finemoe.serving.slo import SloResult
from finemoe.serving.sweep import saturation
from finemoe.sim.plan import make_plan
from finemoe.traces.requests import Request
from world_case import ListedRouting, MadeRouting, cell, serve, small_machine, small_model


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten requests, two a second."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"{i / 2},{20 + i},{3 + i % 3}\n" for i in range(10))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    return path


def test_names_say_hardware_and_rate_only_where_there_are_several() -> None:
    plain = [CellKey("lru", "24GB", "h100", 2.0), CellKey("lfu", "0.25", "h100", 2.0)]
    assert cell_names(plain) == ("lru-24GB", "lfu-0.25")
    rates = [CellKey("lru", "24GB", "h100", rate) for rate in (0.5, 2.0, 1e-7, 12.25)]
    assert cell_names(rates) == ("lru-24GB-0.5rps", "lru-24GB-2rps", "lru-24GB-1e-07rps", "lru-24GB-12.25rps")
    both = [CellKey("lru", "24GB", name, rate) for name in ("h100", "my box") for rate in (1.0, 2.0)]
    assert cell_names(both)[2:] == ("lru-24GB-my_box-1rps", "lru-24GB-my_box-2rps")
    assert cell_labels(both)[2:] == ("lru 24GB my box 1/s", "lru 24GB my box 2/s")


def test_a_grid_has_every_machine_at_every_rate(trace: Path) -> None:
    options = {"trace": trace, "model": "gpt-oss-20b", "policy": "lru,no-offload", "expert_cache": "0.1,0.25"}
    plan = make_plan(resolve({**options, "hardware": "rtx3090,rtx3090x6", "rate": "1,4"}))
    assert len(plan.cells) == (2 + 1) * 2 * 2  # no-offload has one size
    assert [cell.name for cell in plan.cells[:4]] == [
        "lru-0.1-rtx3090-1rps",
        "lru-0.1-rtx3090-4rps",
        "lru-0.1-rtx3090x6-1rps",
        "lru-0.1-rtx3090x6-4rps",
    ]
    for one in plan.cells:
        last = [*one.requests][-1]
        assert (len(one.requests), last.index) == (10, 9)
        assert last.arrival_s == pytest.approx(9 / (one.rate_per_s or 0.0))
        assert (one.memory is None) == (one.system.preload == "all" and one.profile.devices == 1)
        if one.memory is not None:
            assert len(one.memory.devices) == one.profile.devices
    assert plan.trace["rates_per_s"] == [1.0, 4.0]
    assert plan.trace["rate_per_s"] is None


def test_two_machines_of_one_name_are_refused(trace: Path, tmp_path: Path) -> None:
    profiles = Path(__file__).resolve().parents[1] / "calibration" / "profiles"
    shutil.copy(profiles / "rtx3090.toml", tmp_path / "mine.toml")
    with pytest.raises(SettingError, match="has two profiles that are named rtx3090"):
        make_plan(resolve({"trace": trace, "hardware": ["rtx3090", str(tmp_path / "mine.toml")]}))


def test_nothing_fits_any_machine(trace: Path) -> None:
    with pytest.raises(CapacityError, match="rtx3090: device 0"):
        make_plan(resolve({"trace": trace, "policy": "no-offload", "hardware": "rtx3090,a100-80gb"}))


def test_results_of_a_sweep(trace: Path, tmp_path: Path) -> None:
    results = simulate(
        trace,
        model="gpt-oss-20b",
        policy="lru",
        hardware=["rtx3090", "rtx3090x6"],
        expert_cache="0.5",
        rate=[0.01, 100],
        max_num_seqs=2,
        slo="ttft_p90<1s",
        output=tmp_path / "out",
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(run["hardware"], run["rate_per_s"]) for run in summary["runs"]] == [
        ("rtx3090", 0.01),
        ("rtx3090", 100.0),
        ("rtx3090x6", 0.01),
        ("rtx3090x6", 100.0),
    ]
    does_not_fit = [run["status"].startswith("DOES NOT FIT") for run in summary["runs"]]
    assert does_not_fit == [True, True, False, False]
    slow, fast = results.runs[2:]
    assert slow.load.offered_requests_per_s == pytest.approx(0.01)
    assert fast.load.offered_requests_per_s == pytest.approx(100.0)
    assert (slow.status, fast.status.split()[0]) == ("OK", "OVERLOADED")
    assert fast.load.overload_factor is not None
    assert fast.load.served_requests_per_s is not None
    assert fast.load.overload_factor == pytest.approx(100.0 / fast.load.served_requests_per_s)
    assert slow.slo is not None
    assert fast.slo is not None
    assert (slow.slo.met, slow.slo.attainment, fast.slo.met) == (True, 1.0, False)
    assert [sweep["hardware"] for sweep in summary["saturation"]] == ["rtx3090", "rtx3090x6"]
    assert summary["saturation"][0]["rates_per_s"] == []
    assert summary["saturation"][1] == {
        "policy": "lru",
        "expert_cache": "0.5",
        "hardware": "rtx3090x6",
        "rates_per_s": [0.01, 100.0],
        "highest_rate_not_overloaded": 0.01,
        "highest_rate_meeting_slo": 0.01,
    }
    folder = tmp_path / "out" / "lru-0.5-rtx3090x6-0.01rps"
    table = pq.read_table(folder / "timeseries.parquet")
    assert table.num_rows == int(np.ceil(slow.simulated_s or 0.0))
    assert sum(table.column("output_tokens").to_pylist()) == sum(3 + i % 3 for i in range(10))
    check_output(tmp_path / "out")  # all of it is known as FineMoE's
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(SettingError, match=r"holds lru-0\.5-rtx3090x6-0\.01rps/notes\.txt"):
        check_output(tmp_path / "out")


def test_older_results_without_hardware_are_known(trace: Path, tmp_path: Path) -> None:
    simulate(trace, model="gpt-oss-20b", policy="lru,lfu", num_requests=2, output=tmp_path / "out")
    path = tmp_path / "out" / "summary.json"
    summary = json.loads(path.read_text())
    for run in summary["runs"]:
        del run["hardware"], run["rate_per_s"]
    path.write_text(json.dumps(summary))
    check_output(tmp_path / "out")


def run_at(rate: float, status: str, met: bool | None) -> CellSummary:
    factor = 2.0 if status.startswith("OVERLOADED") else None
    return CellSummary(
        policy="lru",
        expert_cache="24GB",
        expert_cache_bytes=1,
        hardware="h100",
        rate_per_s=rate,
        status=status,
        load=Load(overload_factor=factor),
        slo=SloResult((), met, 1.0, 1.0),
    )


def test_saturation_is_the_highest_rate_of_those_that_ran() -> None:
    runs = [
        run_at(4.0, "OVERLOADED 2x", False),
        run_at(1.0, "OK", True),
        run_at(2.0, "OK", None),
        run_at(8.0, "NOT RUN: interrupted", True),
    ]
    (found,) = saturation(runs)
    assert found.rates_per_s == (1.0, 2.0, 4.0)
    assert (found.highest_rate_not_overloaded, found.highest_rate_meeting_slo) == (2.0, 1.0)
    (none,) = saturation([runs[0], run_at(5.0, "OVERLOADED 3x", None)])
    assert (none.highest_rate_not_overloaded, none.highest_rate_meeting_slo) == (None, None)
    assert saturation(runs[:1]) == ()


@pytest.mark.parametrize("utilisation", [0.5, 0.98, 1.25, 2.0, 7.5])
def test_the_overload_factor_is_offered_over_served(utilisation: float) -> None:
    """One request at a time, all alike: the machine serves 1/s of them per second, s one's service time."""
    model = small_model(layers=2, experts=4, top_k=2)
    routing = MadeRouting(model).routing_for(0, 6, 5)

    def served(gap_s: float, count: int) -> tuple[Load, float]:
        requests = [Request(i, gap_s * i, 6, 5) for i in range(count)]
        inputs = cell(
            "no-offload",
            model,
            small_machine(),
            ListedRouting(MadeRouting(model).meta, [routing] * count),
            requests,
            slots=8,
            settings={"max_num_seqs": 1, "decisions": 0},
        )
        outcome = serve(inputs)
        return load(outcome.requests, max_num_seqs=1), outcome.run_s

    _, service_s = served(1.0, 1)
    found, _ = served(service_s / utilisation, 60)
    assert found.offered_requests_per_s == pytest.approx(utilisation / service_s)
    if utilisation <= 1.0:
        assert found.overload_factor is None
        return
    assert found.served_requests_per_s == pytest.approx(1.0 / service_s)
    assert found.overload_factor == pytest.approx(utilisation)

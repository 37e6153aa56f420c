"""The grid: what is served, what fits, what the results say, and the API under the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as pq
import pytest
from finemoe import simulate
from finemoe.errors import CapacityError, SettingError
from finemoe.serving.grid import Cell, named_cells
from finemoe.serving.outcome import Progress
from finemoe.serving.settings_file import resolve
from finemoe.sim.plan import Plan, make_plan
from finemoe.sim.run import Interrupted, OnProgress
from finemoe.traces.npz_import import import_chosen_experts


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty requests, two a second."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"{i / 2},{20 + i},{3 + i % 3}\n" for i in range(20))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    return path


def plan(trace: Path, **options: object) -> Plan:
    return make_plan(resolve({"trace": trace, "model": "gpt-oss-20b", **options}))


def test_offline_serves_what_the_store_has_not_seen(trace: Path) -> None:
    one, again, other = (plan(trace, offline=True, seed=seed) for seed in (0, 0, 1))
    served = [request.index for request in one.requests]
    stored = [request.index for request in one.training]
    assert (len(served), len(stored)) == (6, 14)  # 30 % and 70 %
    assert sorted(served + stored) == list(range(20))
    assert served == sorted(served)
    assert stored == sorted(stored)
    assert [request.index for request in again.requests] == served
    assert [request.index for request in other.requests] != served
    assert not plan(trace).training


def test_a_sample_is_drawn_by_the_seed(trace: Path) -> None:
    drawn = [[request.index for request in plan(trace, sample=5, seed=seed).requests] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] == sorted(set(drawn[0]))
    assert len(drawn[0]) == 5
    assert drawn[2] != drawn[0]
    assert plan(trace, sample=5).trace["remarks"] == ["5 of 20 requests, drawn at random (seed 0)"]
    both = plan(trace, sample=10, offline=True)
    assert (len(both.requests), len(both.training)) == (3, 7)


def test_a_preloaded_system_runs_once(trace: Path) -> None:
    cells = plan(trace, policy="lru,no-offload", expert_cache="0.25,0.5").cells
    assert [cell.name for cell in cells] == ["lru-0.25", "lru-0.5", "no-offload-all"]
    assert [cell.memory.slots for cell in cells if cell.memory] == [192, 384, 768]


def test_two_cells_never_share_a_folder(trace: Path) -> None:
    made = plan(trace, expert_cache=["24 GB", "24GB"])
    assert [cell.name for cell in made.cells] == ["finemoe-24_GB", "finemoe-24GB"]
    # should sizes ever be written so
    same = [
        replace(cell, expert_cache=text) for cell, text in zip(made.cells, ("24 GB", "24_GB"), strict=True)
    ]
    with pytest.raises(
        SettingError,
        match="'finemoe 24 GB' and 'finemoe 24_GB' would both be kept in the folder finemoe-24_GB",
    ):
        named_cells(same)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"time_scale": 1e308},
            r"--time-scale is 1e\+308: request 19 .* would arrive at .* Give a smaller one",
        ),
        ({"time_scale": 1e9}, r"request 19 of .* would arrive at 9\.5e\+09 s; at most 1e\+09 s"),
        ({"rate": 1e-300}, r"--rate is 1e-300: request 19 .* Give a greater one"),
        ({"rate": 5e-324}, r"--rate is .* would arrive at inf s"),
    ],
)
def test_arrivals_beyond_the_clock_are_refused(trace: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        plan(trace, **options)
    assert [*plan(trace, time_scale=1e8).requests][-1].arrival_s == 9.5e8


def test_an_output_that_is_no_path_is_refused(trace: Path) -> None:
    with pytest.raises(SettingError, match=r"--output is 5\. Give the path"):
        simulate(trace, output=5)  # type: ignore[arg-type]


def test_all_systems_are_in_order_of_the_table(trace: Path) -> None:
    names = [cell.system.name for cell in plan(trace, policy="all").cells]
    assert {"finemoe", "lru", "lfu", "deepspeed", "no-offload", "oracle"} <= set(names)
    assert len(names) == len(set(names))


def test_a_cell_that_does_not_fit_says_so_among_others(trace: Path, tmp_path: Path) -> None:
    results = simulate(
        trace,
        model="gpt-oss-20b",
        hardware="rtx3090",
        policy="no-offload,lru",
        expert_cache="96slots",
        num_requests=2,
        output=tmp_path / "out",
    )
    whole, lru = results.runs
    assert whole.status.startswith("DOES NOT FIT: rtx3090: device 0")
    assert (whole.iterations, whole.tpot_s.mean, whole.ran) == (0, None, False)
    assert (lru.status, lru.ran) == ("OK", True)
    assert any("at or below one token cycle" in note for note in lru.notes)
    assert results.partial is False


def test_nothing_that_fits_is_an_error_before_anything_is_written(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="expert slots"):
        simulate(trace, model="gpt-oss-20b", hardware="rtx3090", policy="no-offload", output=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


def test_a_request_longer_than_the_kv_cache_is_found_before_the_run(trace: Path) -> None:
    with pytest.raises(CapacityError, match=r"KV cache for 3,?000,?003"):
        plan(trace, prompt_tokens=3_000_000, num_requests=1)


def test_results_of_a_run(trace: Path, tmp_path: Path) -> None:
    seen: list[tuple[Cell, Progress]] = []
    results = simulate(
        str(trace),
        model="gpt-oss-20b",
        policy=["lru"],
        num_requests="5",
        output_tokens=40,
        output=tmp_path / "out",
        on_progress=lambda cell, progress: seen.append((cell, progress)),
    )
    run = results.runs[0]
    assert (run.policy, run.expert_cache, run.requests) == ("lru", "24GB", 5)
    assert results.directory == tmp_path / "out"
    assert results.trace["requests"] == 5
    assert results.trace["output_tokens_mean"] == 40
    assert results.evidence["trace_changed_by"] == ["output_tokens"]
    assert "policy" not in results.evidence["assumed"]
    assert results.config["prefetch_distance"] == 3
    requests = pq.read_table(tmp_path / "out" / "requests.parquet")
    assert requests.column("output_tokens").to_pylist() == [40] * 5
    tpot = [(row["finished_s"] - row["first_token_s"]) / 39 for row in requests.to_pylist()]
    assert run.tpot_s.mean == pytest.approx(sum(tpot) / 5)
    iterations = pq.read_table(tmp_path / "out" / "iterations.parquet")
    assert iterations.num_rows == run.iterations
    assert sum(iterations.column("tokens").to_pylist()) == 5 * 39 + sum(20 + i for i in range(5))
    assert all(cell.system.name == "lru" for cell, _ in seen)
    assert all(progress.requests == 5 for _, progress in seen)
    assert json.loads(results.to_json())["runs"][0]["policy"] == "lru"


def test_warm_up_requests_are_served_and_not_counted(trace: Path, tmp_path: Path) -> None:
    results = simulate(
        trace, model="gpt-oss-20b", policy="lru", num_requests=6, warmup=4, output=tmp_path / "out"
    )
    assert results.runs[0].requests == 2
    counters = results.runs[0].counters
    whole = simulate(
        trace, model="gpt-oss-20b", policy="lru", num_requests=6, output=tmp_path / "whole"
    ).runs[0]
    assert 0 < counters["demand_bytes"] < whole.counters["demand_bytes"]
    assert counters["demand_bytes"] == results.runs[0].demand_bytes == counters["bytes_moved"]
    counted = pq.read_table(tmp_path / "out" / "requests.parquet").column("counted").to_pylist()
    assert counted == [False] * 4 + [True] * 2


def test_an_offline_run_has_no_queue(trace: Path, tmp_path: Path) -> None:
    results = simulate(trace, model="gpt-oss-20b", offline=True, output=tmp_path / "out")
    run = results.runs[0]
    assert (run.requests, results.trace["training_requests"]) == (6, 14)
    assert run.queue_s.mean is None
    assert run.load.overload_factor is None
    assert run.ttft_s == run.ttft_service_s
    iterations = pq.read_table(tmp_path / "out" / "iterations.parquet")
    assert set(iterations.column("batch").to_pylist()) == {1}
    assert run.counters["searches"] > 0  # the store is not empty: its first iteration searches already


def test_routing_of_another_shape_is_refused(trace: Path, tmp_path: Path) -> None:
    preset = Path(__file__).resolve().parents[1] / "traces" / "presets" / "gpt-oss-20b.toml"
    with pytest.raises(
        SettingError, match=r"whose shape is not that of --model mixtral-8x7b: layers 24 against 32"
    ):
        make_plan(resolve({"trace": trace, "model": "mixtral-8x7b", "routing": preset}))
    assert plan(trace, routing=preset).routing.meta.source == "synthetic"


def test_an_unknown_option_is_refused(trace: Path) -> None:
    with pytest.raises(SettingError, match=r"polcy is not a setting\. Did you mean policy\?"):
        simulate(trace, polcy="lru")


def interrupt_in(system: str) -> OnProgress:
    """A progress callback that presses Ctrl-C in the run of a system."""

    def press(cell: Cell, progress: Progress) -> None:
        if cell.system.name == system:
            raise KeyboardInterrupt

    return press


@pytest.mark.parametrize(("policy", "kept"), [("lru,lfu", True), ("lfu,lru", False)])
def test_an_interrupted_grid_keeps_its_finished_cells(
    trace: Path, tmp_path: Path, policy: str, kept: bool
) -> None:
    with pytest.raises(Interrupted) as caught:
        simulate(
            trace,
            model="gpt-oss-20b",
            policy=policy,
            num_requests=2,
            output_tokens=200,
            output=tmp_path / "out",
            on_progress=interrupt_in("lfu"),
        )
    results = caught.value.results
    assert (results is not None) == kept
    assert (tmp_path / "out").exists() == kept
    assert not (tmp_path / "out.partial").exists()
    if results is not None:
        assert results.partial
        assert [run.status for run in results.runs] == ["OK", "NOT RUN: interrupted"]
        assert json.loads((tmp_path / "out" / "summary.json").read_text())["partial"] is True


@pytest.mark.parametrize("prefill", ["derived", "none"])
def test_recorded_routing_says_what_was_continued_and_scaled(
    trace: Path, tmp_path: Path, prefill: Literal["derived", "none"]
) -> None:
    """Recordings of the gpt-oss shape, two tokens each: shorter than every request of the trace."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((6, 24, 32)), axis=2)[..., :4].astype(np.uint8)
    np.savez(
        tmp_path / "recording.npz",
        expert_ids=ids,
        probs=np.full((6, 24, 4), 0.25, np.float16),
        offsets=np.arange(0, 7, 2),
    )
    import_chosen_experts(tmp_path / "recording.npz", tmp_path / "routing.parquet", prefill=prefill)
    run = simulate(
        trace,
        model="gpt-oss-20b",
        routing=tmp_path / "routing.parquet",
        policy="finemoe",
        num_requests=4,
        output=tmp_path / "out",
    ).runs[0]
    assert "semantic: INACTIVE (the routing has no embeddings)" in run.notes
    assert any("4 requests are longer than their recording" in note for note in run.notes)
    assert any("4 prefills of the routing trace scaled" in note for note in run.notes)
    assert (run.ttft_s.mean is None) == (prefill == "none")
    assert any("TTFT: undefined" in note for note in run.notes) == (prefill == "none")
    assert run.tpot_s.mean is not None

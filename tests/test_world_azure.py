"""Real traffic: the first 64 requests of the Azure conversation trace, every system, two cache sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from finemoe import simulate
from finemoe.policy.systems import SYSTEMS
from finemoe.serving.replay import replay
from finemoe.serving.results import Results
from shared_data import shared

TRACE = "requests/AzureLLMInferenceTrace_conv.csv"
CACHES = ("12GB", "24GB")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Mixtral-8x7B on six RTX 3090, as without options, the log of the first 100 iterations kept."""
    output = tmp_path_factory.mktemp("azure") / "results"
    return simulate(
        shared(TRACE), policy="all", expert_cache=CACHES, num_requests=32, decisions=100, output=output
    )


def test_tpot_lies_between_no_offload_and_oracle_and_the_others(results: Results) -> None:
    tpot_s = {(run.policy, run.expert_cache): run.tpot_s.mean for run in results.runs}
    least = tpot_s.pop(("no-offload", "all"))
    assert least is not None
    offloading = sum(row.group == "system" for row in SYSTEMS.values()) - 1
    assert len(tpot_s) == offloading * len(CACHES)
    for (policy, cache), mean_s in tpot_s.items():
        oracle_s = tpot_s["oracle", cache]
        assert mean_s is not None
        assert oracle_s is not None
        assert least <= oracle_s <= mean_s, f"{policy} at {cache}"


def test_bytes_moved_are_whole_experts_but_for_prefetches_cut_short(results: Results) -> None:
    expert_bytes = 2 * 3 * 4096 * 14336  # three bf16 matrices
    for run in results.runs:
        counters = run.counters
        assert counters["bytes_moved"] == counters["demand_bytes"] + counters["prefetch_bytes"]
        whole = (counters["demand_loads"] + counters["prefetch_loads"]) * expert_bytes
        cut_short = counters["bytes_moved"] - whole
        assert cut_short >= 0
        assert cut_short <= counters["preemptions"] * expert_bytes
        assert run.requests == 32


def test_replay_of_every_system_is_identical(results: Results) -> None:
    assert results.directory is not None
    for run in results.runs:
        report = replay(results.directory / f"{run.policy}-{run.expert_cache}")
        assert report.identical
        assert report.iterations == 100


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    trace = str(shared(TRACE))
    for name, hash_seed in (("one", "1"), ("two", "2")):
        options = f"policy='all,ablations', num_requests=2, output={name!r}"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed}
        subprocess.run(
            [sys.executable, "-c", f"from finemoe import simulate; simulate({trace!r}, {options})"],
            cwd=tmp_path,
            env=environment,
            check=True,
        )
    one, two = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.*") if path.is_file()}
        for root in (tmp_path / "one", tmp_path / "two")
    )
    assert sum(path.name == "decisions.parquet" for path in one) == len(SYSTEMS)
    assert Path("summary.json") in one
    one[Path("wall.json")] = two[Path("wall.json")]  # wall times are kept apart
    assert one.keys() == two.keys()
    assert [path for path in one if one[path] != two[path]] == []

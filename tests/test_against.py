"""The simulator on a real run's iterations: what it is driven with, and what is found to differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="torch is not installed (extra `real`)")
pytest.importorskip("transformers", reason="transformers is not installed (extra `real`)")

import finemoe
from finemoe.errors import SettingError, TraceError
from finemoe.policy.core import make_core
from finemoe.serving.decision_diff import compare, told_by
from finemoe.serving.decisions import log_table, read_decisions
from finemoe.serving.log_rows import LogRows
from finemoe.sim.against import against
from served_case import checkpoint, prompts, trace

POLICIES = "finemoe,moe-infinity,promoe,mixtral-offloading,deepspeed,lru,lfru,no-offload"
WITHOUT_PREFETCH = {"deepspeed", "lru", "lfru", "no-offload"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real results of several systems."""
    folder = tmp_path_factory.mktemp("run")
    finemoe.serve(
        trace(folder / "trace.csv", [(3 + i, 4 + i % 5) for i in range(10)], 0.01),
        model=checkpoint(folder / "model"),
        prompts=prompts(folder / "prompts.jsonl"),
        policy=POLICIES,
        expert_cache="12slots",
        bandwidth_limit="20MB/s",
        output=folder / "out",
    )
    return folder / "out"


def test_same_gates_and_where_decisions_part(run: Path) -> None:
    cells = against(run)
    assert [cell.policy for cell in cells] == POLICIES.split(",")
    for cell in cells:
        found = cell.comparison
        assert found.layers == cell.iterations * 3
        assert found.equal_requirements == found.layers
        if cell.policy in WITHOUT_PREFETCH:  # nothing but requirements decides
            assert not found.differences
            assert found.equal_lookups == found.layers
            assert found.recorded_loads == found.simulated_loads
        assert cell.recorded_stall_s is not None
        assert (cell.simulated_stall_s == 0) == (cell.policy == "no-offload")
    hasty = next(cell for cell in against(run, "rtx3090") if cell.policy == "finemoe")
    assert hasty.comparison.equal_requirements == hasty.comparison.layers
    assert len(hasty.comparison.differences) == 2
    for first in hasty.comparison.differences:
        assert first.recorded != first.simulated
        assert first.recorded_before
        assert first.simulated_before
    assert against(run, "rtx3090") == against(run, "rtx3090")


def test_lookups_are_what_the_core_counted(run: Path) -> None:
    for name in ("finemoe-12slots", "promoe-12slots", "moe-infinity-12slots"):
        log = read_decisions(run / name / "decisions.parquet")
        rows = LogRows(log.table, log.options["layers"], log.options["experts"])
        told = told_by(rows)
        steps = pq.read_table(run / name / "iterations.parquet").to_pydict()
        assert sum(len(lookup.required) for lookup in told.lookups) == sum(steps["activated"])
        assert sum(len(lookup.hits) for lookup in told.lookups) == sum(steps["hits"])
        assert sum(len(lookup.late) for lookup in told.lookups) == sum(steps["late"])


def test_a_load_that_ends_later_is_named(run: Path) -> None:
    """A log again up to some gate, but for a prefetch that arrives after that gate instead of before it."""
    log = read_decisions(run / "mixtral-offloading-12slots" / "decisions.parquet")
    rows = LogRows(log.table, log.options["layers"], log.options["experts"])
    mine = told_by(rows)
    kinds = [str(kind) for kind in log.table["kind"].to_pylist()]
    experts = log.table["expert"].to_pylist()
    for lookup in mine.lookups:
        last = next((r for r in range(lookup.row, -1, -1) if kinds[r] in ("loaded", "paused")), None)
        if last is not None and kinds[last] == "loaded" and experts[last] in lookup.hits:
            break
    else:
        pytest.fail("no gate hit what had arrived last")
    core = make_core(log.options, -1)
    events = [row for row in range(lookup.row + 1) if kinds[row][0].islower() and row != last]
    for row in [*events, last]:
        rows.feed(core, row)
    found = compare(mine, told_by(LogRows(log_table(core.take_log()), rows.layers, rows.experts)))
    (first,) = (one for one in found.differences if one.what == f"gate finds expert {experts[last]}")
    assert (first.recorded, first.simulated) == ("resident", "still loading")
    assert (first.iteration, first.layer) == (lookup.iteration, lookup.layer)
    assert "before the gate; simulated: last" in first.why
    assert first.why.endswith("after the gate")


def test_what_is_no_real_run_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no results directory"):
        against(tmp_path)
    with pytest.raises(SettingError, match="Give --hardware as well"):
        against(run, None, ("link.bandwidth=1GB/s",))
    sample = Path(__file__).parents[1] / "traces" / "samples" / "azure_conv_synthetic.parquet"
    finemoe.simulate(sample, num_requests=2, output_tokens=3, output=tmp_path / "sim")
    with pytest.raises(SettingError, match="is a simulated run"):
        against(tmp_path / "sim")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from finemoe.cli.entry import simulate_main as m; m()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def test_the_command_prints_and_refuses(run: Path) -> None:
    done = command("--replay", str(run))
    assert done.returncode == 0, done.stderr
    assert "lru-12slots: no decision differs" in done.stdout
    assert "first difference in iteration" in done.stdout or "finemoe-12slots: no decision" in done.stdout
    cells = json.loads(command("--replay", str(run), "--json").stdout)
    assert [cell["policy"] for cell in cells] == POLICIES.split(",")
    for arguments, message in (
        (("--policy", "lru"), "--policy lru means nothing with --replay"),
        (("--backend", "cpu"), "--backend cpu means nothing with --replay"),
        (("--dry-run",), "--replay takes no --config, --output and --dry-run"),
        (("--hardware", "gtx"), "--hardware 'gtx' is unknown"),
    ):
        done = command("--replay", str(run), *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1

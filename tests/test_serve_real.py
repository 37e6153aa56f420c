"""A trace served with a real model: what it answers, what it records, what its results say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="torch is not installed (extra `real`)")
pytest.importorskip("transformers", reason="transformers is not installed (extra `real`)")

import finemoe
from finemoe.errors import PolicyError, SettingError, TraceError, TransferError
from finemoe.policy.systems import SYSTEMS
from finemoe.realexec.runnable import why_not
from finemoe.serving.grid import Cell, Interrupted
from finemoe.serving.outcome import Progress
from finemoe.serving.replay import replay
from finemoe.traces.routing_file import RoutingFile
from served_case import alone, checkpoint, prompts, served, trace
from tiny_models import EXPERTS, tiny_model

BURST = [(3 + (i * 7) % 19, 2 + (i * 5) % 23) for i in range(14)]
RUNNABLE = sorted(n for n, s in SYSTEMS.items() if s.group == "system" and not why_not(s) and n != "static")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def inputs(model: Path, tmp_path: Path) -> dict[str, object]:
    return {
        "model": model,
        "trace": trace(tmp_path / "trace.csv", [(3 + i, 3 + i % 4) for i in range(8)], 0.01),
        "prompts": prompts(tmp_path / "prompts.jsonl"),
        "expert_cache": "10slots",
    }


# gpt_oss: every other layer sees a window of 8 tokens only; deepseek_v2: keys and values differ in width.
@pytest.mark.parametrize(
    ("family", "policy"),
    [("mixtral", "finemoe"), ("gpt_oss", "lru"), ("deepseek_v2", "moe-infinity"), ("qwen2_moe", "promoe")],
)
def test_a_batch_answers_and_records_what_each_request_would_alone(
    tmp_path: Path, family: str, policy: str
) -> None:
    """Requests join and leave a batch of five; prompts of one step differ in length."""
    plan, answers, outcome, routing = served(
        tmp_path,
        model=checkpoint(tmp_path / "model", family, num_hidden_layers=6),
        trace=trace(tmp_path / "trace.csv", BURST),
        prompts=prompts(tmp_path / "prompts.jsonl"),
        policy=policy,
        expert_cache="9slots",
        max_num_seqs=5,
        token_budget=40,
    )
    plain = tiny_model(family, num_hidden_layers=6)
    steps = outcome.iterations.table()
    assert steps["batch"].max() == 5
    assert (steps["batch"][steps["phase"] == "prefill"] > 1).any()
    for place, request in enumerate(plan.cells[0].requests):
        wanted, tokens = alone(plain, plan, place)
        assert answers[request.index] == tokens
        found = routing.recorded(place)
        assert found.experts.tolist() == wanted.experts.tolist()
        assert found.token_counts.tolist() == wanted.token_counts.tolist()
        np.testing.assert_allclose(found.gate.astype(float), wanted.gate.astype(float), atol=2e-3)
        assert found.embedding is not None
        assert wanted.embedding is not None
        np.testing.assert_allclose(found.embedding.astype(float), wanted.embedding.astype(float), atol=2e-3)


def test_a_grid_has_the_simulators_results(inputs: dict[str, object], tmp_path: Path) -> None:
    results = finemoe.serve(
        **inputs,  # type: ignore[arg-type]
        policy="all",
        rate=[50, 200],
        slo="ttft_p90<100s",
        output=tmp_path / "out",
    )
    by_status = {run.policy: run.status.partition(":")[0] for run in results.runs}
    assert {name for name, status in by_status.items() if status == "INACTIVE"} == {"static", "oracle"}
    assert results.evidence["figures"] == "MEASURED"
    assert "hardware" not in results.config
    assert results.config["source"] == "file"
    for run in results.runs:
        if not run.ran:
            continue
        assert run.requests == 8
        assert run.slo is not None
        assert run.slo.met
        assert run.ttft_s.mean
        assert run.ttft_s.mean >= (run.ttft_service_s.mean or 0) > 0
        folder = tmp_path / "out" / f"{run.policy}-{run.expert_cache}-{run.rate_per_s:g}rps"
        names = {path.name for path in folder.iterdir()}
        kinds = ("requests", "iterations", "timeseries", "decisions", "routing")
        assert names == {f"{kind}.parquet" for kind in kinds}
        steps = pq.read_table(folder / "iterations.parquet")
        counters = run.counters
        assert sum(steps["demand_bytes"].to_pylist()) == counters["demand_bytes"]
        assert counters["bytes_moved"] <= counters["demand_bytes"] + counters["prefetch_bytes"]
        if run.hit_rate is not None:
            assert run.hit_rate == sum(steps["hits"].to_pylist()) / sum(steps["activated"].to_pylist())
        series = pq.read_table(folder / "timeseries.parquet")
        assert sum(series["output_tokens"].to_pylist()) == pytest.approx(sum(3 + i % 4 for i in range(8)))
        assert max(series["link_busy"].to_pylist()) <= 1 + 1e-9
        assert replay(folder).identical
    again = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [run["policy"] for run in again["runs"]] == [run.policy for run in results.runs]


def test_recorded_routing_is_a_history_and_a_trace(inputs: dict[str, object], tmp_path: Path) -> None:
    finemoe.serve(**inputs, policy="mixtral-offloading", output=tmp_path / "one")  # type: ignore[arg-type]
    path = tmp_path / "one" / "routing.parquet"
    routing = RoutingFile(path)
    assert routing.requests == 8
    assert routing.meta.speculation == (1,)
    assert [int(routing.recorded(i).tokens(2)[0]) for i in range(8)] == [3 + i for i in range(8)]
    assert [routing.recorded(i).iterations for i in range(8)] == [3 + i % 4 for i in range(8)]
    results = finemoe.serve(
        **inputs,  # type: ignore[arg-type]
        policy="static,finemoe",
        history=str(path),
        offline=True,
        warmup=2,
        decisions="all",
        output=tmp_path / "two",
    )
    assert [run.status for run in results.runs] == ["OK", "OK"]
    assert all(run.requests == 6 and run.load.offered_requests_per_s is None for run in results.runs)
    first = pq.read_table(tmp_path / "two" / "finemoe-10slots" / "decisions.parquet")["kind"][0].as_py()
    assert first == "seed_store"
    simulated = finemoe.simulate(
        inputs["trace"],  # type: ignore[arg-type]
        model=str(inputs["model"]),
        routing=str(path),
        policy="mixtral-offloading",
        expert_cache="10slots",
        output=tmp_path / "sim",
    )
    assert simulated.runs[0].requests == 8


def test_interrupting_keeps_finished_cells(inputs: dict[str, object], tmp_path: Path) -> None:
    def interrupt(cell: Cell, progress: Progress) -> None:
        if cell.system.name == "lfu":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        finemoe.serve(
            **inputs,  # type: ignore[arg-type]
            policy="lru,lfu",
            output=tmp_path / "out",
            on_progress=interrupt,
        )
    results = caught.value.results
    assert results is not None
    assert results.partial
    assert [run.status for run in results.runs] == ["OK", "NOT RUN: interrupted"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == ["lru-10slots"]
    assert replay(tmp_path / "out" / "lru-10slots").identical


def test_an_expert_that_cannot_be_read_keeps_finished_cells(
    inputs: dict[str, object], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "model")
    (weights,) = folder.glob("*.safetensors")

    def shorten(cell: Cell, progress: Progress) -> None:
        if cell.system.name == "lfu":
            os.truncate(weights, 1000)

    with pytest.raises(TransferError, match="could not be loaded in three attempts") as caught:
        finemoe.serve(
            **(inputs | {"model": folder}),  # type: ignore[arg-type]
            policy="lru,lfu",
            output=tmp_path / "out",
            on_progress=shorten,
        )
    assert caught.value.__notes__ == [f"finished runs are kept in {tmp_path / 'out.partial'}"]
    assert replay(tmp_path / "out.partial" / "lru-10slots").identical


def test_an_altered_log_is_caught_at_its_place(inputs: dict[str, object], tmp_path: Path) -> None:
    finemoe.serve(**inputs, policy="finemoe", output=tmp_path / "out")  # type: ignore[arg-type]
    path = tmp_path / "out" / "decisions.parquet"
    table = pq.read_table(path)
    kinds = table["kind"].to_pylist()
    loads = [row for row, kind in enumerate(kinds) if kind == "Load"]
    row = loads[len(loads) // 2]
    slots = table["slot"].to_numpy().copy()
    slots[row] = (slots[row] + 1) % 10
    place = table.schema.names.index("slot")
    pq.write_table(table.set_column(place, table.schema.field("slot"), [slots]), path)
    report = replay(path)
    assert report.divergence is not None
    assert report.divergence.sequence == row
    assert report.alterations == ("column slot was altered",)


def test_a_users_policy_runs_and_its_failure_has_a_place(inputs: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    code = (
        "from finemoe.policy.plugin import ExpertView, Policy\n"
        "class Oldest(Policy):\n"
        "    def eviction_key(self, expert: ExpertView) -> float:\n"
        "        return {}\n"
    )
    file.write_text(code.format("float(expert.last_used)"))
    policy = f"{file}:Oldest"
    results = finemoe.serve(**inputs, policy=policy, output=tmp_path / "out")  # type: ignore[arg-type]
    assert results.runs[0].requests == 8
    assert replay(tmp_path / "out").identical
    file.write_text(code.format("1 / (expert.layer_now - 1)"))
    with pytest.raises(PolicyError, match=r"Oldest: iteration \d+, eviction_key at layer 1: failed"):
        finemoe.serve(**inputs, policy=policy, output=tmp_path / "bad")  # type: ignore[arg-type]
    assert not (tmp_path / "bad").exists()


def test_few_or_no_decisions(inputs: dict[str, object], tmp_path: Path) -> None:
    finemoe.serve(**inputs, policy="lru", decisions=3, output=tmp_path / "few")  # type: ignore[arg-type]
    assert replay(tmp_path / "few").iterations == 3
    assert replay(tmp_path / "few").identical
    finemoe.serve(
        **inputs,  # type: ignore[arg-type]
        policy="lru",
        decisions="none",
        source="host",
        output=tmp_path / "none",
    )
    assert not (tmp_path / "none" / "decisions.parquet").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "oracle"}, r"--policy oracle cannot run on a real model: it must know the routing of"),
        ({"policy": "mixtral-offloading+wb"}, r"cannot run on a real model: it copies experts back"),
        ({"policy": "static"}, r"--policy static is INACTIVE on a real model: .*; give --history"),
        ({"policy": "all,oracle"}, r"--policy oracle cannot run"),
        ({"backend": "sim", "prompts": None}, r"finemoe\.simulate runs the simulator"),
        ({"hardware": "h100"}, r"--hardware means nothing with --backend cpu"),
        ({"routing": "x.parquet"}, r"--routing means nothing with --backend cpu"),
        ({"expert_dtype": "bf16"}, r"--expert-dtype means nothing with --backend cpu"),
        ({"source": "disk"}, r"--source is disk\. Choose file or host"),
        ({"bandwidth_limit": "2GB"}, r"--bandwidth-limit '2GB' is no bandwidth"),
        ({"bandwidth_limit": "0GB/s"}, r"--bandwidth-limit '0GB/s' is zero"),
        ({"expert_cache": "1B"}, r"--expert-cache of 1 bytes .* holds no expert"),
        ({"prompts": None}, r"has no tokenizer\. Copy its files there, or give --prompts with token_ids"),
        ({"prompt_tokens": 255, "output_tokens": 9}, r"request 0 of .* more tokens than the 256 positions"),
        ({"model": "/nowhere"}, r"/nowhere has no config\.json"),
        ({"warmup": 8}, r"--warmup is 8, but 8 requests are served"),
        (
            {"prefetch_distance": 4, "policy": "speculate"},
            r"INACTIVE on a real model: no layer lies 4 layers",
        ),
    ],
)
def test_what_cannot_run_is_refused(
    inputs: dict[str, object], tmp_path: Path, options: dict[str, object], message: str
) -> None:
    given = {name: value for name, value in (inputs | options).items() if value is not None}
    with pytest.raises(SettingError, match=message):
        finemoe.serve(**given, output=tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_cuda_needs_a_device(inputs: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SettingError, match="torch sees no CUDA device here"):
        finemoe.serve(**inputs, backend="cuda")  # type: ignore[arg-type]


def test_prompts_and_history_must_be_the_models(inputs: dict[str, object], tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"token_ids": [5, 96]}\n')
    with pytest.raises(TraceError, match=r"row 1: token id 96, the model has 0 … 95"):
        finemoe.serve(**(inputs | {"prompts": foreign}))  # type: ignore[arg-type]
    other = checkpoint(tmp_path / "other", num_local_experts=EXPERTS - 2)
    finemoe.serve(**(inputs | {"model": other}), output=tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"the model has \(3, 8, 2\)\. Give a trace of the same model"):
        finemoe.serve(**inputs, history=tmp_path / "out" / "routing.parquet")  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("policy", RUNNABLE)
def test_two_thousand_iterations_replay(model: Path, tmp_path: Path, policy: str) -> None:
    lengths = [(3 + (i * 7) % 19, 2 + (i * 11) % 97) for i in range(80)]
    finemoe.serve(
        trace(tmp_path / "trace.csv", lengths),
        model=model,
        prompts=prompts(tmp_path / "prompts.jsonl"),
        policy=policy,
        expert_cache="10slots",
        max_num_seqs=2,
        token_budget=32,
        decisions="all",
        output=tmp_path / "out",
    )
    report = replay(tmp_path / "out")
    assert report.identical
    assert report.iterations >= 2000

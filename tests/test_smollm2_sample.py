"""The shipped routing recorded from the small MoE: what it holds, and that a run on it says RECORDED."""

from __future__ import annotations

from pathlib import Path

import finemoe.traces
import numpy as np
import pytest
from finemoe.cli.entry import simulate_main
from finemoe.realexec.dense import PROMPT_FILES
from finemoe.traces.routing_file import RoutingFile

SAMPLES = Path(finemoe.traces.__file__).parent / "samples"
ROUTING = SAMPLES / "smollm2_moe_8x.parquet"
CONFIG = SAMPLES / "smollm2_moe_8x.json"
MOST_BYTES = 4_500_000


def test_what_was_recorded() -> None:
    sample = RoutingFile(ROUTING)
    meta = sample.meta
    assert (meta.layers, meta.experts, meta.top_k, meta.embedding_width) == (30, 8, 2, 576)
    assert (meta.source, meta.gate_content, meta.prefill) == ("recorded", "full", "recorded")
    assert meta.speculation == (1, 3)
    assert "chat template: 64 prompts" in meta.notes
    assert ROUTING.stat().st_size <= MOST_BYTES
    prompts = Path(finemoe.realexec.__file__).parent / "samples" / PROMPT_FILES[0]
    assert sample.requests == len(prompts.read_text("utf-8").splitlines()) == 64


def test_routing_is_peaked_and_even() -> None:
    """The bounds are what docs/small-moe.md says of it."""
    sample = RoutingFile(ROUTING)
    chosen = np.zeros((30, 8))
    masses = []
    for request in range(sample.requests):
        routing = sample.recorded(request)
        assert 1 <= routing.iterations <= 32
        rows = np.sort(routing.gate[1:].astype(np.float32).reshape(-1, 8), axis=1)  # decode: one token a row
        masses.append(rows[:, -2:].sum(axis=1).mean() if len(rows) else np.nan)
        for iteration in range(routing.iterations):
            for layer in range(30):
                experts, counts = routing.required(iteration, layer)
                chosen[layer, experts] += counts
    shares = chosen / chosen.sum(axis=1, keepdims=True)
    assert np.nanmean(masses) == pytest.approx(0.71, abs=0.01)
    assert shares.max() < 0.25


def test_the_simulator_runs_on_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [
        "--routing",
        str(ROUTING),
        "--model",
        str(CONFIG),
        "--num-requests",
        "4",
        "--output-tokens",
        "8",
    ]
    trace = [
        "--trace",
        str(SAMPLES / "azure_conv_synthetic.parquet"),
        "--expert-cache",
        "0.5",
        "--rate",
        "0.1",
    ]
    output = ["--policy", "finemoe,lru", "--output", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["finemoe-sim", *arguments, *trace, *output])
    with pytest.raises(SystemExit) as end:
        simulate_main()
    assert not end.value.code
    printed = capsys.readouterr().out
    assert "routing   RECORDED: mixtral; gate: softmax of the router logits" in printed
    assert "; routing RECORDED; " in printed
    assert printed.count(" OK ") == 2

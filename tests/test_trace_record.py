"""`finemoe trace record` from prompts to a routing trace: its content, its resumption, its refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from finemoe.cli.entry import main, simulate_main
from finemoe.traces.routing_file import RoutingFile
from recorded_models import ids_of, save_model
from tiny_models import EXPERTS, TOP_K, tiny_model

from finemoe.realexec.gates import find_moe  # isort: skip  # after torch is known to be there
from finemoe.realexec.generate import generate_recorded  # isort: skip
from finemoe.realexec.recorder import GateRecorder  # isort: skip

TEXTS = ("alpha beta", "gamma", "delta epsilon zeta eta", "theta alpha", "beta")
ENDLESS: dict[str, Any] = {"eos_token_id": None}  # every answer as long as it may be


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny-mixtral", **ENDLESS)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def command(model: Path, prompts: Path, output: Path, *more: str) -> list[str]:
    names = ("--model", str(model), "--prompts", str(prompts), "--output", str(output))
    return ["finemoe", "trace", "record", *names, "--max-new-tokens", "4", *more]


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> int:
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        (main if arguments[0] == "finemoe" else simulate_main)()
    return int(end.value.code or 0)


def start(arguments: list[str]) -> subprocess.Popen[str]:
    code = f"import sys; sys.argv = {arguments!r}\nfrom finemoe.cli.entry import main\nmain()"
    path = os.pathsep.join(part for part in sys.path if part)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_batches(process: subprocess.Popen[str], output: Path, count: int) -> None:
    folder = output.parent / f"{output.name}.recording"
    end = time.monotonic() + 120
    while len(list(folder.glob("batch-*.parquet"))) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_recording_holds_what_the_model_did(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "routing.parquet"
    assert run(monkeypatch, command(model, prompts, output, "--batch-size", "2")) == 0
    said = capsys.readouterr()
    assert "tiny-mixtral, 3 layers x 8 experts, top-2, softmax; 5 requests" in said.out
    assert said.err == ""
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["prompts.jsonl", "routing.parquet"]
    file = RoutingFile(output)
    meta = file.meta
    assert (meta.model, meta.layers, meta.experts, meta.top_k) == ("tiny-mixtral", 3, EXPERTS, TOP_K)
    assert (meta.source, meta.gate_content, meta.prefill, meta.speculation) == (
        "recorded",
        "full",
        "recorded",
        (1,),
    )
    assert (meta.embedding_width, meta.expert_bytes) == (32, 3 * 32 * 24 * 4)
    assert "softmax" in meta.notes
    assert "chat template: 5 prompts" in meta.notes
    assert "at most 4 new tokens; float32 on cpu" in meta.notes
    stock = tiny_model("mixtral", **ENDLESS)
    with GateRecorder(stock, find_moe(stock), (1,)) as recorder:
        for number, text in enumerate(TEXTS):
            ids = ids_of("<user>", *text.split(), "<answer>")
            found = file.recorded(number, (1,))
            (expected,), _ = generate_recorded(stock, recorder, [ids], 4, frozenset())
            assert found.tokens(TOP_K).tolist() == [len(ids), 1, 1, 1]
            assert np.abs(found.gate.astype(np.float32) - expected.gate).max() < 1e-3
            assert found.experts.tolist() == expected.experts.tolist()
            assert found.token_counts.tolist() == expected.token_counts.tolist()
    assert pq.read_table(output)["phase"].to_pylist() == ["prefill", "decode", "decode", "decode"] * 5


def test_a_recording_can_be_simulated_and_analysed(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "routing.parquet"
    assert run(monkeypatch, command(model, prompts, output)) == 0
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,4,4\n1,5,6\n")
    simulate = ["finemoe-sim", "--trace", str(trace), "--model", str(model / "config.json"), "--quiet"]
    simulate += ["--routing", str(output), "--expert-cache", "12slots", "--policy", "finemoe", "--json"]
    capsys.readouterr()
    assert run(monkeypatch, simulate) == 0
    assert '"finemoe"' in capsys.readouterr().out
    assert (
        run(monkeypatch, ["finemoe", "trace", "analyze", str(output), "--seeds", "0", "--capacity", "8"]) == 0
    )
    assert "tiny-mixtral" in capsys.readouterr().out


def test_sigmoid_routers_are_normalised_and_labelled(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "tiny-v3", "deepseek_v3", template=False, **ENDLESS)
    output = tmp_path / "routing.parquet"
    assert run(monkeypatch, command(folder, prompts, output, "--distances", "none")) == 0
    file = RoutingFile(output)
    assert "gate: sigmoid scores divided by their sum; no chat template: 5 prompts" in file.meta.notes
    assert file.meta.speculation == ()
    sums = file.recorded(0).gate.astype(np.float32).sum(axis=2)
    assert np.abs(sums - 1).max() < 2e-3


def test_token_ids_need_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "tiny", tokenizer=False, **ENDLESS)
    prompts = tmp_path / "ids.jsonl"
    prompts.write_text('{"token_ids": [5, 6, 7]}\n{"token_ids": [9]}\n')
    output = tmp_path / "routing.parquet"
    assert run(monkeypatch, command(folder, prompts, output)) == 0
    file = RoutingFile(output)
    assert "token ids given: 2 prompts" in file.meta.notes
    assert file.recorded(1).tokens(TOP_K).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_and_started_again_it_gives_the_same_bytes(
    how: signal.Signals,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(
        "".join(f"{' '.join(TEXTS[i % 5].split()[: 1 + i % 3])} w{20 + i}\n" for i in range(60))
    )
    whole, stopped = tmp_path / "whole.parquet", tmp_path / "stopped.parquet"
    more = ("--batch-size", "3", "--max-new-tokens", "24")
    assert run(monkeypatch, command(model, prompts, whole, *more)) == 0
    process = start(command(model, prompts, stopped, *more))
    wait_for_batches(process, stopped, 3)
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert not stopped.exists()
    if how == signal.SIGINT:
        assert "of 60 requests kept, the same command goes on from there" in said
        assert "Traceback" not in said
    folder = tmp_path / "stopped.parquet.recording"
    kept = 3 * len(list(folder.glob("batch-*.parquet")))
    assert 9 <= kept < 60
    torn = folder / "batch-000001.parquet"
    torn.write_bytes(torn.read_bytes()[:-100])  # as a power failure may leave it
    capsys.readouterr()
    assert run(monkeypatch, command(model, prompts, stopped, *more)) == 0
    assert f"60 requests ({kept - 3} of them by earlier runs)" in capsys.readouterr().out
    assert stopped.read_bytes() == whole.read_bytes()
    assert not folder.exists()


def test_a_journal_of_other_arguments_is_refused(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "routing.parquet"
    journal = tmp_path / "routing.parquet.recording"
    journal.mkdir()
    begun: dict[str, Any] = {"--batch-size": "1"}
    (journal / "arguments.json").write_text(json.dumps(begun))
    assert run(monkeypatch, command(model, prompts, output)) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"finemoe: error: {journal} holds an unfinished recording with --model None, this one has"
    )
    (journal / "arguments.json").write_text("{")
    assert run(monkeypatch, command(model, prompts, output)) == 2
    assert "arguments.json: cannot be read" in capsys.readouterr().err
    assert not output.exists()


def test_two_runs_at_once_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("alpha\n" * 200)
    output = tmp_path / "routing.parquet"
    process = start(command(model, prompts, output, "--max-new-tokens", "100"))
    try:
        wait_for_batches(process, output, 1)
        assert run(monkeypatch, command(model, prompts, output, "--max-new-tokens", "100")) == 2
    finally:
        process.kill()
        process.communicate()
    assert "is being written by another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--model", "{tmp}/absent"), "absent is no folder"),
        (("--model", "{prompts}"), "prompts.jsonl is a file"),
        (("--model", "{tmp}"), "has no config.json"),
        (("--model", "{bare}"), "has no *.safetensors"),
        (("--model", "{dense}"), "llama models have no routed experts"),
        (("--model", "{torn}"), "torn: the weights cannot be loaded"),
        (("--model", "{short}"), "its weights lack"),
        (("--prompts", "{tmp}/absent"), "absent: no such file"),
        (("--prompts", "{corrupt}"), "corrupt.jsonl: row 2: not valid JSON"),
        (("--prompts", "{wide}"), "wide.jsonl: row 1: token id 96, the model has 0 … 95"),
        (("--prompts", "{long}"), "long.jsonl: row 1: 254 tokens and 4 new ones, the model takes 256"),
        (("--output", "{tmp}"), "the destination is a directory"),
        (("--output", "{prompts}"), "exists and is no Parquet file"),
        (("--output", "{tmp}/absent/x.parquet"), "its folder does not exist"),
        (("--device", "tpu"), "--device is 'tpu'"),
        (("--device", "cuda"), "torch finds no CUDA device here"),
        (("--dtype", "int8"), "--dtype is 'int8'"),
        (("--max-new-tokens", "0"), "--max-new-tokens is 0"),
        (("--batch-size", "0"), "--batch-size is 0"),
        (("--distances", "3"), "--distances 3: the model has 3 MoE layers"),
        (("--distances", "1,1"), "--distances 1,1: the model has 3 MoE layers"),
        (("--distances", "one"), "--distances is 'one'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    change: tuple[str, ...],
    message: str,
    model: Path,
    prompts: Path,
    broken: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    if change == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    places = {"tmp": tmp_path, "prompts": prompts, **broken}
    arguments = command(model, prompts, tmp_path / "out.parquet")
    assert run(monkeypatch, [*arguments, *(part.format(**places) for part in change)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("finemoe: error: ")
    assert said.err.count("\n") == 1
    assert message in said.err
    assert not (tmp_path / "out.parquet").exists()
    assert not (tmp_path / "out.parquet.recording").exists()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders and files that cannot be used."""
    import shutil

    import transformers
    from safetensors.torch import load_file, save_file

    base = tmp_path_factory.mktemp("broken")
    sound = save_model(base / "sound")
    names = ("bare", "dense", "torn", "short")
    paths = {name: base / name for name in names}
    for name in ("bare", "torn", "short"):
        shutil.copytree(sound, paths[name])
    (paths["bare"] / "model.safetensors").unlink()
    weights = paths["torn"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    tensors = load_file(paths["short"] / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, paths["short"] / "model.safetensors", metadata={"format": "pt"})
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(paths["dense"])
    (paths["dense"] / "model.safetensors").write_bytes(b"")  # never read: the config says enough
    contents = {
        "corrupt": '{"prompt": "alpha"}\n{"prompt\n',
        "wide": '{"token_ids": [96]}\n',
        "long": json.dumps({"token_ids": [5] * 254}) + "\n",
    }
    for name, content in contents.items():
        paths[name] = base / f"{name}.jsonl"
        paths[name].write_text(content)
    return paths

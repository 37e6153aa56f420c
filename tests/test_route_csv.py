"""Importing route CSVs: what each column becomes, what is refused, and which models a run needs for them."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finemoe.cli.entry import main
from finemoe.errors import TraceError
from finemoe.sim.run import simulate
from finemoe.traces.npz_import import import_chosen_experts
from finemoe.traces.route_csv import read_route_csv
from finemoe.traces.route_import import import_route_csv, recording_format
from finemoe.traces.routing_file import RoutingFile
from route_models import route_model
from shared_data import shared

COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
LAYER_BYTES = (0, 300, 200, 200)  # the first layer is dense: it has no experts and no rows
EXPERTS, TOP_K = 6, 2


def small(turns: tuple[tuple[int, int, int], ...] = ((0, 3, 2),), *, mass: float = 1.0) -> list[str]:
    """A route CSV of three layers of six experts, top-2; turns: (first step, prompt, decode steps)."""
    rng = np.random.default_rng(0)
    lines = ["# route_trace v1", "# model=/a b/tiny-Q4.gguf arch=x n_layer=4 n_expert=6 n_expert_used=2"]
    lines += [f"# layer={i} expert_bytes={size} dense_bytes=7" for i, size in enumerate(LAYER_BYTES)]
    lines.append(COLUMNS)

    def token(turn: int, phase: int, step: int, layer: int) -> None:
        weight = float(rng.integers(50, 90)) / 100 * mass
        for slot, expert in enumerate(rng.permutation(EXPERTS)[:TOP_K].tolist()):
            share, size = (weight, mass - weight)[slot], LAYER_BYTES[layer]
            lines.append(f"{turn},{phase},{step},{layer},{slot},{expert},{share:.6g},0,{size}")

    for turn, (first, prompt, decode) in enumerate(turns):
        for layer in (1, 2, 3):  # a prompt goes through layer by layer, its last token alone through the last
            for step in range(first if layer < 3 else first + prompt - 1, first + prompt):
                token(turn, 0, step, layer)
        for step in range(first + prompt, first + prompt + decode):
            for layer in (1, 2, 3):
                token(turn, 1, step, layer)
    return lines


def save(folder: Path, lines: list[str], end: str = "\n") -> Path:
    path = folder / "small.route.csv"
    path.write_text(end.join(lines) + end, newline="")
    return path


def chosen_in(lines: list[str]) -> dict[tuple[int, int, int], dict[int, float]]:
    """(turn, step, layer of those with experts) → expert → weight, read with the csv module."""
    chosen: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        key = (int(row["turn"]), int(row["step"]), int(row["layer"]))
        chosen[key][int(row["expert"])] = float(row["weight"])
    return chosen


@pytest.mark.parametrize(("mass", "content"), [(1.0, "zero"), (0.8, "even")])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_turns_become_requests(tmp_path: Path, mass: float, content: str, end: str) -> None:
    lines = small(((0, 3, 2), (5, 4, 1)), mass=mass)
    meta = import_route_csv(save(tmp_path, lines, end), tmp_path / "out.parquet")
    assert (meta.model, meta.layers, meta.experts, meta.top_k) == ("tiny-Q4", 3, EXPERTS, TOP_K)
    assert (meta.expert_bytes, meta.prefill, meta.source) == (
        233,
        "recorded",
        "imported",
    )  # mean of 300, 200, 200
    assert (meta.gate_content, meta.unchosen_mass) == ("chosen", content)
    file, chosen = RoutingFile(tmp_path / "out.parquet"), chosen_in(lines)
    assert file.requests == 2
    for turn, (first, prompt, decode) in enumerate(((0, 3, 2), (5, 4, 1))):
        routing = file.recorded(turn)
        assert routing.tokens(TOP_K).tolist() == [prompt] + [1] * decode
        for layer in range(3):
            last = first + prompt - 1
            tokens = [chosen[turn, last if layer == 2 else s, layer + 1] for s in range(first, last + 1)]
            rows = np.array([[t.get(j, (1 - mass) / 4) for j in range(EXPERTS)] for t in tokens])
            np.testing.assert_allclose(routing.gate[0, layer], rows.mean(axis=0), atol=1e-3)
            experts, counts = routing.required(0, layer)
            drawn = [expert for t in tokens for expert in t]
            assert experts.tolist() == sorted(set(drawn))
            assert counts.tolist() == [drawn.count(expert) for expert in experts]
            for iteration in range(1, 1 + decode):
                t = chosen[turn, last + iteration, layer + 1]
                row = [t.get(j, (1 - mass) / 4) for j in range(EXPERTS)]
                np.testing.assert_allclose(routing.gate[iteration, layer], row, atol=1e-3)
                experts, counts = routing.required(iteration, layer)
                assert experts.tolist() == sorted(t)
                assert counts.tolist() == [1, 1]


def test_a_whole_last_layer_and_further_columns(tmp_path: Path) -> None:
    """A later version of the format has a column `dropped`; a header line of another kind is a comment."""
    lines = small(((0, 1, 1),))
    lines.insert(2, "# recorded on a phone")
    lines[7:] = [f"0,{line}" for line in lines[7:]]
    lines[7] = "dropped," + COLUMNS
    trace = read_route_csv(save(tmp_path, lines))
    assert (trace.layers, trace.top_k, trace.expert.shape) == (3, 2, (6, 2))
    assert trace.expert_bytes.tolist() == [300, 200, 200]
    assert trace.layer.tolist() == [0, 1, 2, 0, 1, 2]
    assert trace.read_bytes[:3].tolist() == [[300, 300], [200, 200], [200, 200]]
    assert import_route_csv(trace.path, tmp_path / "out.parquet", model="tiny").model == "tiny"


def cell(row: int, column: str, value: object) -> Any:
    """Replace one cell of row number `row` (1, 2, …)."""

    def change(lines: list[str]) -> list[str]:
        cells = lines[6 + row].split(",")
        cells[COLUMNS.split(",").index(column)] = str(value)
        return [*lines[: 6 + row], ",".join(cells), *lines[7 + row :]]

    return change


def line(number: int, *texts: str) -> Any:
    """Replace line `number` (1, 2, …) by `texts`."""
    return lambda lines: [*lines[: number - 1], *texts, *lines[number:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            line(1, "# route_trace v2"),
            r"line 1: '# route_trace v2', not '# route_trace v1'\. Version 1 is read",
        ),
        (line(2), "header: 0 lines '# model="),
        (line(4), "header: n_layer=4, but 3 lines '# layer="),
        (line(2, "# model=m arch=x n_layer=4 n_expert=6 n_expert_used=7"), "n_expert_used=7 of n_expert=6"),
        (
            line(2, "# model=m arch=x n_layer=4 n_expert=70000 n_expert_used=2"),
            "n_expert=70000 .at most 65535",
        ),
        (line(7, COLUMNS.replace("slot", "place")), r"column slot: 0 columns of that name \(found: turn,"),
        (line(7, COLUMNS + ",slot"), "column slot: 2 columns of that name"),
        (lambda lines: lines[:7], "no rows"),
        (line(9, "1,2"), r"row 2 \(line 9\): 2 cells, but 9 columns \('1,2'\)"),
        (line(9, ""), r"row 2 \(line 9\), column turn: ''"),
        (cell(3, "step", "-1"), r"row 3 \(line 10\), column step: '-1': a whole number of 0 or more"),
        (cell(3, "expert", "1.5"), r"row 3 \(line 10\), column expert: '1.5': a whole number"),
        (cell(4, "weight", "nan"), r"column weight: 'nan': .* Record with an engine that knows"),
        (cell(4, "weight", "-0.1"), "column weight: '-0.1'"),
        (cell(4, "weight", "1.25"), r"row 4 \(line 11\), column weight: 1.25: routing weights must be in"),
        (cell(4, "weight", "0.99"), r"row 3 .*column weight: .* weights sum to more than 1"),
        (cell(1, "phase", 2), "row 1 .*column phase: 2: 0 is prefill, 1 is decode"),
        (cell(1, "layer", 0), "row 1 .*column layer: 0: the header has no experts for that layer"),
        (cell(1, "layer", 4), "row 1 .*column layer: 4: the header has no experts for that layer"),
        (cell(2, "slot", 0), r"row 2 .*column slot: 0: slots 0 … 1 must follow"),
        (cell(2, "expert", 6), "row 2 .*column expert: 6: the layer has 0 … 5"),
        (cell(2, "residency", 3), "row 2 .*column residency: 3: 0 is a miss"),
        (cell(2, "expert_bytes", 200), "row 2 .*column expert_bytes: 200: neither 0 nor the header's"),
        (cell(2, "step", 1), "row 2 .*column step: 1: differs within the slots"),
        (lambda lines: lines[:-1], "end: 25 rows are no multiple of 2"),
        (lambda lines: lines[:-2], "turn 0, step 4, layer 3: 0 rows, not 2"),
        (lambda lines: lines + lines[-2:], "turn 0, step 4, layer 3: 4 rows, not 2"),
        (lambda lines: lines[:7] + lines[9:], "turn 0, step 0, layer 1: 0 rows, not 2"),
        (lambda lines: lines[:7] + lines[21:], "turn 0: the steps are not a prompt .phase 0. followed by"),
        (lambda lines: [*lines[:21], *lines[27:]], "turn 0, step 3: no rows; steps go from 0 to 4"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = save(tmp_path, change(small()))
    with pytest.raises(TraceError, match=r"small\.route\.csv: .*" + message):
        import_route_csv(path, tmp_path / "out.parquet")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_expert_twice_is_refused(tmp_path: Path) -> None:
    lines = small()
    again = lines[7].split(",")[5]
    with pytest.raises(
        TraceError, match=f"row 1 .*column expert: {again}: a token chose the same expert twice"
    ):
        read_route_csv(save(tmp_path, cell(2, "expert", again)(lines)))


def finemoe(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["finemoe", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_command_knows_a_file_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "renamed.npz", tmp_path / "out.parquet"
    save(tmp_path, small()).rename(source)
    assert recording_format(source) == "route CSV"
    assert finemoe(monkeypatch, "trace", "import", str(source), str(out)) == 0
    assert "tiny-Q4, 3 layers x 6 experts, top-2; unrecorded probability: zero; prefill: RECORDED" in (
        capsys.readouterr().out
    )
    assert finemoe(monkeypatch, "trace", "import", str(source), str(out), "--no-prefill") == 2
    assert "--no-prefill is for npz files" in capsys.readouterr().err
    source.write_bytes(b"arrived_at,x\n")
    assert finemoe(monkeypatch, "trace", "import", str(source), str(out)) == 2
    assert (
        "neither an npz archive, a route CSV nor a server's responses (it begins with b'arrived_at,x"
        in capsys.readouterr().err
    )
    with pytest.raises(TraceError, match="no such file"):
        recording_format(tmp_path / "absent")
    archive = tmp_path / "npz.csv"
    with archive.open("wb") as stream:
        np.savez(
            stream, expert_ids=np.zeros((8, 1, 1), int), probs=np.ones((8, 1, 1)), offsets=np.array([0, 8])
        )
    assert recording_format(archive) == "npz"
    assert import_chosen_experts(archive, out, model="one", experts=2, expert_bytes=1).layers == 1


@pytest.mark.parametrize(
    ("name", "shape", "expert_bytes", "iterations", "prompt"),
    [
        ("qwen", (48, 128, 6), 2_856_960, 129, 28),
        ("gemma", (30, 128, 6), 3_940_147, 129, 29),
        ("gptoss", (36, 128, 2), 13_219_200, 65, 85),
    ],
)
def test_real_recordings_import_and_run(
    tmp_path: Path, name: str, shape: tuple[int, int, int], expert_bytes: int, iterations: int, prompt: int
) -> None:
    source, out = shared(f"routing/{name}.route.csv"), tmp_path / "out.parquet"
    meta = import_route_csv(source, out)
    assert (meta.layers, meta.experts, meta.top_k) == shape
    assert (meta.expert_bytes, meta.unchosen_mass) == (expert_bytes, "zero")
    file, chosen = RoutingFile(out), chosen_in(source.read_text().splitlines())
    routing = file.recorded(0)
    assert (file.requests, routing.iterations, routing.tokens(meta.top_k)[0]) == (1, iterations, prompt)
    for layer in range(meta.layers):
        for iteration in (1, iterations // 2, iterations - 1):
            token = chosen[0, prompt + iteration - 1, layer]
            assert routing.required(iteration, layer)[0].tolist() == sorted(token)
            weights = [token[j] for j in sorted(token)]
            np.testing.assert_allclose(routing.gate[iteration, layer, sorted(token)], weights, rtol=1e-3)
        union = {expert for step in range(prompt) for expert in chosen.get((0, step, layer), {})}
        assert routing.required(0, layer)[0].tolist() == sorted(union)

    config = route_model(name, tmp_path / "config.json")
    (tmp_path / "trace.csv").write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n0,{prompt},4\n")
    results = simulate(
        tmp_path / "trace.csv",
        output=tmp_path / "results",
        routing=str(out),
        model=str(config),
        expert_dtype="int4",
        expert_cache="0.5",
        policy="lru",
        hardware="a100-80gb",
    )
    assert results.runs[0].status == "OK"

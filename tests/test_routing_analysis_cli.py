"""`finemoe trace analyze`: what it prints, JSON, pictures, and bad input."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from analysis_traces import analysis_meta, write_trace
from finemoe.cli.entry import main
from finemoe.traces.routing_analysis import RoutingAnalysis


def finemoe(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["finemoe", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_trace(tmp_path / "trace.parquet", analysis_meta())
    return tmp_path / "trace.parquet"


def test_the_text(trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert finemoe(monkeypatch, "trace", "analyze", str(trace), "--seeds", "0,3", "--capacity", "8") == 0
    text = capsys.readouterr().out
    assert "tiny, 5 layers x 6 experts, top-2; 10 requests" in text
    assert "filled by a random sample" in text
    for line in ("fine: nearest of 8 maps", "seed 3", "coarse: request-level counts", "speculation"):
        assert line in text
    assert "2LJ·ln(LJ) = 205 maps: not measured" in text
    assert "semantic, layers 0 … d − 1, 8 maps" in text


def test_json_is_the_analysis(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        finemoe(monkeypatch, "trace", "analyze", str(trace), "--json", "--fill", "rdy", "--seeds", "1") == 0
    )
    found = msgspec.json.decode(capsys.readouterr().out, type=RoutingAnalysis)
    assert (found.fill, [seed.seed for seed in found.seeds]) == ("rdy", [1])


def test_pictures(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    command = ("trace", "analyze", str(trace), "--seeds", "0,1", "--capacity", "4,8", "--output")
    for name in ("one", "two"):
        assert finemoe(monkeypatch, *command, str(tmp_path / name)) == 0
    pictures = sorted((tmp_path / "one").iterdir())
    assert [path.name for path in pictures] == [
        "entropy_aggregated.png",
        "entropy_layers.png",
        "hits_distance.png",
        "load.png",
        "score_capacity.png",
        "similarity_semantic_iteration.png",
        "similarity_semantic_request.png",
        "similarity_trajectory_iteration.png",
        "similarity_trajectory_request.png",
    ]
    for path in pictures:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_without_matplotlib(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert finemoe(monkeypatch, "trace", "analyze", str(trace), "--output", str(tmp_path / "p")) == 2
    told = capsys.readouterr()
    assert (told.out, (tmp_path / "p").exists()) == ("", False)
    assert "Pictures need matplotlib" in told.err
    assert finemoe(monkeypatch, "trace", "analyze", str(trace), "--seeds", "0", "--capacity", "4") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seeds", "0,x"), "--seeds 0,x: whole numbers"),
        (("--capacity", "-4"), "--capacity -4: whole numbers"),
        (("--capacity", "0"), "capacities = [0]"),
        (("--fill", "all"), "--fill all: name sample or rdy"),
        (("--store", "absent.parquet"), "absent.parquet: no such file"),
    ],
)
def test_bad_options(
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, str],
    message: str,
) -> None:
    assert finemoe(monkeypatch, "trace", "analyze", str(trace), *options) == 2
    assert message in capsys.readouterr().err

"""`finemoe trace fit`: its table, its JSON and its preset; and bad input."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from finemoe.cli.entry import main
from finemoe.cli.fit_table import meaning
from finemoe.traces.fit import PresetFit
from finemoe.traces.routing_preset import load_preset
from fit_traces import fit_meta, write_known


def finemoe(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["finemoe", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_table_and_the_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = fit_meta(gate_content="chosen", unchosen_mass="zero", embedding_width=0, speculation=())
    write_known(tmp_path / "t.parquet", meta, requests=12)
    out = tmp_path / "own.toml"
    assert finemoe(monkeypatch, "trace", "fit", str(tmp_path / "t.parquet"), "--output", str(out)) == 0
    text = capsys.readouterr().out
    assert "tiny, 6 layers x 8 experts, top-2" in text
    assert "held out      4 requests" in text
    assert "those of the chosen experts, as recorded" in text
    for line in ("most popular experts", "nearest of 1K maps, d = 3", "32 nearest of 1K maps, d = 3"):
        assert line in text
    assert "cosine of requests, any two" in text
    assert "two categories" not in text  # nobody said what the requests are about
    preset = load_preset(out)
    assert (preset.model, preset.layers, preset.experts) == ("tiny", 6, 8)
    assert preset.evidence["rows"].label == "CALIBRATED"
    assert preset.evidence["speculation_recall"].label == "ASSUMED"


def test_json_is_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topics = write_known(tmp_path / "t.parquet", fit_meta(embedding_width=0, speculation=()), requests=12)
    (tmp_path / "topics").write_text("\n".join(topics))
    out = tmp_path / "own.toml"
    command = ("trace", "fit", str(tmp_path / "t.parquet"), "--output", str(out), "--json", "--seed", "3")
    assert finemoe(monkeypatch, *command, "--categories", str(tmp_path / "topics")) == 0
    fit = msgspec.json.decode(capsys.readouterr().out, type=PresetFit)
    assert fit.preset == load_preset(out)
    assert fit.seeds == (3, 4, 5)
    assert "cosine_within" in fit.recorded.values


def test_statistics_in_words() -> None:
    assert meaning("overlap_16") == "experts of 16 iterations before"
    assert meaning("nearest_10K_d3") == "nearest of 10K maps, d = 3"
    assert meaning("blend_1K_d3") == "32 nearest of 1K maps, d = 3"
    assert meaning("spread_1K") == "its spread over iterations, 1K maps"
    assert meaning("speculation_recall_6") == "recall of speculation, distance 6"


def test_bad_input_costs_no_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    trace = tmp_path / "t.parquet"
    topics = write_known(trace, fit_meta(embedding_width=0, speculation=()), requests=12)
    (tmp_path / "topics").write_text("\n".join(topics[:5]))
    for arguments, message in (
        ((str(trace), "--output", str(tmp_path / "notes.txt")), "exists and is no preset"),
        ((str(tmp_path / "absent.parquet"), "--output", str(tmp_path / "o.toml")), "no such file"),
        ((str(trace), "--output", str(tmp_path / "o.toml"), "--categories", str(trace)), "t.parquet: "),
        (
            (str(trace), "--output", str(tmp_path / "o.toml"), "--categories", str(tmp_path / "topics")),
            "categories: 5 for 12 requests",
        ),
    ):
        assert finemoe(monkeypatch, "trace", "fit", *arguments) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "o.toml").exists()

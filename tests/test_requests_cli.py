"""`finemoe trace info` and `convert` on every format."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from finemoe.cli.trace import trace_app
from request_writers import COLUMNS, Conversation, Look, write_conversations, write_parquet, write_text
from typer.testing import CliRunner

TALK: Conversation = [("human", "12345"), ("gpt", "123456789")]


def lines(*arguments: str) -> list[str]:
    done = CliRunner().invoke(trace_app, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


@pytest.mark.parametrize("form", list(COLUMNS))
def test_tables(tmp_path: Path, form: str) -> None:
    path, copy = tmp_path / "in", tmp_path / "out.parquet"
    write_text(path, form, [(0, 5, 7), (10**9, 5, 7)], Look())
    container = "jsonl" if form == "mooncake" else "csv"
    assert lines("info", str(path))[:3] == [
        f"{path}: {form} {container}, RECORDED",
        "requests      2",
        "span          1.0 s",
    ]
    assert lines("convert", str(path), str(copy)) == [
        f"{copy}: 2 requests over 1.0 s, from {form} {container}"
    ]
    assert lines("info", str(copy))[0] == f"{copy}: {form} parquet, RECORDED"


@pytest.mark.parametrize("form", ["sharegpt", "lmsys"])
def test_conversations(tmp_path: Path, form: str) -> None:
    path, copy = tmp_path / "in", tmp_path / "out.parquet"
    write_conversations(path, form, [TALK, [], TALK, TALK], "json", Look())
    shown = lines("info", str(path))
    figures = [
        "arrivals      none in the trace; ASSUMED in a run: all at 0 s, or Poisson with --rate",
        "token counts  ASSUMED: ceil(characters / 4) of the text",
        "prompts       with their text",
    ]
    left_out = "left out      1 conversations without an answered human turn"
    assert shown[:6] == [f"{path}: {form} json, RECORDED", "requests      3", left_out, *figures]
    assert not any(line.startswith("gap") for line in shown)
    assert lines("convert", str(path), str(copy)) == [f"{copy}: 3 requests, from {form} json", left_out]
    assert lines("info", str(copy))[:5] == [f"{copy}: {form} parquet, RECORDED", "requests      3", *figures]
    info = json.loads("\n".join(lines("info", str(copy), "--json")))
    assert (info["format"], info["requests"], info["span_s"], info["gap_s"]) == (form, 3, None, None)
    assert (info["has_arrivals"], info["lengths_estimated"], info["has_prompts"]) == (False, True, True)


def test_failed_requests(tmp_path: Path) -> None:
    path = tmp_path / "in"
    write_text(path, "burstgpt", [(0, 5, 0), (10**9, 5, 7)], Look())
    shown = lines("info", str(path))
    assert shown[1:3] == [
        "requests      1",
        "left out      1 failed requests (without request or response tokens)",
    ]
    write_parquet(path, "burstgpt", [(0, 5, 0), (10**9, 5, 7)], "number", pa.int32())
    assert lines("info", str(path))[0] == f"{path}: burstgpt parquet, RECORDED"

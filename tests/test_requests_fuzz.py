"""Damaged files: whatever bytes they hold, a trace is read or refused by TraceError, and read alike twice."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from finemoe.errors import SettingError, TraceError
from finemoe.traces.request_info import convert_requests, trace_info
from finemoe.traces.requests import Request, open_requests, select_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from request_writers import COLUMNS, Conversation, Look, Rows, write_conversations, write_parquet, write_text

ROWS: Rows = [(place * 10**9, place + 1, 9 - place) for place in range(6)]
TALKS: list[Conversation] = [
    [("human", 'a "quoted" \\ prompt\n'), ("gpt", "an answer é 你")],
    [],
    [("system", "{["), ("user", "hello"), ("assistant", "]}")],
]
WRITERS: dict[str, Callable[[Path], None]] = {
    **{form: lambda path, form=form: write_text(path, form, ROWS, Look()) for form in COLUMNS},  # type: ignore[misc]
    "quoted": lambda path: write_text(path, "burstgpt", ROWS, Look(quoted=True, bom=True, newline="\r\n")),
    "azure parquet": lambda path: write_parquet(path, "azure", ROWS, "dates", pa.int32()),
    "lmsys parquet": lambda path: write_conversations(path, "lmsys", TALKS, "parquet", Look()),
    "lmsys json": lambda path: write_conversations(path, "lmsys", TALKS, "json", Look(extra_column=True)),
    "sharegpt json": lambda path: write_conversations(path, "sharegpt", TALKS, "json", Look(quoted=True)),
    "sharegpt lines": lambda path: write_conversations(path, "sharegpt", TALKS, "jsonl", Look()),
}

MARKS = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\0", b"0", b"-", b"e9", b"1" * 30, b"null"]
interesting = st.sampled_from([*MARKS, b"\xff", b"\xef\xbb\xbf", b"PAR1", b"\x1f\x8b"])


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[str, float, float, bytes]]:
    """(what, where and how far as shares of the file, what to put there)"""
    kinds = st.sampled_from(["cut", "drop", "put", "over", "again"])
    shares = st.floats(0, 1)
    pieces = interesting | st.binary(max_size=6)
    return draw(st.lists(st.tuples(kinds, shares, shares, pieces), min_size=1, max_size=3))


def damage(data: bytes, kind: str, where: float, length: float, piece: bytes) -> bytes:
    begin = int(where * len(data))
    end = begin + int(length * min(40, len(data) - begin))
    return {
        "cut": data[:begin],
        "drop": data[:begin] + data[end:],
        "put": data[:begin] + piece + data[begin:],
        "over": data[:begin] + piece + data[begin + len(piece) :],
        "again": data[:end] + data[begin:],
    }[kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def read(path: Path) -> list[Request] | str:
    """The requests, or the refusal."""
    try:
        return list(select_requests(open_requests(path), num_requests=None, prompts=True))
    except (TraceError, SettingError) as error:
        return str(error)


@pytest.mark.parametrize("name", list(WRITERS))
@settings(deadline=None, derandomize=True)
@given(changes=damages(), gzipped=st.booleans())
def test_damaged_files(
    folder: Path, name: str, changes: list[tuple[str, float, float, bytes]], gzipped: bool
) -> None:
    path = folder / "trace"
    WRITERS[name](path)
    data = path.read_bytes()
    for change in changes:
        data = damage(data, *change)
    path.write_bytes(gzip.compress(data, 1) if gzipped else data)
    found = read(path)
    assert read(path) == found
    if isinstance(found, str):
        assert found.isprintable()
        assert found.startswith(f"{path}: ") or "would arrive at" in found
        return
    info = trace_info(path)
    assert info.requests == len(found)
    assert convert_requests(path, folder / "copy.parquet") == info
    assert read(folder / "copy.parquet") == found

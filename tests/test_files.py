"""What is read and what is replaced: regular files, and Parquet files only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from finemoe.errors import TraceError
from finemoe.traces.npz_import import import_chosen_experts
from finemoe.traces.request_info import convert_requests
from finemoe.traces.requests import open_requests
from finemoe.traces.routing_file import RoutingFile

Write = Callable[[Path], object]


@pytest.fixture(params=["convert", "import"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Write:
    """Each command that writes a Parquet file, as a function of its destination."""
    if request.param == "convert":
        source = tmp_path / "source.csv"
        source.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,3\n1,6,2\n")
        return lambda out: convert_requests(source, out)
    arrays = tmp_path / "source.npz"
    ids = np.argsort(np.random.default_rng(0).random((8, 24, 32)), axis=2)[..., :4]
    np.savez(arrays, expert_ids=ids, probs=np.full((8, 24, 4), 0.25, np.float16), offsets=np.array([0, 4, 8]))
    return lambda out: import_chosen_experts(arrays, out)


def test_a_parquet_file_is_replaced(write: Write, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    out.write_bytes(b"PAR1 an older one")
    write(out)
    assert out.read_bytes()[-4:] == b"PAR1"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("partial")] == []


def test_nothing_else_is_replaced(write: Write, tmp_path: Path) -> None:
    foreign, link, pipe = tmp_path / "notes", tmp_path / "link", tmp_path / "pipe"
    foreign.write_text("mine")
    link.symlink_to("nowhere")
    os.mkfifo(pipe)
    refused = {
        foreign: r"notes: the destination exists and is no Parquet file \(it begins with 6d 69 6e 65\)",
        link: "link: the destination is a link",
        pipe: "pipe: the destination is a named pipe",
        Path("/dev/null"): "/dev/null: the destination is a device",
        tmp_path: "the destination is a directory",
        tmp_path / ("n" * 300): "cannot be written .*too long",
        tmp_path / "absent" / "out": "cannot be written .*No such file",
        foreign / "out": "cannot be written .*Not a directory",
        Path("/dev/full/out"): "cannot be written",
    }
    before = sorted(tmp_path.iterdir())
    for path, message in refused.items():
        with pytest.raises(TraceError, match=message):
            write(path)
    assert sorted(tmp_path.iterdir()) == before
    assert (foreign.read_text(), os.readlink(link)) == ("mine", "nowhere")


def test_swapped_arguments_leave_the_source(tmp_path: Path) -> None:
    source, parquet = tmp_path / "source.csv", tmp_path / "trace.parquet"
    source.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,3\n1,6,2\n")
    text = source.read_text()
    convert_requests(source, parquet)
    with pytest.raises(TraceError, match="no Parquet file"):
        convert_requests(parquet, source)
    assert source.read_text() == text


def read_arrays(path: Path) -> None:
    import_chosen_experts(path, "unwritten.parquet")


@pytest.mark.parametrize("read", [open_requests, RoutingFile, read_arrays])
def test_pipes_and_devices_are_refused_at_once(tmp_path: Path, read: Callable[[Path], object]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, kind in ((pipe, "a named pipe"), (Path("/dev/zero"), "a device"), (Path("a\0b"), "NUL")):
        with pytest.raises(TraceError, match=f"this is .*{kind}"):
            read(path)

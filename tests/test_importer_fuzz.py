"""Damaged recordings: every importer ends in one clear error or in a valid trace, and runs nothing."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_traces import analysis_meta, write_trace
from engine_recordings import (
    MODEL,
    drawn_ids,
    per_pass_counts,
    per_token_arrays,
    sglang_response,
    vllm_021_response,
    vllm_response,
)
from finemoe.errors import InputError, TraceError
from finemoe.traces.npz_import import import_chosen_experts
from finemoe.traces.recorder_import import import_sglang_recording
from finemoe.traces.route_import import import_route_csv, recording_format
from finemoe.traces.routed_experts_import import import_routed_experts
from finemoe.traces.routing import RoutingMeta
from finemoe.traces.routing_file import RoutingFile
from test_route_csv import small

Import = Callable[[Path, Path], RoutingMeta]
REQUEST = (drawn_ids(7, 1), 3)


def archive(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def chosen() -> bytes:
    rng = np.random.default_rng(0)
    probs = rng.random((12, 3, 2)) + 0.1
    return archive(
        expert_ids=rng.random((12, 3, 6)).argsort(axis=2)[..., :2].astype(np.uint8),
        probs=(probs / probs.sum(axis=2, keepdims=True)).astype(np.float16),
        offsets=np.array([0, 7, 12]),
    )


def lines(*responses: dict[str, Any]) -> bytes:
    return "".join(json.dumps(response) + "\n" for response in responses).encode()


def npz(path: Path, out: Path) -> RoutingMeta:
    return import_chosen_experts(path, out, model="tiny", experts=6, expert_bytes=10)


def routed(path: Path, out: Path) -> RoutingMeta:
    return import_routed_experts(path, out, model=MODEL)


def recorder(path: Path, out: Path) -> RoutingMeta:
    return import_sglang_recording(path, out, model=MODEL)


def csv(path: Path, out: Path) -> RoutingMeta:
    return import_route_csv(path, out)


FILES: dict[str, tuple[Import, Callable[[], bytes]]] = {
    "npz": (npz, chosen),
    "route CSV": (csv, lambda: "\n".join([*small(), ""]).encode()),
    "vLLM": (routed, lambda: lines(vllm_response(*REQUEST), vllm_response(*REQUEST))),
    "vLLM 0.21": (routed, lambda: lines(vllm_021_response(*REQUEST))),
    "SGLang": (routed, lambda: lines(sglang_response(*REQUEST))),
    "arrays": (routed, lambda: archive(routed_experts=REQUEST[0], offsets=[0, 7], prompt_tokens=[3])),
    "per_token": (recorder, lambda: archive(**per_token_arrays(REQUEST))),
    "per_pass": (recorder, lambda: archive(sglang_counts=per_pass_counts(REQUEST))),
}
DAMAGED = 40


def outcome(load: Import, content: bytes, folder: Path) -> str | None:
    """The one-line error, or None where the import made a trace that reads back."""
    source, out = folder / "source", folder / "out.parquet"
    source.write_bytes(content)
    try:
        recording_format(source)
        load(source, out)
    except InputError as error:
        assert [path.name for path in folder.iterdir()] == ["source"]  # nothing half done is left
        return str(error)
    file = RoutingFile(out)
    assert all(file.recorded(number).iterations >= 1 for number in range(file.requests))
    out.unlink()
    return None


@pytest.mark.parametrize("name", FILES)
def test_truncated_and_altered_files(tmp_path: Path, name: str) -> None:
    load, whole = FILES[name][0], FILES[name][1]()
    assert outcome(load, whole, tmp_path) is None
    rng = np.random.default_rng(11)
    refused = 0
    for length in rng.integers(0, len(whole) - 1, DAMAGED).tolist():
        told = outcome(load, whole[:length], tmp_path)
        refused += told is not None
        assert told is None or told.startswith(str(tmp_path / "source"))
    # A text file cut between two rows or lines is a shorter file of its kind.
    assert refused >= DAMAGED // 2
    for _ in range(DAMAGED):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), int(rng.integers(1, 9))).tolist():
            damaged[place] = int(rng.integers(256))
        outcome(load, bytes(damaged), tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_files_of_another_kind(tmp_path: Path, name: str) -> None:
    load, own = FILES[name]
    for other, (reader, theirs) in FILES.items():
        if reader is not load:
            assert outcome(load, theirs(), tmp_path), f"{name} took a file of {other}"
    for content in (b"", b"\x00" * 300, b"{", b"[" * 100_000, b'{"choices": 7}', b"PK\x03\x04", own()[1:]):
        assert outcome(load, content, tmp_path)


class _Trap:
    """Unpickling it would create a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize("name", FILES)
def test_pickles_are_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    load = FILES[name][0]
    trap = np.array([_Trap()], dtype=object)
    names = (
        "expert_ids",
        "probs",
        "offsets",
        "routed_experts",
        "sglang_counts",
        "sglang_topk_ids",
        "positions",
    )
    single = io.BytesIO()
    np.save(single, trap)
    for content in (pickle.dumps(_Trap()), archive(**dict.fromkeys(names, trap)), single.getvalue()):
        assert outcome(load, content, folder)
    assert not (tmp_path / "executed").exists()


def test_damaged_routing_traces(tmp_path: Path) -> None:
    meta = analysis_meta()
    written = write_trace(tmp_path / "whole.parquet", meta, requests=3)
    whole, path = (tmp_path / "whole.parquet").read_bytes(), tmp_path / "damaged.parquet"
    rng = np.random.default_rng(12)
    told: list[str] = []
    for turn in range(3 * DAMAGED):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), int(rng.integers(1, 9))).tolist():
            damaged[place] = int(rng.integers(256))
        path.write_bytes(damaged[: int(rng.integers(0, len(whole)))] if turn % 3 == 0 else damaged)
        try:
            file = RoutingFile(path)
            read = [file.recorded(number) for number in range(file.requests)]
        except TraceError as error:
            told.append(str(error))
        else:  # the change hit nothing that is read, or a label
            assert len(read) == len(written)
            for one, other in zip(read, written, strict=True):
                assert one.gate.tobytes() == other.gate.tobytes()
    assert len(told) > 2 * DAMAGED
    assert all(message.startswith(str(path)) for message in told)

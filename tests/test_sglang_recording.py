"""SGLang's expert distribution recordings: converted by the script, imported, refused where they mislead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_recordings import MODEL, SPEC, Ids, all_layers, drawn_ids, per_pass_counts, per_token_arrays
from finemoe.errors import TraceError
from finemoe.traces.recorder_import import import_sglang_recording
from finemoe.traces.route_import import recording_format
from finemoe.traces.routing_file import RoutingFile
from test_routed_experts import expect_requests

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "sglang_to_npz.py"
REQUESTS: tuple[tuple[Ids, int], ...] = ((drawn_ids(9, 1), 4), (drawn_ids(6, 2), 3))


def test_ids_of_each_token(tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", **per_token_arrays(*REQUESTS))
    assert recording_format(tmp_path / "r.npz") == "SGLang recording"
    meta = import_sglang_recording(tmp_path / "r.npz", tmp_path / "out.parquet")
    assert (meta.model, meta.prefill, meta.gate_content) == (MODEL, "recorded", "chosen")
    expect_requests(tmp_path / "out.parquet", REQUESTS)


def test_a_prompt_in_chunks_is_one_prefill(tmp_path: Path) -> None:
    arrays = per_token_arrays((drawn_ids(9, 1), 4))
    arrays["pass_tokens"] = np.array([3, 1, 1, 1, 1, 1, 1])
    arrays["pass_requests"] = np.array([1, 1, 0, 0, 0, 0, 0])
    np.savez(tmp_path / "r.npz", **arrays)
    import_sglang_recording(tmp_path / "r.npz", tmp_path / "out.parquet")
    expect_requests(tmp_path / "out.parquet", ((drawn_ids(9, 1), 4),))


def test_tokens_per_expert_of_each_pass(tmp_path: Path) -> None:
    counts = per_pass_counts(*REQUESTS)
    np.savez(tmp_path / "r.npz", sglang_counts=np.insert(counts, 3, 0, axis=0))  # with an idle pass
    assert recording_format(tmp_path / "r.npz") == "SGLang recording"
    meta = import_sglang_recording(tmp_path / "r.npz", tmp_path / "out.parquet", model=MODEL)
    assert "tokens per expert and pass" in meta.notes
    expect_requests(tmp_path / "out.parquet", REQUESTS)
    prefill = RoutingFile(tmp_path / "out.parquet").recorded(0).gate[0].astype(float)
    assert prefill.sum(axis=1) == pytest.approx(np.ones(SPEC.layers), abs=2e-3)


def changed(name: str, at: Any, value: Any) -> dict[str, Any]:
    arrays = per_token_arrays(*REQUESTS)
    arrays[name][at] = value
    return arrays


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (changed("pass_requests", 0, 2), "pass 0: 2 requests: requests served together"),
        (
            {
                **per_token_arrays(*REQUESTS),
                "pass_tokens": np.array([4, 2, 1, 1, 1, 3, 1, 1, 1]),
                "pass_requests": np.array([1, 0, 0, 0, 0, 1, 0, 0, 0]),
            },
            "pass 1: a decode pass of 2 tokens",
        ),
        (changed("positions", slice(9, 12), [5, 6, 7]), "pass 6: position 5 does not continue"),
        (changed("positions", 6, 8), "pass 3: position 8 does not continue"),
        (changed("pass_tokens", 0, 5), "they do not agree"),
        (changed("sglang_topk_ids", (5, 3, 0), 64), "request 0, token 5, layer 2: .*has experts 0 … 63"),
        (changed("sglang_topk_ids", (5, 3, 0), -1), "request 0, token 5, layer 2: .*not captured"),
        (changed("sglang_topk_ids", (5, 3, 6), 3), "7 experts per token"),
        (changed("sglang_topk_ids", slice(None), -1), "no expert in any slot"),
        ({"sglang_topk_ids": np.zeros((3, 2, 2), int)}, "array positions: missing"),
        (
            {**per_token_arrays(*REQUESTS), "positions": np.zeros((15, 1), int)},
            r"array positions: int64 \[15",
        ),
    ],
)
def test_recordings_that_mislead(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "r.npz", **arrays)
    with pytest.raises(TraceError, match=message):
        import_sglang_recording(tmp_path / "r.npz", tmp_path / "out.parquet", model=MODEL)


@pytest.mark.parametrize(
    ("counts", "model", "message"),
    [
        (per_pass_counts(*REQUESTS), None, "counts do not tell how many experts"),
        (per_pass_counts(*REQUESTS), "mixtral-8x7b", "26 layers x 64 experts; mixtral-8x7b has 32 x 8"),
        (per_pass_counts(*REQUESTS)[1:], MODEL, "pass 0: one token: a prompt's pass must come first"),
        (per_pass_counts(*REQUESTS) * 5, MODEL, None),
        (per_pass_counts(*REQUESTS)[:, :, :1], MODEL, "layers x 1 experts"),
        (-per_pass_counts(*REQUESTS), MODEL, "array sglang_counts"),
        (
            per_pass_counts((drawn_ids(9)[:, :, :5], 4)),
            MODEL,
            "pass 1, layer 0: 5 activations|pass 0, layer 0",
        ),
    ],
)
def test_counts_that_mislead(tmp_path: Path, counts: Any, model: str | None, message: str | None) -> None:
    np.savez(tmp_path / "r.npz", sglang_counts=counts)
    if message is None:  # five times the tokens: every pass is a prompt
        import_sglang_recording(tmp_path / "r.npz", tmp_path / "out.parquet", model=model)
        assert RoutingFile(tmp_path / "out.parquet").requests == len(counts)
        return
    with pytest.raises(TraceError, match=message):
        import_sglang_recording(tmp_path / "r.npz", tmp_path / "out.parquet", model=model)


def dump_of(requests: tuple[tuple[Ids, int], ...], mode: str) -> dict[str, Any]:
    """What SGLang pickles: physical experts are the logical ones in reverse order, and two copies more."""
    torch = pytest.importorskip("torch")
    physical = np.concatenate((np.arange(SPEC.experts)[::-1], [0, 1]))
    records, number = [], 10
    for ids, prompt in requests:
        for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, len(ids)))]:
            place = np.where(
                all_layers(ids[start:end], -1) < 0, -1, SPEC.experts - 1 - all_layers(ids[start:end], 64)
            )
            wide = np.concatenate((place, np.full((*place.shape[:2], 2), -1)), axis=2).transpose(1, 0, 2)
            counts = np.stack([np.bincount(row[row >= 0], minlength=66) for row in place.transpose(1, 0, 2)])
            records.append({"forward_pass_id": number, "rank": 0, "gatherer_key": "primary"})
            if mode == "per_token":
                records[-1] |= {
                    "input_ids": list(range(start, end)),
                    "positions": list(range(start, end)),
                    "extend_seq_lens": [end] if start == 0 else None,
                    "forward_mode": 1 if start == 0 else 2,
                    "topk_ids_of_layer": torch.tensor(wide, dtype=torch.int32),
                    "misc_objects": [],
                }
            records[-1]["global_physical_count"] = torch.tensor(counts, dtype=torch.int32)
            number += 1
    maps = torch.tensor(np.tile(physical, (SPEC.decoder_layers, 1)))
    return {"records": records[::-1], "last_physical_to_logical_map": maps}


@pytest.mark.parametrize("mode", ["per_token", "per_pass"])
def test_the_script_converts_what_sglang_saves(tmp_path: Path, mode: str) -> None:
    torch = pytest.importorskip("torch")
    torch.save(dump_of(REQUESTS, mode), tmp_path / "dump.pt")
    with pytest.raises(TraceError, match=r"a pickle, which may run code.*sglang_to_npz\.py"):
        recording_format(tmp_path / "dump.pt")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "dump.pt"), str(tmp_path / "r.npz")]
    subprocess.run(command, check=True)
    import_sglang_recording(tmp_path / "r.npz", tmp_path / "out.parquet", model=MODEL)
    expect_requests(tmp_path / "out.parquet", REQUESTS)


def test_an_old_pickle_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "dump.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(TraceError, match="it is never read"):
        recording_format(tmp_path / "dump.pt")

"""Importing npz recordings of chosen experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from finemoe.errors import SettingError, TraceError
from finemoe.traces.npz_import import import_chosen_experts
from finemoe.traces.routing import RoutingMeta
from finemoe.traces.routing_file import RoutingFile
from shared_data import shared

TINY: dict[str, Any] = {"model": "tiny", "experts": 6, "expert_bytes": 10}


def arrays(tokens: int = 20, layers: int = 3, normalised: bool = True) -> dict[str, npt.NDArray[Any]]:
    """Two requests of a model with 6 experts, top-2, ids in no order."""
    rng = np.random.default_rng(0)
    probs = rng.random((tokens, layers, 2)) + 0.1
    probs /= probs.sum(axis=2, keepdims=True) * (1 if normalised else 2)
    return {
        "expert_ids": rng.random((tokens, layers, 6)).argsort(axis=2)[..., :2].astype(np.uint8),
        "probs": probs.astype(np.float16),
        "offsets": np.array([0, 12, tokens]),
    }


def save(folder: Path, **changes: Any) -> Path:
    path = folder / "recording.npz"
    content = {**arrays(), **changes}
    np.savez(path, **{name: value for name, value in content.items() if value is not None})
    return path


def run(folder: Path, path: Path, **options: Any) -> tuple[RoutingMeta, RoutingFile]:
    meta = import_chosen_experts(path, folder / "out.parquet", **{**TINY, **options})
    return meta, RoutingFile(folder / "out.parquet")


@pytest.mark.parametrize("normalised", [True, False])
def test_rows_choices_and_the_derived_prefill(tmp_path: Path, normalised: bool) -> None:
    source = arrays(normalised=normalised)
    meta, file = run(tmp_path, save(tmp_path, **source))
    assert (meta.source, meta.gate_content, meta.prefill) == ("imported", "chosen", "derived")
    assert meta.unchosen_mass == ("zero" if normalised else "even")
    dense = np.zeros((20, 3, 6))
    for token in range(20):
        for layer in range(3):
            probs = source["probs"][token, layer].astype(float)
            dense[token, layer] = 0 if normalised else (1 - probs.sum()) / 4
            dense[token, layer, source["expert_ids"][token, layer]] = probs
    for request, (start, end) in enumerate(((0, 12), (12, 20))):
        prompt = (end - start) // 4
        routing = file.recorded(request)
        assert routing.iterations == 1 + end - start - prompt
        np.testing.assert_allclose(routing.gate[0], dense[start : start + prompt].mean(axis=0), atol=1e-3)
        np.testing.assert_allclose(routing.gate[1:], dense[start + prompt : end], atol=1e-3)
        assert routing.tokens(2).tolist() == [prompt] + [1] * (routing.iterations - 1)
        for layer in range(3):
            experts, counts = routing.required(0, layer)
            drawn = source["expert_ids"][start : start + prompt, layer]
            assert experts.tolist() == sorted(set(drawn.ravel().tolist()))
            assert counts.tolist() == [int((drawn == e).sum()) for e in experts]
            for iteration in range(1, routing.iterations):
                experts, counts = routing.required(iteration, layer)
                assert experts.tolist() == sorted(source["expert_ids"][start + prompt + iteration - 1, layer])
                assert counts.tolist() == [1, 1]


def test_prefill_lengths(tmp_path: Path) -> None:
    ends = np.array([0, 1, 4, 11, 211])
    path = save(tmp_path, **{**arrays(211), "offsets": ends})
    _, file = run(tmp_path, path)
    assert [int(file.recorded(i).tokens(2)[0]) for i in range(4)] == [1, 1, 1, 32]
    assert [file.recorded(i).iterations for i in range(4)] == [1, 3, 7, 169]
    meta, file = run(tmp_path, path, prefill="none")
    assert meta.prefill == "none"
    assert [file.recorded(i).iterations for i in range(4)] == [1, 3, 7, 200]


def changed(name: str, at: Any, value: Any) -> dict[str, npt.NDArray[Any]]:
    array = arrays()[name].astype(np.int16) if name == "expert_ids" else arrays()[name]
    array[at] = value
    return {name: array}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probs": None}, r"array probs: missing \(found: expert_ids, offsets\)"),
        (
            {"expert_ids": arrays()["expert_ids"][:, 0]},
            r"expert_ids: uint8 \[20, 2\], expected integers \[T, L, k\]",
        ),
        ({"expert_ids": arrays()["expert_ids"].astype(float)}, "expert_ids: float64 "),
        ({"expert_ids": np.zeros((0, 3, 2), int)}, r"expert_ids: int64 \[0, 3, 2\]"),
        ({"probs": arrays()["probs"][1:]}, r"probs: float16 \[19, 3, 2\], expected floats \[20, 3, 2\]"),
        ({"probs": np.full((20, 3, 2), None)}, "cannot be read as npz without pickle .*Object arrays"),
        ({"offsets": np.zeros((2, 2), int)}, "offsets: int64 "),
        ({"offsets": np.array([0, 15, 12, 20])}, "offsets, request 1: 0 … 20, must rise from 0 to 20"),
        ({"offsets": np.array([0, 12, 12, 20])}, "offsets, request 1: "),
        ({"offsets": np.array([0, 12, 19])}, "offsets, request 2: 0 … 19, must rise from 0 to 20"),
        (
            changed("expert_ids", (7, 2, 1), 6),
            r"expert_ids, token 7, layer 2: \[\d, 6\]: ids must be in 0 … 5",
        ),
        (changed("expert_ids", (7, 2, 1), -1), "expert_ids, token 7, layer 2: .*ids must be in"),
        (changed("expert_ids", (7, 2), 3), r"expert_ids, token 7, layer 2: \[3, 3\]: 2 different experts"),
        (changed("probs", (3, 1, 0), np.nan), r"probs, token 3, layer 1: \[nan, .*must be in \[0, 1\]"),
        (changed("probs", (3, 1, 0), np.inf), "probs, token 3, layer 1: "),
        (changed("probs", (3, 1, 0), -0.1), "probs, token 3, layer 1: "),
        (changed("probs", (3, 1), 0.9), r"probs, token 3, layer 1: .*sum to more than 1"),
    ],
)
def test_malformed_arrays_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = save(tmp_path, **changes)
    with pytest.raises(TraceError, match=message):
        run(tmp_path, path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_files_that_are_no_npz_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    whole = path.read_bytes()
    for content in (whole[:-30], whole[: len(whole) // 2], b"", b"not a zip", b"\x80\x04]\x94."):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"recording\.npz: cannot be read as npz"):
            run(tmp_path, path)
    damaged = bytearray(whole)
    damaged[200:260] = bytes(60)
    path.write_bytes(damaged)
    with pytest.raises(TraceError, match="cannot be read as npz"):
        run(tmp_path, path)
    single = tmp_path / "single.npy"
    np.save(single, np.zeros(3))
    with pytest.raises(TraceError, match="a single array"):
        run(tmp_path, single)
    with pytest.raises(TraceError, match="no such file"):
        run(tmp_path, tmp_path / "nowhere.npz")


def test_the_model_is_known_by_shape_or_must_be_described(tmp_path: Path) -> None:
    path, out = save(tmp_path), tmp_path / "out.parquet"
    with pytest.raises(TraceError, match="3 layers, 2 experts per token, largest id 5: no known model"):
        import_chosen_experts(path, out)
    with pytest.raises(TraceError, match="3 layers, 2 experts per token; mixtral-8x7b has 32 and 2"):
        import_chosen_experts(path, out, model="mixtral-8x7b")
    with pytest.raises(SettingError, match=r"'tiny' is none of .*mixtral-8x7b.* state its experts"):
        import_chosen_experts(path, out, model="tiny", experts=6)
    with pytest.raises(SettingError, match="expert_bytes = 0"):
        import_chosen_experts(path, out, model="tiny", experts=6, expert_bytes=0)
    two_of_eight = arrays(20, layers=32)
    assert import_chosen_experts(save(tmp_path, **two_of_eight), out).model == "mixtral-8x7b"
    two_of_eight["expert_ids"][two_of_eight["expert_ids"] == 5] = 15
    assert import_chosen_experts(save(tmp_path, **two_of_eight), out).model == "phi-3.5-moe"


@pytest.mark.parametrize(
    ("name", "model", "mass", "requests"),
    [
        ("gpt-oss-20b_small64.npz", "gpt-oss-20b", "zero", 64),
        ("deepseek-v2-lite_esft173.npz", "deepseek-v2-lite", "even", 173),
    ],
)
def test_real_recordings(tmp_path: Path, name: str, model: str, mass: str, requests: int) -> None:
    path = shared(f"routing/{name}")
    meta = import_chosen_experts(path, tmp_path / "out.parquet")
    file = RoutingFile(tmp_path / "out.parquet")
    assert (meta.model, meta.unchosen_mass, file.requests) == (model, mass, requests)
    with np.load(path, allow_pickle=False) as archive:
        ids, probs, offsets = archive["expert_ids"], archive["probs"], archive["offsets"]
    for request in (0, requests // 2, requests - 1):
        routing = file.recorded(request)
        start, end = int(offsets[request]), int(offsets[request + 1])
        prompt = max(1, min(32, (end - start) // 4))
        assert routing.iterations == 1 + end - start - prompt
        flat = routing.experts[routing.offsets[meta.layers] :].reshape(-1, meta.layers, meta.top_k)
        assert np.array_equal(flat, np.sort(ids[start + prompt : end], axis=2))
        kept = np.take_along_axis(routing.gate[1:], ids[start + prompt : end].astype(np.int64), axis=2)
        assert np.array_equal(kept, probs[start + prompt : end])
        total = routing.gate.sum(axis=2, dtype=np.float32)
        assert np.abs(total - 1).max() < 0.01

"""Importing routed experts of vLLM and SGLang: every form gives the same trace, every mismatch is named."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_recordings import (
    MODEL,
    SPEC,
    Ids,
    all_layers,
    drawn_ids,
    json_lines,
    npy_base64,
    sglang_chat_response,
    sglang_response,
    vllm_021_response,
    vllm_response,
)
from finemoe.errors import SettingError, TraceError
from finemoe.traces.route_import import recording_format
from finemoe.traces.routed_experts_import import import_routed_experts
from finemoe.traces.routing_file import RoutingFile
from test_routing_analysis_cli import finemoe

REQUESTS: tuple[tuple[Ids, int], ...] = ((drawn_ids(9, 1), 4), (drawn_ids(6, 2), 1))


def expect_requests(out: Path, requests: tuple[tuple[Ids, int], ...] = REQUESTS) -> None:
    file = RoutingFile(out)
    assert file.requests == len(requests)
    for number, (ids, prompt) in enumerate(requests):
        routing = file.recorded(number)
        assert routing.iterations == len(ids) - prompt + 1
        for layer in range(SPEC.layers):
            experts, counts = routing.required(0, layer)
            assert dict(zip(experts.tolist(), counts.tolist(), strict=True)) == {
                int(e): int((ids[:prompt, layer] == e).sum()) for e in np.unique(ids[:prompt, layer])
            }
            for iteration in range(1, routing.iterations):
                chosen = np.sort(ids[prompt + iteration - 1, layer])
                assert routing.required(iteration, layer)[0].tolist() == chosen.tolist()
                row = routing.gate[iteration, layer]
                assert np.flatnonzero(row).tolist() == chosen.tolist()
                assert row[chosen] == pytest.approx(1 / SPEC.top_k, abs=1e-3)


@pytest.mark.parametrize("form", [vllm_response, vllm_021_response, sglang_response, sglang_chat_response])
def test_every_form_of_a_response(tmp_path: Path, form: Any) -> None:
    path = json_lines(tmp_path / "r.jsonl", *(form(ids, prompt) for ids, prompt in REQUESTS))
    assert recording_format(path) == "routed experts"
    meta = import_routed_experts(path, tmp_path / "out.parquet", model=MODEL)
    assert (meta.model, meta.layers, meta.experts, meta.top_k) == (MODEL, 26, 64, 6)
    assert (meta.gate_content, meta.unchosen_mass, meta.prefill) == ("chosen", "zero", "recorded")
    assert "weights were not recorded" in meta.notes
    expect_requests(tmp_path / "out.parquet")


def test_containers_and_the_model_by_shape(tmp_path: Path) -> None:
    responses = [vllm_response(ids, prompt) for ids, prompt in REQUESTS]
    for name, text in {
        "list": json.dumps(responses),
        "pretty": json.dumps(responses, indent=1),
        "blank": "\ufeff" + "\n\n".join(json.dumps(response) for response in responses),
        "lists": "\n".join(json.dumps([response]) for response in responses),
    }.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text, "utf-8")
        assert recording_format(path) == "routed experts"
        assert import_routed_experts(path, tmp_path / "out.parquet").model == MODEL
        expect_requests(tmp_path / "out.parquet")


def test_choices_share_the_prompt(tmp_path: Path) -> None:
    one, other = drawn_ids(9, 1), drawn_ids(7, 2)
    other[:4] = one[:4]
    newer = vllm_response(one, 4)
    newer["choices"] += vllm_response(other, 4)["choices"]
    newer["usage"]["completion_tokens"] = 6 + 4
    older = vllm_021_response(one, 4)
    older["choices"] += vllm_021_response(other, 4)["choices"]
    older["usage"]["completion_tokens"] = 6 + 4
    for response in (newer, older):
        path = json_lines(tmp_path / "r.jsonl", response)
        import_routed_experts(path, tmp_path / "out.parquet")
        expect_requests(tmp_path / "out.parquet", ((one, 4), (other, 4)))


def test_saved_arrays(tmp_path: Path) -> None:
    ids = np.concatenate([all_layers(ids) for ids, _ in REQUESTS]).astype(np.int16)
    np.savez(tmp_path / "a.npz", routed_experts=ids, offsets=[0, 9, 15], prompt_tokens=[4, 1])
    assert recording_format(tmp_path / "a.npz") == "routed experts"
    assert import_routed_experts(tmp_path / "a.npz", tmp_path / "out.parquet").prefill == "recorded"
    expect_requests(tmp_path / "out.parquet")
    np.save(tmp_path / "b.npy", REQUESTS[0][0].astype(np.uint8))
    assert recording_format(tmp_path / "b.npy") == "routed experts"
    assert import_routed_experts(tmp_path / "b.npy", tmp_path / "out.parquet").prefill == "derived"
    expect_requests(tmp_path / "out.parquet", ((REQUESTS[0][0], 2),))


def ids_with(place: tuple[Any, ...], value: Any) -> Ids:
    ids = drawn_ids(9, 1)
    ids[place] = value
    return ids


def without(response: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in response.items() if key != name}


GOOD = vllm_response(*REQUESTS[0])
RAW = sglang_response(*REQUESTS[0])


@pytest.mark.parametrize(
    ("responses", "model", "message"),
    [
        ([GOOD], "mixtral-8x7b", "line 1, choice 0: 6 experts per token; mixtral-8x7b has 2"),
        ([vllm_response(drawn_ids(9)[:, 2:], 4)], MODEL, "choice 0: 25 layers; .* has 26 with experts of 27"),
        ([GOOD, vllm_response(drawn_ids(9)[:, :, :5], 4)], None, "line 2, choice 0: 5 experts per token"),
        ([vllm_response(ids_with((5, 3, 2), 64), 4)], MODEL, "token 5, layer 3: .*64.*has experts 0 … 63"),
        (
            [vllm_response(ids_with((5, 3, slice(0, 2)), 7), 4)],
            MODEL,
            "token 5, layer 3: .*different experts",
        ),
        ([vllm_021_response(ids_with((2, 3, 0), -1), 4)], MODEL, "token 2, layer 3: .*not captured.*cache"),
        ([GOOD, GOOD | {"model": "other"}], None, "line 2: model 'other', the responses before are of"),
        ([without(GOOD, "usage")], None, "line 1: prompt_tokens = None, completion_tokens = None"),
        (
            [GOOD | {"usage": {"prompt_tokens": 3, "completion_tokens": 9}}],
            None,
            "9 rows in 1 choices, but 3",
        ),
        ([GOOD | {"choices": [{"text": "…"}]}], None, "choice 0: no routed_experts. Start the server with"),
        ([GOOD | {"choices": []}], None, "line 1: no routed_experts"),
        ([GOOD | {"choices": [{"routed_experts": "@"}]}], None, "routed_experts is not base64"),
        (
            [GOOD | {"choices": [{"routed_experts": npy_base64(np.zeros((9, 27)))}]}],
            None,
            r"float64 \[9, 27\], not integers",
        ),
        (
            [GOOD | {"choices": [{"routed_experts": npy_base64(all_layers(drawn_ids(9)))[:-40]}]}],
            None,
            "cannot be read as npy without pickle|is not base64",
        ),
        (
            [vllm_021_response(drawn_ids(9), 4) | {"prompt_routed_experts": [[[1], []]]}],
            None,
            "different len",
        ),
        ([RAW], None, "ids without a shape, as SGLang returns them. Name the model"),
        ([RAW], "gpt-oss-20b", r"5,832 bytes; 9 tokens of gpt-oss-20b .* are 3,456"),
        (["text"], None, "line 1: not a response"),
        ([[1, 2]], None, "line 1: not a response"),
        ([], None, "empty"),
    ],
)
def test_mismatches_are_named(tmp_path: Path, responses: list[Any], model: str | None, message: str) -> None:
    path = json_lines(tmp_path / "r.jsonl", *responses)
    with pytest.raises(TraceError, match=message):
        import_routed_experts(path, tmp_path / "out.parquet", model=model)
    assert not (tmp_path / "out.parquet").exists()


def test_a_pickled_array_in_a_response_is_not_loaded(tmp_path: Path) -> None:
    objects = npy_base64(np.array([{"a": 1}], dtype=object))
    path = json_lines(tmp_path / "r.jsonl", GOOD | {"choices": [{"routed_experts": objects}]})
    with pytest.raises(TraceError, match="without pickle"):
        import_routed_experts(path, tmp_path / "out.parquet")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": [0, 20]}, "array offsets: must rise from 0 to 15"),
        ({"prompt_tokens": [4]}, "array prompt_tokens: expected 2 whole numbers"),
        ({"prompt_tokens": [4, 7]}, "array prompt_tokens"),
        ({"routed_experts": np.zeros((15, 27))}, r"float64 \[9, 27\], not integers"),
        ({"routed_experts": np.zeros((15, 27, 6))}, "float64"),
    ],
)
def test_arrays_that_do_not_agree(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    ids = np.concatenate([all_layers(ids) for ids, _ in REQUESTS])
    arrays: dict[str, Any] = {"routed_experts": ids, "offsets": [0, 9, 15], "prompt_tokens": [4, 1]}
    np.savez(tmp_path / "a.npz", **(arrays | changes))
    with pytest.raises(TraceError, match=message):
        import_routed_experts(tmp_path / "a.npz", tmp_path / "out.parquet", model=MODEL)


def test_an_unknown_model_must_be_described(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(12).reshape(2, 3, 2))
    with pytest.raises(TraceError, match="3 layers, 2 experts per token, largest id 11: no known model"):
        import_routed_experts(tmp_path / "a.npy", tmp_path / "out.parquet")
    with pytest.raises(SettingError, match="is unknown"):
        import_routed_experts(tmp_path / "a.npy", tmp_path / "out.parquet", model="nowhere")


def test_sglang_ids_of_a_model_without_other_layers(tmp_path: Path) -> None:
    ids = np.stack([np.sort(np.random.default_rng(0).permutation(8)[:2]) for _ in range(3 * 32)])
    raw = base64.b64encode(ids.astype("<i4").tobytes()).decode()
    answer = {"meta_info": {"prompt_tokens": 2, "completion_tokens": 2, "routed_experts": raw}}
    path = json_lines(tmp_path / "r.jsonl", answer)
    meta = import_routed_experts(path, tmp_path / "out.parquet", model="mixtral")
    assert (meta.model, meta.layers) == ("mixtral-8x7b", 32)
    assert RoutingFile(tmp_path / "out.parquet").recorded(0).iterations == 2


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = json_lines(tmp_path / "r.jsonl", sglang_response(*REQUESTS[0])), tmp_path / "out.parquet"
    command = ("trace", "import", str(path), str(out))
    assert finemoe(monkeypatch, *command, "--model", MODEL) == 0
    assert "deepseek-v2-lite, 26 layers x 64 experts, top-6" in capsys.readouterr().out
    expect_requests(out, REQUESTS[:1])
    assert finemoe(monkeypatch, *command, "--no-prefill") == 2
    assert "--no-prefill is for npz files of expert_ids: this is routed experts" in capsys.readouterr().err

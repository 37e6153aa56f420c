"""Samples of what vLLM and SGLang save of routing, made up in their formats (docs/routed-experts.md).

Ids are drawn for a known model; each function writes them as one of the engines does.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from finemoe.policy.models import load_model_spec

Ids = npt.NDArray[np.int64]
MODEL = "deepseek-v2-lite"  # 27 decoder layers, the first without experts; 64 experts, top-6
SPEC = load_model_spec(MODEL)


def drawn_ids(tokens: int, seed: int = 0) -> Ids:
    """Different experts of each token and layer with experts, in no order: [tokens, 26, 6]."""
    rng = np.random.default_rng(seed)
    order = rng.random((tokens, SPEC.layers, SPEC.experts)).argsort(axis=2)
    return order[..., : SPEC.top_k].astype(np.int64)


def all_layers(ids: Ids, idle: int = 0) -> Ids:
    """With the decoder layer that has no experts, as engines number them: [tokens, 27, 6]."""
    return np.concatenate((np.full((len(ids), 1, ids.shape[2]), idle), ids), axis=1)


def npy_base64(ids: npt.NDArray[Any]) -> str:
    """As vLLM 0.22 and later put an array into a response."""
    buffer = io.BytesIO()
    np.save(buffer, ids)
    return base64.b64encode(buffer.getvalue()).decode()


def vllm_response(ids: Ids, prompt: int, **changes: Any) -> dict[str, Any]:
    """A completion of vLLM 0.22 and later: the last of the generated tokens has no row."""
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {"index": 0, "text": "…", "routed_experts": npy_base64(all_layers(ids).astype(np.uint8))}
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(ids) - prompt + 1},
        **changes,
    }


def vllm_021_response(ids: Ids, prompt: int) -> dict[str, Any]:
    """A completion of vLLM 0.21: nested lists, the prompt's apart, layers with experts only."""
    generated = [*ids[prompt:].tolist(), np.zeros_like(ids[0]).tolist()]
    return {
        "model": MODEL,
        "choices": [{"routed_experts": generated}],
        "prompt_routed_experts": ids[:prompt].tolist(),
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(generated)},
    }


def sglang_response(ids: Ids, prompt: int) -> dict[str, Any]:
    """An answer of SGLang's /generate."""
    raw = base64.b64encode(all_layers(ids).astype("<i4").tobytes()).decode()
    counts = {"prompt_tokens": prompt, "completion_tokens": len(ids) - prompt + 1}
    return {"text": "…", "meta_info": {"id": "1", "routed_experts": raw, **counts}}


def sglang_chat_response(ids: Ids, prompt: int) -> dict[str, Any]:
    """A completion of SGLang's OpenAI endpoint."""
    answer = sglang_response(ids, prompt)["meta_info"]
    usage = {name: answer[name] for name in ("prompt_tokens", "completion_tokens")}
    choices = [{"index": 0, "sgl_ext": {"routed_experts": answer["routed_experts"]}}]
    return {"model": MODEL, "choices": choices, "usage": usage}


def json_lines(path: Path, *responses: Any) -> Path:
    """One response a line."""
    path.write_text("".join(json.dumps(response) + "\n" for response in responses), "utf-8")
    return path


def per_token_arrays(*requests: tuple[Ids, int]) -> dict[str, Any]:
    """What scripts/sglang_to_npz.py writes for requests, each (ids, prompt tokens), served one at a time."""
    free = SPEC.top_k, 8  # SGLang keeps eight slots
    ids, positions, tokens, prompts = [], [], [], []
    for one, prompt in requests:
        wide = all_layers(one, idle=-1)
        empty = np.full((*wide.shape[:2], free[1] - free[0]), -1)
        ids.append(np.concatenate((wide, empty), axis=2))
        positions.append(np.arange(len(one)))
        tokens += [prompt] + [1] * (len(one) - prompt)
        prompts += [1] + [0] * (len(one) - prompt)
    return {
        "sglang_topk_ids": np.concatenate(ids).astype(np.int32),
        "positions": np.concatenate(positions),
        "pass_tokens": np.array(tokens),
        "pass_requests": np.array(prompts),
    }


def per_pass_counts(*requests: tuple[Ids, int]) -> npt.NDArray[np.int64]:
    """Tokens per expert of each pass, [passes, 27, 64]."""
    passes = []
    for ids, prompt in requests:
        for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, len(ids)))]:
            counts = np.zeros((SPEC.decoder_layers, SPEC.experts), np.int64)
            for layer in range(SPEC.layers):
                counts[layer + 1] = np.bincount(ids[start:end, layer].ravel(), minlength=SPEC.experts)
            passes.append(counts)
    return np.stack(passes)

"""Import routed experts as vLLM and SGLang return them: ids per token, layer and slot, without weights.

docs/routed-experts.md describes the files: responses of a server as JSON, or arrays saved as npz or npy.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import msgspec
import numpy as np

from ..errors import TraceError
from ..policy.model_spec import ModelSpec
from ..policy.models import load_model_spec
from .chosen_experts import routing_of_tokens
from .files import check_replaceable
from .npz_file import NPY_MAGIC, load_npy, load_npz
from .npz_import import PREFILL_TOKENS
from .recorded_model import ids_meta, moe_layers, recorded_model
from .route_csv import first_bytes
from .routed_responses import REMEDY, Recorded, from_responses
from .routing import RequestRouting, RoutingMeta
from .routing_file import write_routing


def import_routed_experts(
    path: str | Path, out_parquet: str | Path, *, model: str | Path | None = None, notes: str = ""
) -> RoutingMeta:
    """Write the routing trace `out_parquet` from routed experts and return its meta.

    The prompt's tokens become one prefill iteration, every further token a decode iteration. Weights are not
    in such files: each chosen expert counts 1/K. `model` is a known name or a config.json's path, by default
    the known model with the first request's shape; SGLang's ids have none, so there it must be named. Raises
    `TraceError` with line or array, and request, token and layer.
    """
    path = Path(path)
    check_replaceable(Path(out_parquet))  # before anything is read
    spec = None
    head = first_bytes(path, 64)
    if head.startswith(b"PK"):
        requests = _from_npz(path)
    elif head.startswith(NPY_MAGIC):
        ids = load_npy(path, first_bytes(path, None), "", REMEDY)
        requests = iter([Recorded("", ids, 0)])
    else:
        if model is not None:
            spec = load_model_spec(model)
        requests = from_responses(path, spec)
    first = next(requests, None)
    if first is None:
        raise TraceError(path, "no request.", remedy=REMEDY)
    if first.ids.ndim != 3:
        raise TraceError(
            path,
            f"{first.ids.dtype} {list(first.ids.shape)}, not integers [tokens, layers, experts per token].",
            place=first.place,
            remedy=REMEDY,
        )
    spec = spec or recorded_model(path, model, first.ids)
    meta = ids_meta(spec, path, notes)
    if first.prompt == 0:
        meta = msgspec.structs.replace(meta, prefill="derived")
    write_routing(out_parquet, meta, _routings(path, chain([first], requests), spec, meta))
    return meta


def _routings(
    path: Path, requests: Iterator[Recorded], spec: ModelSpec, meta: RoutingMeta
) -> Iterator[RequestRouting]:
    for request in requests:
        ids = moe_layers(path, request.place, request.ids, spec)
        prompt = request.prompt or max(1, min(PREFILL_TOKENS, len(ids) // 4))
        yield routing_of_tokens(ids, np.full(ids.shape, 1 / spec.top_k, np.float32), prompt, meta)


def _from_npz(path: Path) -> Iterator[Recorded]:
    arrays = load_npz(path, ("routed_experts",), REMEDY, optional=("offsets", "prompt_tokens"))
    ids = arrays["routed_experts"]
    count = len(ids) if ids.ndim else 0
    offsets = arrays.get("offsets", np.array([0, count]))
    if (
        offsets.ndim != 1
        or len(offsets) < 2
        or not np.issubdtype(offsets.dtype, np.integer)
        or offsets[0] != 0
        or offsets[-1] != count
        or (np.diff(offsets.astype(np.int64)) <= 0).any()
    ):
        raise TraceError(
            path,
            f"must rise from 0 to {count}, each request at least one token.",
            place="array offsets",
            remedy=REMEDY,
        )
    lengths = np.diff(offsets.astype(np.int64))
    prompts = arrays.get("prompt_tokens")
    if prompts is not None and (
        prompts.shape != lengths.shape
        or not np.issubdtype(prompts.dtype, np.integer)
        or (prompts < 1).any()
        or (prompts > lengths).any()
    ):
        raise TraceError(
            path,
            f"expected {len(lengths)} whole numbers, each from 1 to the request's number of tokens.",
            place="array prompt_tokens",
            remedy=REMEDY,
        )
    for number, (start, end) in enumerate(pairwise(offsets.tolist())):
        prompt = 0 if prompts is None else int(prompts[number])
        yield Recorded(f"request {number}", ids[start:end], prompt)

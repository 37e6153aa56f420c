"""Import SGLang's expert distribution recordings, converted to npz by scripts/sglang_to_npz.py.

SGLang writes torch pickles, which FineMoE never loads: the script runs in SGLang's own environment
(docs/routed-experts.md). Recordings carry no request ids, so requests must have been served one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import TraceError
from ..policy.model_spec import ModelSpec
from ..policy.models import load_model_spec
from .chosen_experts import routing_of_tokens
from .files import check_replaceable
from .npz_file import array_names, load_npz
from .recorded_model import NOT_CAPTURED, ids_meta, moe_layers, recorded_model
from .routing import RequestRouting, RoutingMeta
from .routing_file import write_routing

TOKEN_ARRAYS = ("sglang_topk_ids", "positions", "pass_tokens", "pass_requests")
PASS_ARRAYS = ("sglang_counts",)
_REMEDY = "Convert the dump again with scripts/sglang_to_npz.py (docs/routed-experts.md)."
_ALONE = "Record with --max-running-requests 1 and --disable-radix-cache (docs/routed-experts.md)."

Int64s = npt.NDArray[np.int64]


def import_sglang_recording(
    path: str | Path, out_parquet: str | Path, *, model: str | Path | None = None, notes: str = ""
) -> RoutingMeta:
    """Write the routing trace `out_parquet` from a converted SGLang recording and return its meta.

    From mode per_token: ids of each token, weights not recorded, each chosen expert counts 1/K. From mode
    per_pass: tokens per expert of each pass; its row is each expert's share of them. `model` is a known name
    or a config.json's path; by default the known one with this shape. Raises `TraceError` for a file that
    breaks a rule, and for requests that were served together.
    """
    path = Path(path)
    check_replaceable(Path(out_parquet))  # before the arrays are read
    if "sglang_counts" in array_names(path):
        return _import_counts(path, Path(out_parquet), model, notes)
    arrays = load_npz(path, TOKEN_ARRAYS, _REMEDY)
    for name, array in arrays.items():
        if array.ndim != (3 if name == "sglang_topk_ids" else 1) or not np.issubdtype(
            array.dtype, np.integer
        ):
            raise TraceError(
                path, f"{array.dtype} {list(array.shape)}.", place=f"array {name}", remedy=_REMEDY
            )
    ids = arrays["sglang_topk_ids"]
    tokens, requests = (arrays[name].astype(np.int64) for name in ("pass_tokens", "pass_requests"))
    sizes = len(ids), len(arrays["positions"]), int(tokens.sum())
    if len(set(sizes)) != 1 or len(tokens) != len(requests) or (tokens < 1).any() or not len(ids):
        raise TraceError(
            path,
            f"{sizes[0]} tokens, {sizes[1]} positions, {sizes[2]} tokens in {len(tokens)} passes of "
            f"{len(requests)}: they do not agree.",
            remedy=_REMEDY,
        )
    starts = _starts(path, arrays["positions"].astype(np.int64), tokens, requests)
    ids = _slots(path, ids)
    spec = recorded_model(path, model, ids)
    meta = ids_meta(spec, path, notes)
    write_routing(out_parquet, meta, _token_requests(path, ids, starts, spec, meta))
    return meta


def _starts(path: Path, positions: Int64s, tokens: Int64s, requests: Int64s) -> list[tuple[int, int, int]]:
    """(first token, first decode token, end) of each request."""
    found: list[list[int]] = []
    at = 0
    for number, (count, extended) in enumerate(zip(tokens.tolist(), requests.tolist(), strict=True)):
        here = positions[at : at + count]
        alone = extended == 1 or (extended == 0 and count == 1)
        if not alone or (here != np.arange(here[0], here[0] + count)).any():
            what = f"{extended} requests" if extended else f"a decode pass of {count} tokens"
            raise TraceError(
                path, f"{what}: requests served together cannot be told apart.", place=f"pass {number}",
                remedy=_ALONE,
            )  # fmt: skip
        if here[0] == 0 and extended:
            found.append([at, at + count, at + count])
        elif not found or here[0] != positions[at - 1] + 1 or (extended and found[-1][1] != at):
            raise TraceError(
                path,
                f"position {int(here[0])} does not continue the pass before: a beginning is missing.",
                place=f"pass {number}",
                remedy=_ALONE,
            )
        else:
            found[-1][2] = at + count
            if extended:
                found[-1][1] = at + count
        at += count
    return [(start, decode, end) for start, decode, end in found]


def _slots(path: Path, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Without the slots that SGLang keeps free: −1 for every token and layer."""
    used = np.flatnonzero((ids != NOT_CAPTURED).any(axis=(0, 1)))
    if len(used) == 0:
        raise TraceError(path, "no expert in any slot.", place="array sglang_topk_ids", remedy=_REMEDY)
    return ids[:, :, : used[-1] + 1]


def _token_requests(
    path: Path, ids: npt.NDArray[Any], starts: list[tuple[int, int, int]], spec: ModelSpec, meta: RoutingMeta
) -> Iterator[RequestRouting]:
    for number, (start, decode, end) in enumerate(starts):
        chosen = moe_layers(path, f"request {number}", ids[start:end], spec)
        weights = np.full(chosen.shape, 1 / spec.top_k, np.float32)
        yield routing_of_tokens(chosen, weights, decode - start, meta)


def _import_counts(path: Path, out: Path, model: str | Path | None, notes: str) -> RoutingMeta:
    counts = load_npz(path, PASS_ARRAYS, _REMEDY)["sglang_counts"]
    if (
        counts.ndim != 3
        or not np.issubdtype(counts.dtype, np.integer)
        or (counts < 0).any()
        or not counts.size
    ):
        raise TraceError(
            path,
            f"{counts.dtype} {list(counts.shape)}, expected counts [passes, layers, experts] of 0 or more.",
            place="array sglang_counts",
            remedy=_REMEDY,
        )
    counts = counts.astype(np.int64)
    counts = counts[counts.any(axis=(1, 2))]  # passes without tokens
    counts = counts[:, counts.any(axis=(0, 2))]  # layers without experts
    if model is None:
        raise TraceError(
            path, "counts do not tell how many experts a token activates.", remedy="Name the model: --model."
        )
    spec = load_model_spec(model)
    if counts.shape[1:] != (spec.layers, spec.experts):
        raise TraceError(
            path,
            f"{counts.shape[1]} layers x {counts.shape[2]} experts; "
            f"{spec.name} has {spec.layers} x {spec.experts}.",
            place="array sglang_counts",
            remedy="Name the model that was recorded (--model).",
        )
    sums = counts.sum(axis=2)
    uneven = (sums != sums[:, :1]) | (sums % spec.top_k != 0) | (sums == 0)
    if uneven.any():
        number, layer = (int(x) for x in np.argwhere(uneven)[0])
        raise TraceError(
            path,
            f"{sums[number, layer]} activations, layer 0 has {sums[number, 0]}; "
            f"every layer's are tokens x {spec.top_k}.",
            place=f"pass {number}, layer {layer}",
            remedy="Name the model that was recorded; record without fused shared experts "
            "(--disable-shared-experts-fusion).",
        )
    tokens = sums[:, 0] // spec.top_k
    if tokens[0] == 1:
        raise TraceError(
            path,
            "one token: a prompt's pass must come first, of two or more tokens.",
            place="pass 0",
            remedy=_ALONE,
        )
    meta = msgspec.structs.replace(
        ids_meta(spec, path, notes),
        notes=notes or f"tokens per expert and pass of {path.name}; rows are shares of them",
    )
    write_routing(out, meta, _pass_requests(counts, tokens, spec))
    return meta


def _pass_requests(counts: Int64s, tokens: Int64s, spec: ModelSpec) -> Iterator[RequestRouting]:
    """A pass of several tokens is a prompt; the passes of one token after it are its decode iterations."""
    starts = np.flatnonzero(tokens > 1)
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        part = counts[start:end]
        rows = part / (tokens[start:end, None, None] * spec.top_k)
        used = part > 0
        yield RequestRouting(
            gate=rows.astype(np.float16),
            experts=np.nonzero(used)[2].astype(np.uint16),
            token_counts=part[used].astype(np.int32),
            offsets=np.concatenate((np.zeros(1, np.int64), np.cumsum(used.sum(axis=2).reshape(-1)))),
            embedding=None,
            speculation={},
        )

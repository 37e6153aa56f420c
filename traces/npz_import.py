"""Import recordings that kept only the chosen experts (npz) as routing traces."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import SettingError, TraceError
from .chosen_experts import routing_of_tokens, unchosen_mass
from .files import check_replaceable
from .npz_file import load_npz
from .routing import RequestRouting, RoutingMeta
from .routing_check import ROW_SUM_TOLERANCE
from .routing_file import write_routing
from .routing_preset import load_preset, preset_names

PREFILL_TOKENS = 32
_ARRAYS = ("expert_ids", "probs", "offsets")
_REMEDY = "Export it again as expert_ids [T, layers, k], probs [T, layers, k] and offsets [requests + 1]."


def import_chosen_experts(
    npz_path: str | Path,
    out_parquet: str | Path,
    *,
    model: str | None = None,
    experts: int | None = None,
    expert_bytes: int | None = None,
    prefill: Literal["derived", "none"] = "derived",
    notes: str = "",
) -> RoutingMeta:
    """Write `out_parquet` from the arrays of `npz_path` and return its meta.

    `expert_ids` [T, L, k] names the experts of each token, in any order, `probs` [T, L, k] their
    probabilities; tokens offsets[r] … offsets[r + 1] belong to request r. Where the probabilities of every
    token sum to 1 the other experts get none; otherwise the remaining mass is spread evenly over them. The
    meta says which.

    Such recordings have no prefill: with "derived" the first min(32, n / 4) tokens of a request, at least
    one, become its prefill iteration (mean of their rows, union of their experts); with "none" there is none.
    They have no embeddings either.

    `model` is a shipped preset's name, by default the one with this shape (of several, that with the fewest
    experts). Any other model needs `experts` per layer and `expert_bytes`. Raises `TraceError` for a file
    that cannot be used and `SettingError` for a model that is not known well enough.
    """
    path = Path(npz_path)
    check_replaceable(Path(out_parquet))  # before the arrays are read
    ids, probabilities, offsets = _load(path)
    _, layers, top_k = ids.shape
    model, experts, expert_bytes = _model(path, ids, model, experts, expert_bytes)
    _check_values(path, ids, probabilities, experts)
    meta = RoutingMeta(
        model=model,
        layers=layers,
        experts=experts,
        top_k=top_k,
        expert_bytes=expert_bytes,
        embedding_width=0,
        source="imported",
        gate_content="chosen",
        unchosen_mass=unchosen_mass(probabilities),
        prefill=prefill,
        notes=notes or f"chosen experts of {path.name}",
    )
    write_routing(out_parquet, meta, _requests(ids, probabilities, offsets, meta))
    return meta


def _load(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.int64]]:
    ids, probabilities, offsets = load_npz(path, _ARRAYS, _REMEDY).values()
    if ids.ndim != 3 or 0 in ids.shape or not np.issubdtype(ids.dtype, np.integer):
        raise TraceError(
            path,
            f"{ids.dtype} {list(ids.shape)}, expected integers [T, L, k].",
            place="expert_ids",
            remedy=_REMEDY,
        )
    if probabilities.shape != ids.shape or not np.issubdtype(probabilities.dtype, np.floating):
        raise TraceError(
            path,
            f"{probabilities.dtype} {list(probabilities.shape)}, expected floats {list(ids.shape)}.",
            place="probs",
            remedy=_REMEDY,
        )
    if offsets.ndim != 1 or len(offsets) < 2 or not np.issubdtype(offsets.dtype, np.integer):
        raise TraceError(
            path, f"{offsets.dtype} {list(offsets.shape)}, expected integers [requests + 1].", place="offsets"
        )
    offsets = offsets.astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) <= 0).any():
        at = int(np.argmax(np.diff(offsets) <= 0)) if (np.diff(offsets) <= 0).any() else len(offsets) - 1
        raise TraceError(
            path,
            f"{offsets[0]} … {offsets[-1]}, must rise from 0 to {len(ids)}, each request at least one token.",
            place=f"offsets, request {at}",
            remedy=_REMEDY,
        )
    return ids, probabilities, offsets


def _model(
    path: Path, ids: npt.NDArray[Any], model: str | None, experts: int | None, expert_bytes: int | None
) -> tuple[str, int, int]:
    _, layers, top_k = ids.shape
    known = [load_preset(name) for name in preset_names()]
    if model is None:
        largest = int(ids.max())
        fitting = [p for p in known if (p.layers, p.top_k) == (layers, top_k) and p.experts > largest]
        if not fitting:
            raise TraceError(
                path,
                f"{layers} layers, {top_k} experts per token, largest id {largest}: no known model has that.",
                place="expert_ids",
                remedy="Name the model, its experts per layer and its expert_bytes.",
            )
        model = min(fitting, key=lambda p: p.experts).model
    for preset in known:
        if preset.model == model:
            if (preset.layers, preset.top_k) != (layers, top_k):
                raise TraceError(
                    path,
                    f"{layers} layers, {top_k} experts per token; "
                    f"{model} has {preset.layers} and {preset.top_k}.",
                    place="expert_ids",
                    remedy="Name the model that was recorded.",
                )
            experts = preset.experts if experts is None else experts
            expert_bytes = preset.expert_bytes if expert_bytes is None else expert_bytes
    if experts is None or expert_bytes is None:
        raise SettingError(
            f"model {model!r} is none of {', '.join(preset_names())}: "
            "state its experts per layer and expert_bytes."
        )
    if experts < top_k or expert_bytes < 1:
        raise SettingError(
            f"model {model!r}: experts = {experts}, expert_bytes = {expert_bytes}; "
            f"at least {top_k} experts of at least one byte are needed."
        )
    return model, experts, expert_bytes


def _check_values(path: Path, ids: npt.NDArray[Any], probabilities: npt.NDArray[Any], experts: int) -> None:
    top_k = ids.shape[2]

    def refuse(name: str, bad: npt.NDArray[np.bool_], problem: str) -> None:
        if bad.any():
            token, layer = (int(x) for x in np.argwhere(bad)[0][:2])
            values = (ids if name == "expert_ids" else probabilities)[token, layer].tolist()
            raise TraceError(
                path, f"{values}: {problem}.", place=f"{name}, token {token}, layer {layer}", remedy=_REMEDY
            )

    refuse("expert_ids", (ids < 0) | (ids >= experts), f"ids must be in 0 … {experts - 1}")
    ordered = np.sort(ids, axis=2)
    refuse("expert_ids", ordered[..., 1:] == ordered[..., :-1], f"{top_k} different experts are expected")
    in_range = (probabilities >= 0) & (probabilities <= 1)  # false for NaN
    refuse("probs", ~in_range, "probabilities must be in [0, 1]")
    sums = probabilities.astype(np.float32).sum(axis=2)
    refuse("probs", sums > 1 + ROW_SUM_TOLERANCE, "probabilities sum to more than 1")


def _requests(
    ids: npt.NDArray[Any], probabilities: npt.NDArray[Any], offsets: npt.NDArray[np.int64], meta: RoutingMeta
) -> Iterator[RequestRouting]:
    for start, end in pairwise(offsets):
        prompt = 0 if meta.prefill == "none" else max(1, min(PREFILL_TOKENS, (end - start) // 4))
        yield routing_of_tokens(ids[start:end], probabilities[start:end], prompt, meta)

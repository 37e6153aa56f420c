"""Fit recordings that hold expert ids but no weights to the model that they were made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import TraceError
from ..policy.model_spec import ModelSpec
from ..policy.models import MODEL_NAMES, load_model_spec
from .routing import RoutingMeta

NOT_CAPTURED = -1
_UNKNOWN = "Name the recorded model: --model NAME or its config.json."


def recorded_model(path: Path, model: str | Path | None, ids: npt.NDArray[Any]) -> ModelSpec:
    """The model of that name or config.json; for None the known one with the shape of `ids` [n, L, k]."""
    if model is not None:
        return load_model_spec(model)
    _, layers, top_k = ids.shape
    largest = int(ids.max()) if ids.size else 0
    known = [load_model_spec(name) for name in MODEL_NAMES]
    fitting = [
        spec
        for spec in known
        if layers in (spec.layers, spec.decoder_layers) and spec.top_k == top_k and spec.experts > largest
    ]
    if not fitting:
        raise TraceError(
            path,
            f"{layers} layers, {top_k} experts per token, largest id {largest}: no known model has that.",
            remedy=_UNKNOWN,
        )
    return min(fitting, key=lambda spec: spec.experts)


def ids_meta(spec: ModelSpec, path: Path, notes: str) -> RoutingMeta:
    """Meta of a recording of ids alone: each chosen expert counts 1/K, the others zero."""
    return RoutingMeta(
        model=spec.name,
        layers=spec.layers,
        experts=spec.experts,
        top_k=spec.top_k,
        expert_bytes=spec.expert_bytes("bf16"),
        embedding_width=0,
        source="imported",
        gate_content="chosen",
        unchosen_mass="zero",
        prefill="recorded",
        notes=notes or f"expert ids of {path.name}; weights were not recorded, each counts 1/{spec.top_k}",
    )


def moe_layers(path: Path, place: str, ids: npt.NDArray[Any], spec: ModelSpec) -> npt.NDArray[np.int64]:
    """`ids` [n, L, k] of the layers with experts, checked: i64 [n, spec.layers, spec.top_k].

    Engines that number all decoder layers leave those without experts at one value; they are dropped.
    """
    remedy = "Name the model that was recorded (--model), or record again."
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer) or len(ids) == 0:
        raise TraceError(
            path,
            f"{ids.dtype} {list(ids.shape)}, expected integers [tokens ≥ 1, layers, experts per token].",
            place=place,
            remedy=remedy,
        )
    _, layers, top_k = ids.shape
    if top_k != spec.top_k:
        raise TraceError(
            path,
            f"{top_k} experts per token; {spec.name} has {spec.top_k}.",
            place=place,
            remedy=remedy,
        )
    chosen = ids.astype(np.int64)
    if layers != spec.layers:
        numbered = layers == spec.decoder_layers
        idle = (chosen == chosen[:1, :, :1]).all(axis=(0, 2)) & np.isin(chosen[0, :, 0], (0, NOT_CAPTURED))
        if not numbered or layers - int(idle.sum()) != spec.layers:
            without = f", {int(idle.sum())} of them without experts" if numbered else ""
            raise TraceError(
                path,
                f"{layers} layers{without}; {spec.name} has {spec.layers} with experts "
                f"of {spec.decoder_layers}.",
                place=place,
                remedy=remedy,
            )
        chosen = chosen[:, ~idle]
    _check_ids(path, place, chosen, spec)
    return chosen


def _check_ids(path: Path, place: str, ids: npt.NDArray[np.int64], spec: ModelSpec) -> None:
    def refuse(bad: npt.NDArray[np.bool_], problem: str, remedy: str) -> None:
        if bad.any():
            token, layer = (int(x) for x in np.argwhere(bad)[0][:2])
            where = f"{place}, token {token}, layer {layer}".removeprefix(", ")
            raise TraceError(path, f"{ids[token, layer].tolist()}: {problem}.", place=where, remedy=remedy)

    refuse(
        ids == NOT_CAPTURED,
        "−1 stands for what was not captured",
        "Record with the prefix cache off, or with an engine that keeps its prefixes' routing.",
    )
    refuse(
        (ids < 0) | (ids >= spec.experts),
        f"{spec.name} has experts 0 … {spec.experts - 1}",
        "Name the model that was recorded (--model).",
    )
    ordered = np.sort(ids, axis=2)
    refuse(
        ordered[..., 1:] == ordered[..., :-1],
        f"{spec.top_k} different experts are expected",
        "Record again: the array is damaged, or of a layer without experts.",
    )

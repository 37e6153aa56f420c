"""What a core knows before its first iteration: maps and popularity of a recorded routing trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SettingError
from ..policy.core import popular_experts
from ..serving.prior import fill_store
from ..traces.routing_file import RoutingFile

if TYPE_CHECKING:
    from ..policy.core import Core, Options
    from ..policy.system import System


def prepare(core: Core, system: System, options: Options, history: str | Path | None) -> list[int]:
    """Fill the core's store, as a run with `--offline` does; returns the experts to preload, ascending.

    Raises SettingError for a trace of another shape, and where `static` has none to learn from.
    """
    layers, experts = int(options["layers"]), int(options["experts"])
    if system.preload == "all":
        return list(range(layers * experts))
    if history is None:
        if system.preload == "popular":
            raise SettingError(
                f"policy {system.name} needs to know which experts are popular. Give history=, a routing "
                "trace of the same model."
            )
        return []
    shape = (layers, experts, int(options["top_k"]))
    source = open_history(history, shape, int(options["embedding_width"]))
    fill_store(core, system, options, map(source.recorded, range(source.requests)))
    if system.preload == "none":
        return []
    popularity = np.zeros((layers, experts), np.int64)
    for request in range(source.requests):
        popularity += source.recorded(request).all_tokens()
    return popular_experts(
        popularity,
        devices=int(options["devices"]),
        slots_per_device=int(options["slots_per_device"]),
        top_k=int(options["top_k"]),
    )


def open_history(history: str | Path, shape: tuple[int, int, int], embedding_width: int) -> RoutingFile:
    """The trace, of a model of this shape (layers, experts, top K); SettingError for another model's."""
    source = RoutingFile(history)
    meta = source.meta
    found = (meta.layers, meta.experts, meta.top_k)
    if found != shape:
        raise SettingError(
            f"history {history} is of {meta.model} (layers, experts, top K: {found}), the model has "
            f"{shape}. Give a trace of the same model."
        )
    if meta.embedding_width not in (0, embedding_width):
        raise SettingError(
            f"history {history} has embeddings of {meta.embedding_width} values, the model's have "
            f"{embedding_width}. Give a trace recorded from the same model."
        )
    return source

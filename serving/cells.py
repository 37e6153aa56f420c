"""Names of a grid's cells: policy and cache, with hardware and rate only where the grid has several."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class CellKey(NamedTuple):
    """What tells one cell of a grid from another. `rate_per_s`: asked for; None: the trace's own."""

    policy: str
    expert_cache: str
    hardware: str
    rate_per_s: float | None


def rate_text(rate_per_s: float | None) -> str:
    """A rate as it is written on the command line: 0.5, 2."""
    return "" if rate_per_s is None else repr(rate_per_s).removesuffix(".0")


def cell_parts(keys: Iterable[CellKey]) -> list[tuple[str, ...]]:
    """Per cell its policy and cache, and its hardware and rate where the cells differ in them."""
    keys = list(keys)
    hardware = len({key.hardware for key in keys}) > 1
    rates = len({key.rate_per_s for key in keys}) > 1
    return [
        (
            key.policy,
            key.expert_cache,
            *((key.hardware,) if hardware else ()),
            *((f"{rate_text(key.rate_per_s)}/s",) if rates else ()),
        )
        for key in keys
    ]


def cell_name(*parts: str) -> str:
    """The folder of a cell: `finemoe-24GB`, `finemoe-24GB-h100-0.5rps`."""
    text = "-".join(parts)
    if text.endswith("/s"):
        text = f"{text.removesuffix('/s')}rps"
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", text)


def cell_names(keys: Iterable[CellKey]) -> tuple[str, ...]:
    """The folders of all cells of a grid, in their order."""
    return tuple(cell_name(*parts) for parts in cell_parts(keys))


def cell_labels(keys: Iterable[CellKey]) -> tuple[str, ...]:
    """All cells of a grid as people read them: `finemoe 24GB h100 0.5/s`."""
    return tuple(" ".join(parts) for parts in cell_parts(keys))

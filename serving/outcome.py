"""What a cell of a grid gives, simulated or real, and the figures of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .metrics import CellSummary, summarize
from .slo import parse_slo
from .timeseries import time_series

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from .grid import Cell
    from .logs import IterationLog, RequestLog
    from .settings import RunSettings


@dataclass(frozen=True)
class Progress:
    """How far a cell is. `run_s`: seconds of the cell's own clock, simulated or real."""

    run_s: float
    iterations: int
    finished: int
    requests: int


@dataclass(frozen=True)
class CellOutcome:
    """What happened in one cell. `per_layer`: int64[2, L] (prefill, decode) of activated, hits and late.

    The logs and decisions hold the whole run of `run_s` seconds; counters, layers and busy times the last
    `counted_s` seconds, from the admission of the first request that is no warm-up. `decisions` is None where
    none were kept or they were given to `on_decisions`.
    """

    requests: RequestLog
    iterations: IterationLog
    counters: dict[str, int]
    per_layer: dict[str, NDArray[np.int64]]
    decisions: pa.Table | None
    memory_bytes: dict[str, int]
    busy_s: dict[str, float]
    run_s: float
    counted_s: float
    notes: tuple[str, ...]


def counted(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """The core's counters between two readings; prefetches left unused at the end are wasted."""
    counters = {name: value - before[name] for name, value in now.items()}
    counters["wasted_bytes"] += now["unused_bytes"]
    del counters["unused_bytes"]
    return counters


def summary_of(
    cell: Cell,
    outcome: CellOutcome,
    settings: RunSettings,
    *,
    devices: int,
    wall_s: float,
    notes: tuple[str, ...],
    ttft_defined: bool = True,
) -> CellSummary:
    """The figures of a finished cell. A real one has no simulated seconds."""
    return summarize(
        key=cell.key,
        expert_cache_bytes=cell.expert_cache_bytes,
        requests=outcome.requests,
        iterations=outcome.iterations,
        counters=outcome.counters,
        per_layer=outcome.per_layer,
        memory_bytes=outcome.memory_bytes,
        busy_s=outcome.busy_s,
        devices=devices,
        simulated_s=outcome.run_s if settings.backend == "sim" else None,
        counted_s=outcome.counted_s,
        wall_s=wall_s,
        max_num_seqs=settings.max_num_seqs,
        hit_rate_defined=cell.system.hit_rate_defined,
        offline=settings.offline,
        ttft_defined=ttft_defined,
        slo=() if settings.slo is None else parse_slo(settings.slo),
        notes=tuple(dict.fromkeys(notes)),
    )


def series_of(cell: Cell, outcome: CellOutcome, devices: int) -> pa.Table:
    """What a finished cell looked like over time."""
    return time_series(
        outcome.requests,
        outcome.iterations,
        simulated_s=outcome.run_s,
        devices=devices,
        hit_rate_defined=cell.system.hit_rate_defined,
    )

"""timeseries.parquet: what a run looked like over time, in bins of one second.

Queue and batch are exact integrals of steps. What happens within an iteration is spread evenly over it, and
link time between two readings over the time between them, so that the bins add up to the run's totals and no
share exceeds 1. The last bin ends with the run; beyond a million seconds the bins are wider.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .logs import IterationLog, RequestLog

if TYPE_CHECKING:
    import pyarrow
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST_BINS = 1_000_000
_SLIVER = 1e-6  # of a bin: a shorter rest joins the bin before it


def bin_edges(simulated_s: float) -> Floats:
    """Edges of the bins in seconds, float64[n + 1]; one bin for a run without duration."""
    width_s = 1.0
    while simulated_s > MOST_BINS * width_s:
        width_s *= 10.0
    count = max(1, math.ceil(simulated_s / width_s - _SLIVER))
    edges: Floats = np.arange(count + 1, dtype=np.float64) * width_s
    edges[-1] = simulated_s
    return edges


def time_series(
    requests: RequestLog,
    iterations: IterationLog,
    *,
    simulated_s: float,
    devices: int,
    hit_rate_defined: bool,
) -> pyarrow.Table:
    """One row per bin, warm-up included.

    time_s: its beginning; width_s; queue, batch: waiting and running requests, mean over the bin;
    activated: experts that gates activated; hit_rate: of these, null without any or where the system has
    none; output_tokens: that came out; link_busy (mean over devices), compute_busy, stall, search_wait:
    shares of the bin's time.
    """
    import pyarrow as pa

    edges = bin_edges(simulated_s)
    width_s = np.diff(edges)
    per_width = np.divide(1.0, width_s, out=np.zeros_like(width_s), where=width_s > 0.0)
    rows, steps = requests.table(), iterations.table()
    start_s, end_s = steps["start_s"], steps["end_s"]
    knots_s = np.concatenate(([0.0], np.ravel((start_s, end_s), order="F")))

    def spread(amounts: Floats) -> Floats:
        """Amounts per iteration as sums per bin."""
        sums = np.concatenate(([0.0], np.cumsum(amounts, dtype=np.float64)))
        return _between(edges, knots_s, np.repeat(sums, 2)[:-1])

    def share(amounts_s: Floats) -> Floats:
        return np.minimum(amounts_s * per_width, 1.0)  # a rounding above 1 at most

    arrived, admitted, finished = (
        _since(edges, rows[name]) for name in ("arrival_s", "admitted_s", "finished_s")
    )
    activated, hits = spread(steps["activated"]), spread(steps["hits"])
    known = (activated > 0.0) & hit_rate_defined
    hit_rate = np.divide(hits, activated, out=np.zeros_like(hits), where=known)
    links_s = np.ravel((steps["link_busy_start_s"], steps["link_busy_end_s"]), order="F")
    links_s = np.concatenate(([0.0], links_s))
    columns = {
        "time_s": edges[:-1],
        "width_s": width_s,
        "queue": np.maximum(arrived - admitted, 0.0) * per_width,
        "batch": np.maximum(admitted - finished, 0.0) * per_width,
        "activated": activated,
        "hit_rate": pa.array(np.minimum(hit_rate, 1.0), mask=~known),
        "output_tokens": np.bincount(
            _bin_of(edges, end_s), weights=steps["batch"], minlength=len(width_s)
        ).astype(np.int64),
        "link_busy": share(_between(edges, knots_s, links_s) / devices),
        "compute_busy": share(spread(steps["compute_s"])),
        "stall": share(spread(steps["stall_s"])),
        "search_wait": share(spread(steps["search_wait_s"])),
    }
    return pa.table(columns)


def _between(edges: Floats, knots_s: Floats, sums: Floats) -> Floats:
    """Growth from edge to edge of what has the value `sums` at `knots_s` and is straight in between."""
    grown: Floats = np.maximum(np.diff(np.interp(edges, knots_s, sums)), 0.0)
    return grown


def _bin_of(edges: Floats, times_s: Floats) -> NDArray[np.intp]:
    """The bin of each moment; an edge belongs to the bin that begins there, the run's end to the last."""
    return np.minimum(np.searchsorted(edges, times_s, side="right") - 1, len(edges) - 2)


def _since(edges: Floats, times_s: Floats) -> Floats:
    """Per bin, the time within it that has passed since each moment before its end, summed over these."""
    bins, count = _bin_of(edges, times_s), len(edges) - 1
    events = np.bincount(bins, minlength=count)
    within = np.bincount(bins, weights=edges[bins + 1] - times_s, minlength=count)
    earlier = np.cumsum(events) - events
    return np.asarray(within + earlier * np.diff(edges), np.float64)

"""Describe a request trace, and convert one to Parquet."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import TraceError
from .files import check_replaceable, partial_of, unwritable
from .request_cells import Int64s
from .request_files import EVIDENCE_KEY, SYNTHETIC
from .request_formats import AZURE, SECOND
from .requests import RequestBatch, RequestTrace, open_requests

QUANTILE_GRID = (0.0, 0.01, *(step / 20 for step in range(1, 20)), 0.99, 0.995, 0.999, 0.9999, 1.0)
"""The probabilities at which `Distribution.quantiles` are given."""

GAP_LAGS = (1, 10, 100)
"""The distances, in requests, of `TraceInfo.gap_rank_correlation`."""


class Distribution(msgspec.Struct, frozen=True):
    """Mean, quantiles (interpolated linearly) at QUANTILE_GRID, and the usual ones by name."""

    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float
    quantiles: tuple[float, ...]


class TraceInfo(msgspec.Struct, frozen=True):
    """Statistics of a request trace.

    `span_s` is first to last arrival, `rate_per_s` (n − 1)/span, `gap_cv` standard deviation / mean of the
    gaps between arrivals; `gap_rank_correlation` Spearman's ρ between gaps GAP_LAGS requests apart,
    `length_rank_correlation` that between prompt and output tokens. None where the trace is too short, or
    has no spread, for the figure to exist.
    """

    path: str
    format: str
    container: str
    synthetic: bool
    requests: int
    span_s: float
    rate_per_s: float | None
    gap_cv: float | None
    gap_s: Distribution | None
    gap_rank_correlation: tuple[float | None, ...]
    prompt_tokens: Distribution
    output_tokens: Distribution
    length_rank_correlation: float | None


def trace_info(path: str | Path, *, sort: bool = False) -> TraceInfo:
    """Read a trace and describe it. Keeps its columns in memory (32 bytes a request), for exact quantiles."""
    trace = open_requests(path, sort=sort)
    summary = _Summary()
    for batch in trace.batches():
        summary.add(batch)
    return summary.result(trace)


def convert_requests(src: str | Path, dst_parquet: str | Path, *, sort: bool = False) -> TraceInfo:
    """Write a trace as Parquet with Azure's columns and describe it.

    `TIMESTAMP` is timestamp[ns] (counted from 1970 where the source has no dates), `ContextTokens` and
    `GeneratedTokens` are int64; other columns are dropped; the SYNTHETIC label is kept. `dst_parquet` is
    replaced in one step when all is written: on any failure it stays as it was. Raises TraceError for a bad
    source, and for a destination that exists and is not a Parquet file.
    """
    trace = open_requests(src, sort=sort)
    dst = Path(dst_parquet)
    with suppress(OSError):  # absent, or a name that check_replaceable refuses
        if dst.samefile(trace.path):
            raise TraceError(dst, "source and destination are the same file.", remedy="Choose another name.")
    check_replaceable(dst)
    summary = _Summary()
    metadata = {EVIDENCE_KEY: SYNTHETIC.encode()} if trace.synthetic else {}
    partial = partial_of(dst)
    try:
        with partial.open("xb") as file, pq.ParquetWriter(file, parquet_schema(metadata)) as writer:
            for batch in trace.batches(rows=65_536):
                summary.add(batch)
                writer.write_table(parquet_table(batch, metadata))
        info = summary.result(trace)
        os.replace(partial, dst)
    except OSError as error:
        raise unwritable(dst, error) from error
    finally:
        with suppress(OSError):  # the usual case: it was moved, or could not be created
            partial.unlink()
    return info


def parquet_schema(metadata: dict[bytes, bytes]) -> pa.Schema:
    """Azure's columns, with schema metadata."""
    types = (pa.timestamp("ns"), pa.int64(), pa.int64())
    return pa.schema(list(zip(AZURE.columns, types, strict=True)), metadata=metadata)


def parquet_table(batch: RequestBatch, metadata: dict[bytes, bytes]) -> pa.Table:
    """A batch as a table of that schema."""
    ticks = pa.array(batch.ticks).cast(pa.timestamp("ns"))
    columns = [ticks, pa.array(batch.prompt_tokens), pa.array(batch.output_tokens)]
    return pa.table(columns, schema=parquet_schema(metadata))


class _Summary:
    """Collects the columns of a trace batch by batch."""

    def __init__(self) -> None:
        self._batches: list[RequestBatch] = []

    def add(self, batch: RequestBatch) -> None:
        self._batches.append(batch)

    def result(self, trace: RequestTrace) -> TraceInfo:
        ticks = np.concatenate([batch.ticks for batch in self._batches])
        prompts = np.concatenate([batch.prompt_tokens for batch in self._batches])
        outputs = np.concatenate([batch.output_tokens for batch in self._batches])
        self._batches.clear()
        span_s = (int(ticks[-1]) - int(ticks[0])) / SECOND
        gaps = np.diff(ticks)
        gap_s = _distribution(gaps / SECOND) if len(gaps) else None
        return TraceInfo(
            path=str(trace.path),
            format=trace.format,
            container=trace.layout.container,
            synthetic=trace.synthetic,
            requests=len(ticks),
            span_s=span_s,
            rate_per_s=len(gaps) / span_s if span_s > 0 else None,
            gap_cv=float(gaps.std() / gaps.mean()) if span_s > 0 else None,
            gap_s=gap_s,
            gap_rank_correlation=tuple(_rank_correlation(gaps[:-lag], gaps[lag:]) for lag in GAP_LAGS),
            prompt_tokens=_distribution(prompts),
            output_tokens=_distribution(outputs),
            length_rank_correlation=_rank_correlation(prompts, outputs),
        )


def _distribution(values: npt.NDArray[Any]) -> Distribution:
    quantiles = dict(zip(QUANTILE_GRID, np.quantile(values, QUANTILE_GRID).tolist(), strict=True))
    return Distribution(
        mean=float(values.mean()),
        min=quantiles[0.0],
        p50=quantiles[0.5],
        p90=quantiles[0.9],
        p99=quantiles[0.99],
        max=quantiles[1.0],
        quantiles=tuple(quantiles.values()),
    )


def _ranks(values: Int64s) -> npt.NDArray[np.float64]:
    """Ranks from 0, equal values sharing the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(count) - (count + 1) / 2
    shared: npt.NDArray[np.float64] = middle[place]
    return shared


def _rank_correlation(left: Int64s, right: Int64s) -> float | None:
    """Spearman's ρ; None where a side has fewer than two different values."""
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    return float(np.corrcoef(_ranks(left), _ranks(right))[0, 1])

"""Describe a request trace, and convert one to Parquet."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import TraceError
from .files import check_replaceable, replacing, unwritable
from .request_cells import Int64s
from .request_conversations import LENGTH_RULE
from .request_files import (
    ARRIVALS_KEY,
    ASSUMED,
    EVIDENCE_KEY,
    FORMAT_KEY,
    LENGTHS_KEY,
    NO_ARRIVALS,
    SYNTHETIC,
)
from .request_formats import AZURE, AZURE_UNTIMED, SECOND
from .request_trace import RequestBatch, RequestTrace, open_requests

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

    `format` is the format's name, also of a copy that `convert_requests` made. `left_out` rows hold no
    request, for `left_out_reason`. `lengths_estimated`: token counts are ASSUMED, from the text's length.
    `span_s` is first to last arrival, `rate_per_s` (n − 1)/span, `gap_cv` standard deviation / mean of the
    gaps between arrivals; `gap_rank_correlation` Spearman's ρ between gaps GAP_LAGS requests apart,
    `length_rank_correlation` that between prompt and output tokens. None where the trace has no arrival
    times, is too short, or has no spread, for the figure to exist.
    """

    path: str
    format: str
    container: str
    synthetic: bool
    has_arrivals: bool
    lengths_estimated: bool
    has_prompts: bool
    requests: int
    left_out: int
    left_out_reason: str
    span_s: float | None
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

    `TIMESTAMP` is timestamp[ns] (counted from 1970 where the source has no dates, absent where it has no
    arrival times), `ContextTokens` and `GeneratedTokens` are int64, `prompt` is the text where the source has
    it; other columns are dropped. The schema's metadata keep what the copy would not show: the format, and
    the labels SYNTHETIC and ASSUMED. `dst_parquet` is replaced in one step when all is written: on any
    failure it stays as it was. Raises TraceError for a bad source, and for a destination that exists and is
    not a Parquet file.
    """
    trace = open_requests(src, sort=sort)
    dst = Path(dst_parquet)
    with suppress(OSError):  # absent, or a name that check_replaceable refuses
        if dst.samefile(trace.path):
            raise TraceError(dst, "source and destination are the same file.", remedy="Choose another name.")
    check_replaceable(dst)
    summary = _Summary()
    schema = parquet_schema(_labels(trace), timed=trace.has_arrivals, prompts=trace.has_prompts)
    try:
        with replacing(dst) as partial:
            with partial.open("xb") as file, pq.ParquetWriter(file, schema) as writer:
                for batch in trace.batches(rows=65_536, prompts=True):
                    summary.add(replace(batch, prompts=None))
                    if len(batch):
                        writer.write_table(parquet_table(batch, schema))
            info = summary.result(trace)
    except OSError as error:
        raise unwritable(dst, error) from error
    return info


def parquet_schema(metadata: dict[bytes, bytes], *, timed: bool = True, prompts: bool = False) -> pa.Schema:
    """Azure's columns, with schema metadata; without times, and with prompts, where so wanted."""
    fields = [(AZURE.time, pa.timestamp("ns"))] if timed else []
    fields += [(name, pa.int64()) for name in AZURE_UNTIMED.columns]
    fields += [(AZURE.text, pa.large_string())] if prompts else []
    return pa.schema(fields, metadata=metadata)


def parquet_table(batch: RequestBatch, schema: pa.Schema) -> pa.Table:
    """A batch as a table of such a schema."""
    columns = {
        AZURE.time: pa.array(batch.ticks).cast(pa.timestamp("ns")),
        AZURE.prompt: pa.array(batch.prompt_tokens),
        AZURE.output: pa.array(batch.output_tokens),
        AZURE.text: batch.prompts,
    }
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _labels(trace: RequestTrace) -> dict[bytes, bytes]:
    labels = {FORMAT_KEY: trace.format.encode()}
    if trace.synthetic:
        labels[EVIDENCE_KEY] = SYNTHETIC.encode()
    if not trace.has_arrivals:
        labels[ARRIVALS_KEY] = NO_ARRIVALS
    if trace.lengths_estimated:
        labels[LENGTHS_KEY] = ASSUMED + f": {LENGTH_RULE}".encode()
    return labels


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
        left_out = sum(batch.left_out for batch in self._batches)
        self._batches.clear()
        span_s = (int(ticks[-1]) - int(ticks[0])) / SECOND
        gaps = np.diff(ticks) if trace.has_arrivals else ticks[:0]
        gap_s = _distribution(gaps / SECOND) if len(gaps) else None
        return TraceInfo(
            path=str(trace.path),
            format=trace.format,
            container=trace.layout.container,
            synthetic=trace.synthetic,
            has_arrivals=trace.has_arrivals,
            lengths_estimated=trace.lengths_estimated,
            has_prompts=trace.has_prompts,
            requests=len(ticks),
            left_out=left_out,
            left_out_reason=trace.form.left_out if left_out else "",
            span_s=span_s if trace.has_arrivals else None,
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

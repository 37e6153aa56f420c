"""Request traces: when each request arrives, and how many prompt and output tokens it has.

    trace = open_requests("AzureLLMInferenceTrace_conv.csv")
    for request in select_requests(trace, num_requests=256): ...

Formats are told apart by their columns (`request_formats`), containers by their first bytes
(`request_files`).
Everything streams, except with `sort=True`, which keeps the columns in memory (32 bytes a request).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import SettingError, TraceError
from .request_cells import MAX_TOKENS, Fault, Int64s, read_counts, read_ticks, show
from .request_files import Layout, inspect, read_cells
from .request_formats import SECOND, RequestFormat, recognise

MAX_SPAN_S = 1e9
"""The last arrival, in seconds: a double still holds it to 0.1 µs."""


class Request(msgspec.Struct, frozen=True):
    """One request. `index` is its place in the whole trace (0-based, after sorting)."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class RequestBatch:
    """Columns of consecutive requests: `arrival_s` (f64, seconds from the first request of the trace),
    `prompt_tokens` and `output_tokens` (i64), and `ticks`, the file's own time in nanoseconds (i64; since
    1970 where the file has dates)."""

    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: Int64s
    output_tokens: Int64s
    ticks: Int64s

    def __len__(self) -> int:
        return len(self.ticks)


@dataclass(frozen=True)
class RequestTrace:
    """An opened request trace. `synthetic`: the file is labelled SYNTHETIC (Parquet schema metadata
    `finemoe.evidence`, or a CSV comment line before the header). Nothing is kept open between reads."""

    path: Path
    form: RequestFormat
    layout: Layout
    sort: bool

    @property
    def format(self) -> str:
        """azure, vidur or mooncake."""
        return self.form.name

    @property
    def synthetic(self) -> bool:
        """Whether the file is labelled SYNTHETIC."""
        return self.layout.synthetic

    def batches(self, rows: int = 8192) -> Iterator[RequestBatch]:
        """Read from the beginning, in batches of at most `rows` requests, each validated when it is reached.

        Raises TraceError naming the first bad row, also for a trace without requests.
        """
        if rows < 1:
            raise SettingError(f"rows = {rows}: a batch has at least one request.")
        return self._sorted(rows) if self.sort else self._checked(rows, ordered=True)

    def _checked(self, rows: int, *, ordered: bool) -> Iterator[RequestBatch]:
        done = 0
        first = last = None
        for cells in read_cells(self.path, self.layout, self.form.columns, rows):
            ticks, time_fault = read_ticks(cells[0], self.form.ticks_per_unit)
            prompts, prompt_fault = read_counts(cells[1])
            outputs, output_fault = read_counts(cells[2])
            if ordered:
                time_fault = _backward(ticks, last, cells[0]) or time_fault
            faults = zip(self.form.columns, (time_fault, prompt_fault, output_fault), strict=True)
            found = [(fault.row, column, fault) for column, fault in faults if fault]
            if found:
                row, column, fault = min(found, key=lambda entry: entry[0])
                place = f"row {done + row + 1}, column {column}"
                raise TraceError(self.path, fault.problem, place=place, remedy=fault.remedy)
            first = int(ticks[0]) if first is None else first
            last = int(ticks[-1])
            done += len(ticks)
            yield RequestBatch(_seconds(ticks, first), prompts, outputs, ticks)
        if not done:
            raise TraceError(
                self.path,
                "no requests: there are no rows after the header.",
                place="row 1",
                remedy="Give a trace with at least one request.",
            )

    def _sorted(self, rows: int) -> Iterator[RequestBatch]:
        parts = list(self._checked(rows, ordered=False))
        ticks = np.concatenate([part.ticks for part in parts])
        order = np.argsort(ticks, kind="stable")
        ticks = ticks[order]
        prompts = np.concatenate([part.prompt_tokens for part in parts])[order]
        outputs = np.concatenate([part.output_tokens for part in parts])[order]
        del parts
        for begin in range(0, len(ticks), rows):
            piece = slice(begin, begin + rows)
            yield RequestBatch(
                _seconds(ticks[piece], int(ticks[0])), prompts[piece], outputs[piece], ticks[piece]
            )


def open_requests(path: str | Path, *, sort: bool = False) -> RequestTrace:
    """Recognise a request trace by its content and columns; the rows are validated when they are read.

    `sort` accepts time stamps that go backward: requests are put in order of arrival, equal ones in file
    order.
    Raises TraceError for a file that is missing, empty, damaged or not a request trace.
    """
    path = Path(path)
    layout = inspect(path)
    return RequestTrace(path, recognise(path, layout.columns), layout, sort)


def select_requests(
    trace: RequestTrace,
    *,
    num_requests: int | None,
    start: int = 0,
    time_scale: float = 1.0,
    rate: float | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
) -> Iterator[Request]:
    """Stream `num_requests` requests (None: all) from place `start` on; the first one arrives at 0 s.

    A trace with fewer requests gives those it has; none at all is a TraceError. `time_scale` multiplies the
    arrival times (0.5: twice the load). `rate` instead scales them so that these very requests arrive at
    that mean rate in requests per second, (n − 1) / span: the trace keeps its bursts, and nothing is drawn
    at random. It costs a first pass over the selected requests. `prompt_tokens` and `output_tokens` replace
    the length of every request.
    Raises SettingError for a value out of range, for a last arrival beyond MAX_SPAN_S, and for `rate`
    together with `time_scale`.
    """
    _at_least("num_requests", num_requests, 1)
    _at_least("start", start, 0)
    _at_least("prompt_tokens", prompt_tokens, 1)
    _at_least("output_tokens", output_tokens, 1)
    _positive("time_scale", time_scale)
    if rate is not None:
        _positive("rate", rate)
        if time_scale != 1.0:
            raise SettingError(f"rate = {rate:g} and time_scale = {time_scale:g}: give one of them.")
    return _select(trace, num_requests, start, time_scale, rate, prompt_tokens, output_tokens)


def _select(
    trace: RequestTrace,
    num_requests: int | None,
    start: int,
    time_scale: float,
    rate: float | None,
    prompt_tokens: int | None,
    output_tokens: int | None,
) -> Iterator[Request]:
    scale = time_scale if rate is None else _scale_to_rate(trace, num_requests, start, rate)
    index = start
    origin: int | None = None
    for batch in _window(trace, num_requests, start):
        origin = int(batch.ticks[0]) if origin is None else origin
        seconds = _seconds(batch.ticks, origin)
        last_s = float(seconds[-1]) * scale
        if not last_s <= MAX_SPAN_S:  # true for NaN too
            given = f"--time-scale is {time_scale:g}" if rate is None else f"--rate is {rate:g}"
            wanted = "smaller" if rate is None else "greater"
            raise SettingError(
                f"{given}: request {index + len(batch) - 1} of {trace.path} would arrive at {last_s:g} s; "
                f"at most {MAX_SPAN_S:g} s are possible. Give a {wanted} one."
            )
        arrivals = (seconds * scale).tolist()
        for arrival_s, prompt, output in zip(
            arrivals, batch.prompt_tokens.tolist(), batch.output_tokens.tolist(), strict=True
        ):
            yield Request(index, arrival_s, prompt_tokens or prompt, output_tokens or output)
            index += 1


def _window(trace: RequestTrace, num_requests: int | None, start: int) -> Iterator[RequestBatch]:
    """The batches of the selected requests, cut at both ends. Nothing is read beyond the last one's batch."""
    seen = 0
    stop = math.inf if num_requests is None else start + num_requests
    for batch in trace.batches():
        begin, end = max(start - seen, 0), int(min(stop - seen, len(batch)))
        seen += len(batch)
        if begin < end:
            piece = slice(begin, end)
            yield RequestBatch(
                batch.arrival_s[piece],
                batch.prompt_tokens[piece],
                batch.output_tokens[piece],
                batch.ticks[piece],
            )
        if seen >= stop:
            return
    if seen <= start:
        raise TraceError(
            trace.path,
            f"nothing to select: start = {start}, but the trace has {seen} requests.",
            remedy=f"Start below {seen}.",
        )


def _scale_to_rate(trace: RequestTrace, num_requests: int | None, start: int, rate: float) -> float:
    batches = _window(trace, num_requests, start)
    first = last = next(batches)
    count = len(first)
    for last in batches:
        count += len(last)
    span_s = (int(last.ticks[-1]) - int(first.ticks[0])) / SECOND
    if span_s > 0:
        return (count - 1) / span_s / rate
    if count == 1:
        return 1.0  # one request arrives at 0 s at any rate
    raise SettingError(f"rate = {rate:g}: the {count} selected requests of {trace.path} all arrive at once.")


def _backward(ticks: Int64s, last: int | None, cells: Any) -> Fault | None:
    """The first time stamp before its predecessor; `last` is the one before this batch."""
    before = np.concatenate([[ticks[0] if last is None else last], ticks[:-1]]) if len(ticks) else ticks
    late = np.flatnonzero(ticks < before)
    if not len(late):
        return None
    row = int(late[0])
    back_s = (int(before[row]) - int(ticks[row])) / SECOND
    return Fault(
        row,
        f"the time goes back by {back_s:.9g} s ({show(cells[row])}).",
        "Sort the file by time, or pass --sort (sort=True).",
    )


def _seconds(ticks: Int64s, origin: int) -> npt.NDArray[np.float64]:
    # The difference is taken in integers: a double holds seconds since 1970 to 0.2 µs only.
    seconds: npt.NDArray[np.float64] = (ticks - origin) / SECOND
    return seconds


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and not least <= value <= MAX_TOKENS:
        raise SettingError(f"{name} = {value}: must be {least} to {MAX_TOKENS}.")


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise SettingError(f"{name} = {value:g}: must be positive and finite.")

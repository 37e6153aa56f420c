"""An opened request trace: its columns, streamed and validated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import SettingError, TraceError
from .request_cells import Fault, Int64s, check_constant, read_counts, read_texts, read_ticks, show
from .request_conversations import read_exchanges
from .request_files import Layout, inspect, read_cells
from .request_formats import (
    FORMATS,
    SECOND,
    ColumnFormat,
    ConversationFormat,
    RequestFormat,
    optional_columns,
    recognise,
)

_TEXT_ROWS = 1024  # rows of a batch that holds texts: its memory should stay small


@dataclass(frozen=True)
class RequestBatch:
    """Columns of consecutive requests: `arrival_s` (f64, seconds from the first request of the trace; 0 in a
    trace without arrival times), `prompt_tokens` and `output_tokens` (i64), and `ticks`, the file's own time
    in nanoseconds (i64; since 1970 where the file has dates).

    `prompts` (large_string) are there when they were asked for and the file has them. `left_out` counts the
    rows left out since the batch before; with any so far, `rows` has the place in the file of each request.
    A batch is empty where all its rows were left out.
    """

    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: Int64s
    output_tokens: Int64s
    ticks: Int64s
    prompts: pa.Array | None = None
    left_out: int = 0
    rows: Int64s | None = None

    def __len__(self) -> int:
        return len(self.ticks)

    def take(self, places: Int64s) -> RequestBatch:
        """The requests at these places of the batch."""
        return RequestBatch(
            self.arrival_s[places],
            self.prompt_tokens[places],
            self.output_tokens[places],
            self.ticks[places],
            None if self.prompts is None else self.prompts.take(pa.array(places)),
            self.left_out,
            None if self.rows is None else self.rows[places],
        )


@dataclass(frozen=True)
class RequestTrace:
    """An opened request trace. Nothing is kept open between reads.

    `sort` is whether to put requests in order of arrival, which keeps the columns in memory.
    """

    path: Path
    form: RequestFormat
    layout: Layout
    sort: bool

    @property
    def format(self) -> str:
        """Name of the format, as azure or sharegpt; of a converted trace, of the one it came from."""
        return self.layout.source if self.layout.source in _NAMES else self.form.name

    @property
    def synthetic(self) -> bool:
        """Whether the file is labelled SYNTHETIC, in Parquet's metadata or a CSV's opening comment."""
        return self.layout.synthetic

    @property
    def has_arrivals(self) -> bool:
        """Whether the trace says when its requests arrive."""
        return isinstance(self.form, ColumnFormat) and bool(self.form.time)

    @property
    def lengths_estimated(self) -> bool:
        """Whether token counts were estimated from text (`request_conversations.LENGTH_RULE`), so ASSUMED."""
        return isinstance(self.form, ConversationFormat) or self.layout.estimated

    @property
    def has_prompts(self) -> bool:
        """Whether the trace holds the prompts' text."""
        return isinstance(self.form, ConversationFormat) or (
            self.form.text != "" and self.form.text in self.layout.columns
        )

    def batches(self, rows: int = 8192, *, prompts: bool = False) -> Iterator[RequestBatch]:
        """Read from the beginning, in batches of at most `rows` requests, each validated when it is reached.

        `prompts` reads the prompts' text too. Raises TraceError naming the first bad row, also for a trace
        without requests.
        """
        if rows < 1:
            raise SettingError(f"rows = {rows}: a batch has at least one request.")
        prompts = prompts and self.has_prompts
        if self.sort and self.has_arrivals:
            return self._sorted(rows, prompts)
        return self._checked(rows, prompts, ordered=True)

    def _checked(self, rows: int, prompts: bool, *, ordered: bool) -> Iterator[RequestBatch]:
        done = kept = 0
        first = last = None
        for part in self._parts(rows, prompts):
            ticks, faults = part.ticks, part.faults
            if ordered and self.has_arrivals:
                backward = _backward(ticks, last, part.times)
                faults = [(self.form.columns[0], backward), *faults] if backward else faults
            if faults:
                column, fault = min(faults, key=lambda entry: entry[1].row)
                place = f"row {done + fault.row + 1}, column {column}{fault.path}"
                raise TraceError(self.path, fault.problem, place=place, remedy=fault.remedy)
            last = int(ticks[-1]) if len(ticks) else last
            places = np.flatnonzero(part.keep)
            first = int(ticks[places[0]]) if first is None and len(places) else first
            batch = RequestBatch(
                _seconds(ticks, first or 0), part.prompt_tokens, part.output_tokens, ticks, part.prompts
            )
            if self.form.left_out:
                left_out = len(ticks) - len(places)
                batch = replace(batch.take(places), left_out=left_out, rows=done + places)
            done += len(ticks)
            kept += len(places)
            yield batch
        if not kept:
            raise _no_requests(self.path, self.form.left_out, done)

    def _parts(self, rows: int, prompts: bool) -> Iterator[_Part]:
        form = self.form
        if isinstance(form, ConversationFormat):
            for (cells,) in read_cells(self.path, self.layout, form.columns, min(rows, _TEXT_ROWS)):
                yield _read_conversations(form, cells, prompts)
            return
        names = (*form.columns, *optional_columns(form, self.layout.columns, prompts=prompts))
        rows = min(rows, _TEXT_ROWS) if prompts else rows
        for columns in read_cells(self.path, self.layout, names, rows, form.text if prompts else ""):
            yield _read_columns(form, dict(zip(names, columns, strict=True)))

    def _sorted(self, rows: int, prompts: bool) -> Iterator[RequestBatch]:
        parts = [part for part in self._checked(rows, prompts, ordered=False) if len(part) or part.left_out]
        left_out = sum(part.left_out for part in parts)
        ticks = np.concatenate([part.ticks for part in parts])
        order = np.argsort(ticks, kind="stable")
        ticks = ticks[order]
        prompt_tokens = np.concatenate([part.prompt_tokens for part in parts])[order]
        output_tokens = np.concatenate([part.output_tokens for part in parts])[order]
        texts = pa.chunked_array([part.prompts for part in parts]).take(pa.array(order)) if prompts else None
        del parts
        for begin in range(0, len(ticks), rows):
            piece = slice(begin, begin + rows)
            yield RequestBatch(
                _seconds(ticks[piece], int(ticks[0])),
                prompt_tokens[piece],
                output_tokens[piece],
                ticks[piece],
                None if texts is None else texts.slice(begin, rows).combine_chunks(),
                0 if begin else left_out,
            )


_NAMES = frozenset(form.name for form in FORMATS)


def open_requests(path: str | Path, *, sort: bool = False) -> RequestTrace:
    """Recognise a request trace by its content and columns; the rows are validated when they are read.

    `sort` accepts time stamps that go backward: requests are put in order of arrival, equal ones in file
    order.
    Raises TraceError for a file that is missing, empty, damaged or not a request trace.
    """
    path = Path(path)
    layout = inspect(path)
    return RequestTrace(path, recognise(path, layout), layout, sort)


@dataclass(frozen=True)
class _Part:
    """The columns of consecutive rows before any is left out. With faults, the columns may end early."""

    ticks: Int64s
    prompt_tokens: Int64s
    output_tokens: Int64s
    prompts: pa.Array | None
    keep: npt.NDArray[np.bool_]
    faults: list[tuple[str, Fault]]
    times: pa.Array | None = None  # as written


def _read_columns(form: ColumnFormat, cells: dict[str, pa.Array]) -> _Part:
    faults: list[tuple[str, Fault | None]] = []
    least = 0 if form.zero_tokens else 1
    prompt_tokens, prompt_fault = read_counts(cells[form.prompt], least)
    output_tokens, output_fault = read_counts(cells[form.output], least)
    if form.time:
        ticks, time_fault = read_ticks(cells[form.time], form.ticks_per_unit)
        faults.append((form.time, time_fault))
    else:
        ticks = np.zeros(len(cells[form.prompt]), np.int64)
    faults += [(form.prompt, prompt_fault), (form.output, output_fault)]
    for constant in form.constants:
        if constant.column in cells:
            fault = check_constant(cells[constant.column], constant.value, constant.problem, constant.remedy)
            faults.append((constant.column, fault))
    texts = None
    if form.text in cells:
        texts, text_fault = read_texts(cells[form.text])
        faults.append((form.text, text_fault))
    found = [(column, fault) for column, fault in faults if fault]
    keep = np.ones(0, np.bool_) if found else (prompt_tokens > 0) & (output_tokens > 0)
    return _Part(ticks, prompt_tokens, output_tokens, texts, keep, found, cells.get(form.time))


def _read_conversations(form: ConversationFormat, cells: pa.Array, prompts: bool) -> _Part:
    prompt_tokens, output_tokens, texts, keep, fault = read_exchanges(cells, form.turn)
    column = pa.array(texts, pa.large_string()) if prompts else None
    ticks = np.zeros(len(prompt_tokens), np.int64)
    faults = [(form.column, fault)] if fault else []
    return _Part(ticks, prompt_tokens, output_tokens, column, keep, faults)


def _no_requests(path: Path, left_out: str, rows: int) -> TraceError:
    if rows:
        return TraceError(
            path,
            f"no requests: all {rows} rows are left out, as {left_out}.",
            remedy="Give a trace with at least one request.",
        )
    return TraceError(
        path,
        "no requests: there are no rows after the header.",
        place="row 1",
        remedy="Give a trace with at least one request.",
    )


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

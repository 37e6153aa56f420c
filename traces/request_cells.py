"""Convert the cells of a request trace to integers: token counts, and times in nanoseconds ("ticks").

Each column goes through Arrow at once where its cells look plain. Where one does not, the batch is read cell
by cell; that slow reading is the definition, accepts every spelling, and finds the first bad cell.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Int64s = npt.NDArray[np.int64]

MAX_TOKENS = 2**31
_MAX_TICKS = 2**63 - 1

_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", re.ASCII)
_DATE = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[ T]([0-9]{2}):([0-9]{2}):([0-9]{2})(\.[0-9]+)? ?"
    r"(Z|UTC|([+-])([0-9]{2}):?([0-9]{2}))?",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1)

# What Arrow is trusted to read just as the slow reading does.
_PLAIN_COUNT = "^[0-9]{1,10}$"
_PLAIN_DATE = r"^(19|20|21)[0-9]{2}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?"


@dataclass(frozen=True)
class Fault:
    """The first bad cell of a column: its row in the batch (0-based), what is wrong with it, what to do.

    `path` leads to the bad part of a cell that has parts, as "[0].value".
    """

    row: int
    problem: str
    remedy: str
    path: str = ""


class _BadCellError(Exception):
    """problem and remedy of one cell."""


def read_counts(cells: pa.Array, least: int = 1) -> tuple[Int64s, Fault | None]:
    """Token counts of `least` (0 or 1) to 2³¹. With a fault, the values before it."""
    return _read(
        cells, lambda plain: _counts_at_once(plain, least), lambda cell: _count(cell, allow_zero=least == 0)
    )


def check_constant(cells: pa.Array, value: int, problem: str, remedy: str) -> Fault | None:
    """The first cell that is anything but the number `value`."""
    counts = _counts_at_once(_decoded(cells), 0) if cells.null_count == 0 else None
    if counts is not None and np.all(counts == value):
        return None
    for row, cell in enumerate(cells):
        text = (_text(cell) or "").strip()
        if not _NUMBER.fullmatch(text) or Decimal(text) != value:
            return Fault(row, f"{problem} ({show(cell)}).", remedy)
    return None


def read_texts(cells: pa.Array) -> tuple[pa.Array, Fault | None]:
    """Texts (large_string), null where a cell is null or empty. With a fault, no texts at all."""
    cells = _decoded(cells)
    if is_text(cells.type) or pa.types.is_null(cells.type):
        try:
            # Through bytes: only that checks text that a Parquet file calls UTF-8.
            texts = cells.cast(pa.large_binary()).cast(pa.large_string())
            return pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts), None
        except pa.ArrowInvalid:
            bad = next(row for row, cell in enumerate(cells) if not _is_utf8(cell))
            return None, Fault(bad, f"the text is not UTF-8 ({show(cells[bad])}).", "Write it in UTF-8.")
    return None, Fault(
        0, f"the column holds {cells.type}, not text ({show(cells[0])}).", "Write text, or drop it."
    )


def read_ticks(cells: pa.Array, ticks_per_unit: int) -> tuple[Int64s, Fault | None]:
    """Times in nanoseconds: dates since 1970 (UTC where no zone is given), numbers times `ticks_per_unit`."""
    return _read(
        cells, lambda plain: _ticks_at_once(plain, ticks_per_unit), lambda cell: _tick(cell, ticks_per_unit)
    )


def _read(
    cells: pa.Array, at_once: Callable[[pa.Array], Int64s | None], one: Callable[[Any], int]
) -> tuple[Int64s, Fault | None]:
    cells = _decoded(cells)
    values = at_once(cells) if cells.null_count == 0 else None
    if values is not None:
        return values, None
    done: list[int] = []
    fault = None
    for row, cell in enumerate(cells):
        try:
            done.append(one(cell))
        except _BadCellError as bad:
            problem, remedy = bad.args
            fault = Fault(row, f"{problem} ({show(cell)}).", remedy)
            break
    return np.array(done, np.int64), fault


def _decoded(cells: pa.Array) -> pa.Array:
    return cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells


def _is_utf8(cell: Any) -> bool:
    try:
        value = cell.as_py()
        return not isinstance(value, bytes) or value.decode() is not None
    except UnicodeDecodeError:
        return False


def show(cell: Any) -> str:
    """A cell as the file has it, shortened."""
    value = _text(cell)
    return "empty" if value is None or not value.strip() else repr(value[:60])


def _text(cell: Any) -> str | None:
    """A cell as text: None where it is null."""
    if not cell.is_valid:
        return None
    if pa.types.is_timestamp(cell.type):
        return str(cell.cast(pa.string()))
    try:
        value = cell.as_py()
    except UnicodeDecodeError:
        value = cell.as_buffer().to_pybytes() if is_text(cell.type) else b"text that is not UTF-8"
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _looks(cells: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(cells, pattern), min_count=0).as_py())


def _integers(floats: npt.NDArray[np.float64]) -> Int64s:
    return floats.astype(np.int64)


def is_text(kind: pa.DataType) -> bool:
    """Whether cells of this type are text, as str or as bytes."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    )


# --- token counts ------------------------------------------------------------------------------------------


def _counts_at_once(cells: pa.Array, least: int) -> Int64s | None:
    kind = cells.type
    if is_text(kind):
        if not _looks(cells, _PLAIN_COUNT):
            return None
        values = cells.cast(pa.string()).cast(pa.int64()).to_numpy(zero_copy_only=False)
    elif pa.types.is_integer(kind) and kind != pa.uint64():
        values = cells.cast(pa.int64()).to_numpy(zero_copy_only=False)
    elif pa.types.is_floating(kind):
        floats = cells.cast(pa.float64()).to_numpy(zero_copy_only=False)
        if not np.all((floats == np.floor(floats)) & (floats <= MAX_TOKENS)):  # false for NaN too
            return None
        values = _integers(floats)
    else:
        return None
    return values if np.all((values >= least) & (values <= MAX_TOKENS)) else None


def _count(cell: Any, *, allow_zero: bool) -> int:
    number = _number(_text(cell), "a token count", "a positive whole number")
    if number < 0:
        raise _BadCellError("a negative token count", "Write a positive whole number.")
    if number == 0 and not allow_zero:
        raise _BadCellError("zero tokens", "Remove the row: a request needs a prompt and an output.")
    if number > MAX_TOKENS:
        raise _BadCellError(f"more than {MAX_TOKENS} tokens", "Check the unit of the column.")
    if number != int(number):
        raise _BadCellError("a fractional token count", "Write a positive whole number.")
    return int(number)


def _number(text: str | None, what: str, wanted: str) -> Decimal:
    plain = (text or "").strip()
    word = plain.lower().lstrip("+-")
    if word in ("", "nan", "null", "none", "na", "n/a"):
        raise _BadCellError(f"{what} is missing", f"Fill in {wanted}, or remove the row.")
    if word in ("inf", "infinity"):
        raise _BadCellError(f"{what} is infinite", f"Write {wanted}.")
    if not _NUMBER.fullmatch(plain):
        raise _BadCellError(f"{what} cannot be read", f"Write {wanted}.")
    return Decimal(plain)


# --- times -------------------------------------------------------------------------------------------------


def _ticks_at_once(cells: pa.Array, ticks_per_unit: int) -> Int64s | None:
    kind = cells.type
    if is_text(kind):
        return _text_ticks_at_once(cells, ticks_per_unit)
    if pa.types.is_timestamp(kind):
        try:
            ticks = cells.cast(pa.timestamp("ns", kind.tz)).cast(pa.int64())
        except pa.ArrowInvalid:
            return None
        values: Int64s = ticks.to_numpy(zero_copy_only=False)
        return values
    if pa.types.is_integer(kind) and kind != pa.uint64():
        units = cells.cast(pa.int64()).to_numpy(zero_copy_only=False)
        limit = _MAX_TICKS // ticks_per_unit
        if not np.all((units >= -limit) & (units <= limit)):
            return None
        scaled: Int64s = units * ticks_per_unit
        return scaled
    if pa.types.is_floating(kind):
        floats = cells.cast(pa.float64()).to_numpy(zero_copy_only=False)
        # Beyond 2^52 ticks (52 days) the product may be off by a tick; the slow reading is exact there.
        if not np.all(np.abs(floats) < 2**52 / ticks_per_unit):  # false for NaN too
            return None
        return _integers(np.rint(floats * ticks_per_unit))
    return None


def _text_ticks_at_once(cells: pa.Array, ticks_per_unit: int) -> Int64s | None:
    power = len(str(ticks_per_unit)) - 1  # units are powers of ten
    # At most 15 digits in ticks: a double holds such a number, and its product, to less than half a tick.
    if _looks(cells, rf"^[0-9]{{1,{15 - power}}}(\.[0-9]{{1,{power}}})?$"):
        numbers = cells.cast(pa.string()).cast(pa.float64()).to_numpy(zero_copy_only=False)
        return _integers(np.rint(numbers * ticks_per_unit))
    for zone, ending in ((None, "$"), ("UTC", "(Z|[+-][0-9]{2}:?[0-9]{2})$")):
        if _looks(cells, _PLAIN_DATE + ending):
            try:
                dates = cells.cast(pa.string()).cast(pa.timestamp("ns", zone)).cast(pa.int64())
            except pa.ArrowInvalid:  # the 30th of February
                return None
            values: Int64s = dates.to_numpy(zero_copy_only=False)
            return values
    return None


def _tick(cell: Any, ticks_per_unit: int) -> int:
    text = _text(cell)
    date = _DATE.fullmatch((text or "").strip())
    if date:
        ticks = _date_ticks(date)
    else:
        number = _number(text, "a time stamp", "a number, or a date like 2023-11-16 18:15:46.6805900")
        if abs(number) > _MAX_TICKS // ticks_per_unit:
            raise _BadCellError("a time stamp out of range", "Check the unit of the column.")
        ticks = int((number * ticks_per_unit).to_integral_value())
    if abs(ticks) > _MAX_TICKS:
        raise _BadCellError("a time stamp out of range", "Use a date between 1678 and 2262.")
    return ticks


def _date_ticks(date: re.Match[str]) -> int:
    year, month, day, hour, minute, second = (int(part) for part in date.groups()[:6])
    fraction, _zone, sign, zone_hours, zone_minutes = date.groups()[6:]
    try:
        since = datetime(year, month, day, hour, minute, second) - _EPOCH
    except ValueError as error:
        raise _BadCellError(f"a time stamp cannot be read: {error}", "Correct the date.") from None
    if sign:
        offset = timedelta(hours=int(zone_hours), minutes=int(zone_minutes))
        since -= offset if sign == "+" else -offset
    nanoseconds = int((fraction or ".")[1:10].ljust(9, "0"))
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + nanoseconds

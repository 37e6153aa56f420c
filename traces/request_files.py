"""Read the cells of a request trace, in batches, from CSV, JSON or Parquet, plain or gzipped.

The container is told by its first bytes, never by its name. Cells stay as they are in the file (text as
bytes), so that a refused value can be shown as written; `request_cells` converts them.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from ..errors import TraceError
from .files import unreadable_kind
from .request_json import BLOCK_BYTES, BOM, Record, json_array, json_lines

EVIDENCE_KEY = b"finemoe.evidence"
SYNTHETIC = "SYNTHETIC"
FORMAT_KEY = b"finemoe.format"
ARRIVALS_KEY = b"finemoe.arrivals"
NO_ARRIVALS = b"none"
LENGTHS_KEY = b"finemoe.lengths"
ASSUMED = b"ASSUMED"

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_BATCH_BYTES = 8 << 20  # of text cells: prompts are long

Batches = Iterator[list[pa.Array]]
_SUPPORTED = "Give a CSV, JSON or Parquet file (CSV and JSON may be gzipped)."


@dataclass(frozen=True)
class Layout:
    """What the beginning of a file says: its container and columns, and its labels.

    `container`: "json" is one array, "jsonl" one object a line. `synthetic`: labelled SYNTHETIC. Only a
    converted trace has the others: `source` is the format it came from, `untimed` says that that had no
    arrival times, `estimated` that its lengths are ASSUMED.
    """

    container: Literal["csv", "json", "jsonl", "parquet"]
    columns: tuple[str, ...]
    synthetic: bool = False
    source: str = ""
    untimed: bool = False
    estimated: bool = False


def inspect(path: Path) -> Layout:
    """Recognise the container and read the column names. Raises TraceError if it is no trace."""
    kind = unreadable_kind(path)
    if kind is not None:
        raise TraceError(path, f"this is {kind}.", remedy="Write its content to a regular file first.")
    with _readable(path), path.open("rb") as file:
        if file.read(len(_PARQUET)) == _PARQUET:
            return _inspect_parquet(path)
    with _readable(path), _open_text(path) as text:
        first = text.peek(1)[:BLOCK_BYTES]
        if not first:
            raise TraceError(path, "the file is empty.", remedy=_SUPPORTED)
        if first.startswith(_PARQUET):
            raise TraceError(
                path, "a Parquet file inside gzip.", place="byte 0", remedy="Unpack it with gunzip."
            )
        _refuse_binary(path, first)
        opening = first.removeprefix(BOM).lstrip()[:1]
        if opening == b"{":
            return Layout("jsonl", _json_columns(json_lines(path, text)))
        if opening == b"[":
            return Layout("json", _json_columns(json_array(path, text)))
        columns, synthetic = _csv_header(path, text)
        return Layout("csv", columns, synthetic)


def read_cells(path: Path, layout: Layout, names: Sequence[str], rows: int, optional: str = "") -> Batches:
    """Batches of at most `rows` rows: for each of `names` one array, all of the same length.

    Cells of text are bytes, and so are those of JSON that are neither text nor null: they stay JSON. A JSON
    record may lack the column `optional`, one of `names`, which holds text only.
    Raises TraceError for damaged files, rows of the wrong width and records that are not JSON objects.
    """
    with _readable(path):
        if layout.container == "csv":
            yield from _read_csv(path, layout.columns, names, rows)
        elif layout.container == "parquet":
            yield from _read_parquet(path, names, rows)
        else:
            yield from _read_json(path, layout.container, names, rows, optional)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the operating system, gzip and Arrow say about a bad file into TraceError."""
    try:
        yield
    except FileNotFoundError:
        raise TraceError(path, "no such file.", remedy="Check the path.") from None
    except IsADirectoryError:
        raise TraceError(path, "this is a directory.", remedy="Name the trace file in it.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"truncated or damaged gzip data ({_said(error)})."
        raise TraceError(path, problem, remedy="Fetch the file again.") from error
    except (OSError, csv.Error, pa.ArrowException, UnicodeDecodeError) as error:
        problem = f"cannot be read ({_said(error)})."
        raise TraceError(path, problem, remedy="Check that the file is whole and readable.") from error


def _said(error: Exception) -> str:
    """The first line of an error, in characters that print: those of damaged files may not."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


# --- text: CSV and JSON ------------------------------------------------------------------------------


def _open_text(path: Path) -> io.BufferedReader:
    raw = path.open("rb")
    if raw.peek(2)[:2] != _GZIP:
        return raw
    return io.BufferedReader(_OwningGzip(raw), BLOCK_BYTES)


class _OwningGzip(gzip.GzipFile):
    """A gzip reader that closes the file under it."""

    def __init__(self, raw: io.BufferedReader) -> None:
        self._raw = raw
        super().__init__(fileobj=raw, mode="rb")

    def close(self) -> None:
        super().close()
        self._raw.close()


def _refuse_binary(path: Path, first: bytes) -> None:
    try:
        first.decode("utf-8")
        bad = first.find(b"\0")
    except UnicodeDecodeError as error:
        # A character may be cut by the end of the look-ahead; anything else is not text.
        bad = error.start if error.start < len(first) - 3 or error.reason != "unexpected end of data" else -1
    if bad >= 0:
        shown = first[bad : bad + 8].hex(" ")
        raise TraceError(path, f"binary data, not a trace ({shown}).", place=f"byte {bad}", remedy=_SUPPORTED)


def _csv_header(path: Path, text: io.BufferedReader) -> tuple[tuple[str, ...], bool]:
    """Consume the comment lines and the header line."""
    synthetic = False
    while True:
        line = text.readline(BLOCK_BYTES)
        plain = line.removeprefix(BOM).decode("utf-8", "backslashreplace").strip()
        if not line:
            raise TraceError(path, "the file has no header line.", remedy=_SUPPORTED)
        if plain.startswith("#"):
            synthetic = synthetic or SYNTHETIC in plain
        elif plain:
            return tuple(name.strip() for name in next(csv.reader([plain]))), synthetic


def _read_csv(path: Path, columns: Sequence[str], names: Sequence[str], rows: int) -> Batches:
    # Names of our own for the columns that are not needed: those of the file may be empty or repeated.
    labels = [name if name in names else f"{place}:{name}" for place, name in enumerate(columns)]
    with _open_text(path) as text:
        _csv_header(path, text)
        if not text.peek(1):  # Arrow refuses a file without any line
            return
        try:
            reader = pacsv.open_csv(
                text,
                # One thread: only then does Arrow number the rows it cannot split.
                read_options=pacsv.ReadOptions(
                    column_names=labels, use_threads=False, block_size=BLOCK_BYTES
                ),
                convert_options=pacsv.ConvertOptions(
                    include_columns=list(names), column_types={name: pa.binary() for name in names}
                ),
            )
            with reader:
                for block in reader:
                    yield from _slices(block, rows)
        except pa.ArrowInvalid as error:
            # Arrow's handler for such rows would complain on stderr where one is not UTF-8.
            ragged = _RAGGED.search(str(error))
            if "straddl" in str(error):
                remedy = "Shorten it, or convert the file to JSON lines."
                raise TraceError(
                    path, f"a row of more than {BLOCK_BYTES >> 20} MiB.", remedy=remedy
                ) from None
            if ragged is None:
                raise
            row, expected, actual, shown = ragged.groups()
            raise TraceError(
                path,
                f"{actual} cells, but {expected} columns ({shown[:80]!r}).",
                place=f"row {row}",
                remedy="Repair or remove the row.",
            ) from None


_RAGGED = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+): (.*)", re.DOTALL)


def _json_columns(records: Iterator[Record]) -> tuple[str, ...]:
    for record in records:
        return tuple(record)
    return ()


def _read_json(path: Path, container: str, names: Sequence[str], rows: int, optional: str) -> Batches:
    columns: list[list[bytes | None]] = [[] for _ in names]
    size = 0
    with _open_text(path) as text:
        records = json_lines(path, text) if container == "jsonl" else json_array(path, text)
        try:
            for row, record in enumerate(records, 1):
                # As a list: no column may grow before the whole row is known to be good.
                for place, cell in enumerate(list(_json_row(path, row, record, names, optional))):
                    columns[place].append(cell)
                    size += len(cell or b"")
                if len(columns[0]) == rows or size >= _BATCH_BYTES:
                    yield [pa.array(cells, pa.large_binary()) for cells in columns]
                    columns, size = [[] for _ in names], 0
        except TraceError:
            if columns[0]:  # the rows before may have a fault of their own, which comes first
                yield [pa.array(cells, pa.large_binary()) for cells in columns]
            raise
    if columns[0]:
        yield [pa.array(cells, pa.large_binary()) for cells in columns]


def _json_row(
    path: Path, row: int, record: Record, names: Sequence[str], optional: str
) -> Iterator[bytes | None]:
    for name in names:
        raw = bytes(record.get(name, b"null" if name == optional else b""))
        if not raw:
            found = ", ".join(repr(column[:40]) for column in list(record)[:12])
            raise TraceError(
                path,
                f"missing column {name} (found: {found or 'none'}).",
                place=f"row {row}",
                remedy="Every record needs it.",
            )
        try:
            yield _json_cell(raw, only_text=name == optional)
        except msgspec.MsgspecError as error:
            shown = raw[:60].decode("utf-8", "backslashreplace")
            raise TraceError(
                path,
                f"no text ({shown!r}: {error}).",
                place=f"row {row}, column {name}",
                remedy="Write a JSON string.",
            ) from None


def _json_cell(raw: bytes, *, only_text: bool) -> bytes | None:
    if raw == b"null":
        return None
    return _TEXT.decode(raw).encode() if only_text or raw.startswith(b'"') else raw


_TEXT = msgspec.json.Decoder(str)


# --- Parquet -----------------------------------------------------------------------------------------------


def _inspect_parquet(path: Path) -> Layout:
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            columns = tuple(schema.names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = f"truncated or damaged Parquet ({_said(error)})."
        raise TraceError(path, problem, remedy="Write or fetch the file again.") from error
    labels = schema.metadata or {}
    return Layout(
        "parquet",
        columns,
        synthetic=labels.get(EVIDENCE_KEY) == SYNTHETIC.encode(),
        source=labels.get(FORMAT_KEY, b"").decode("utf-8", "replace"),
        untimed=labels.get(ARRIVALS_KEY) == NO_ARRIVALS,
        estimated=labels.get(LENGTHS_KEY, b"").startswith(ASSUMED),
    )


def _read_parquet(path: Path, names: Sequence[str], rows: int) -> Batches:
    # A buffer: else a column is read whole for each row group, however long its texts are.
    with pq.ParquetFile(path, buffer_size=BLOCK_BYTES) as file:
        for batch in file.iter_batches(batch_size=rows, columns=list(names)):
            yield [batch.column(name) for name in names]


def _slices(block: Any, rows: int) -> Batches:
    for begin in range(0, len(block), rows):
        yield block.slice(begin, rows).columns

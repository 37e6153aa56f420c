"""Read the cells of a request trace, in batches, from CSV, JSON lines or Parquet, plain or gzipped.

The container is told by its first bytes, never by its name. Cells stay as they are in the file (text as
bytes), so that a refused value can be shown as written; `request_cells` converts them.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from ..errors import TraceError
from .files import unreadable_kind

EVIDENCE_KEY = b"finemoe.evidence"
SYNTHETIC = "SYNTHETIC"

_GZIP, _PARQUET, _BOM = b"\x1f\x8b", b"PAR1", b"\xef\xbb\xbf"
_BLOCK_BYTES = 1 << 20

Batches = Iterator[list[pa.Array]]
_SUPPORTED = "Give a CSV, JSON-lines or Parquet file (CSV and JSON lines may be gzipped)."


@dataclass(frozen=True)
class Layout:
    """What the beginning of a file says: its container, its columns, and whether it is labelled SYNTHETIC."""

    container: Literal["csv", "jsonl", "parquet"]
    columns: tuple[str, ...]
    synthetic: bool


def inspect(path: Path) -> Layout:
    """Recognise the container and read the column names. Raises TraceError if it is no trace."""
    kind = unreadable_kind(path)
    if kind is not None:
        raise TraceError(path, f"this is {kind}.", remedy="Write its content to a regular file first.")
    with _readable(path), path.open("rb") as file:
        if file.read(len(_PARQUET)) == _PARQUET:
            return _inspect_parquet(path)
    with _readable(path), _open_text(path) as text:
        first = text.peek(1)[:_BLOCK_BYTES]
        if not first:
            raise TraceError(path, "the file is empty.", remedy=_SUPPORTED)
        if first.startswith(_PARQUET):
            raise TraceError(
                path, "a Parquet file inside gzip.", place="byte 0", remedy="Unpack it with gunzip."
            )
        _refuse_binary(path, first)
        if first.removeprefix(_BOM).lstrip()[:1] in (b"{", b"["):
            return Layout("jsonl", _json_columns(path, text), synthetic=False)
        columns, synthetic = _csv_header(path, text)
        return Layout("csv", columns, synthetic)


def read_cells(path: Path, layout: Layout, names: Sequence[str], rows: int) -> Batches:
    """Batches of at most `rows` rows: for each of `names` one array, all of the same length.

    Raises TraceError for damaged files, rows of the wrong width and lines that are not JSON objects.
    """
    read = {"csv": _read_csv, "jsonl": _read_json, "parquet": _read_parquet}[layout.container]
    with _readable(path):
        yield from read(path, layout.columns, names, rows)


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
        problem = f"truncated or damaged gzip data ({error})."
        raise TraceError(path, problem, remedy="Fetch the file again.") from error
    except (OSError, csv.Error, pa.ArrowException) as error:
        problem = f"cannot be read ({str(error).splitlines()[0]})."
        raise TraceError(path, problem, remedy="Check that the file is whole and readable.") from error


# --- text: CSV and JSON lines ------------------------------------------------------------------------------


def _open_text(path: Path) -> io.BufferedReader:
    raw = path.open("rb")
    if raw.peek(2)[:2] != _GZIP:
        return raw
    return io.BufferedReader(_OwningGzip(raw), _BLOCK_BYTES)


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
        line = text.readline(_BLOCK_BYTES)
        plain = line.removeprefix(_BOM).decode("utf-8", "backslashreplace").strip()
        if not line:
            raise TraceError(path, "the file has no header line.", remedy=_SUPPORTED)
        if plain.startswith("#"):
            synthetic = synthetic or SYNTHETIC in plain
        elif plain:
            return tuple(name.strip() for name in next(csv.reader([plain]))), synthetic


def _read_csv(path: Path, columns: Sequence[str], names: Sequence[str], rows: int) -> Batches:
    ragged: list[pacsv.InvalidRow] = []

    def remember(row: pacsv.InvalidRow) -> str:
        ragged.append(row)
        return "error"

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
                    column_names=labels, use_threads=False, block_size=_BLOCK_BYTES
                ),
                parse_options=pacsv.ParseOptions(invalid_row_handler=remember),
                convert_options=pacsv.ConvertOptions(
                    include_columns=list(names), column_types={name: pa.binary() for name in names}
                ),
            )
            with reader:
                for block in reader:
                    yield from _slices(block, rows)
        except pa.ArrowInvalid:
            if not ragged:
                raise
            row = ragged[0]
            raise TraceError(
                path,
                f"{row.actual_columns} cells, but {row.expected_columns} columns ({row.text[:80]!r}).",
                place=f"row {row.number}",
                remedy="Repair or remove the row.",
            ) from None


def _json_columns(path: Path, text: io.BufferedReader) -> tuple[str, ...]:
    for record in _json_records(path, text):
        return tuple(record)
    return ()


def _json_records(path: Path, text: io.BufferedReader) -> Iterator[dict[str, msgspec.Raw]]:
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
    row = 0
    for number, line in enumerate(text):
        plain = (line.removeprefix(_BOM) if number == 0 else line).strip()
        if not plain:
            continue
        row += 1
        try:
            yield decoder.decode(plain)
        except msgspec.MsgspecError as error:
            kind = "not a JSON object" if isinstance(error, msgspec.ValidationError) else "not valid JSON"
            raise TraceError(
                path,
                f"{kind} ({plain[:60].decode('utf-8', 'backslashreplace')!r}: {error}).",
                place=f"row {row}",
                remedy="Write one JSON object per line.",
            ) from None


def _read_json(path: Path, columns: Sequence[str], names: Sequence[str], rows: int) -> Batches:
    with _open_text(path) as text:
        records = _json_records(path, text)
        row = 0
        while chunk := list(islice(records, rows)):
            cells: list[list[bytes | None]] = [[] for _ in names]
            for record in chunk:
                row += 1
                for name, column in zip(names, cells, strict=True):
                    if name not in record:
                        raise TraceError(
                            path,
                            f"missing column {name} (found: {', '.join(list(record)[:12]) or 'none'}).",
                            place=f"row {row}",
                            remedy="Every line needs it.",
                        )
                    column.append(_json_cell(bytes(record[name])))
            yield [pa.array(column, pa.binary()) for column in cells]


def _json_cell(raw: bytes) -> bytes | None:
    if raw == b"null":
        return None
    return msgspec.json.decode(raw, type=str).encode() if raw.startswith(b'"') else raw


# --- Parquet -----------------------------------------------------------------------------------------------


def _inspect_parquet(path: Path) -> Layout:
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        problem = f"truncated or damaged Parquet ({str(error).splitlines()[0]})."
        raise TraceError(path, problem, remedy="Write or fetch the file again.") from error
    evidence = (schema.metadata or {}).get(EVIDENCE_KEY, b"")
    return Layout("parquet", tuple(schema.names), evidence == SYNTHETIC.encode())


def _read_parquet(path: Path, columns: Sequence[str], names: Sequence[str], rows: int) -> Batches:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=rows, columns=list(names)):
            yield [batch.column(name) for name in names]


def _slices(block: Any, rows: int) -> Batches:
    for begin in range(0, len(block), rows):
        yield block.slice(begin, rows).columns

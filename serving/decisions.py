"""decisions.parquet: the policy core's events and commands in one total order, with its configuration.

Its metadata say what was written: `finemoe.core`, the core's options, and `finemoe.written`, the number of
rows with a digest per column and one of the options. They show damage and edits; they are no signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import TraceError

#: by the numbers of csrc/types.hpp: RecordKind
KINDS = (
    "seed_store",
    "preload",
    "begin_iteration",
    "gate",
    "speculation",
    "search_done",
    "loaded",
    "paused",
    "load_failed",
    "computed",
    "end_iteration",
    "foresight",
    "Search",
    "WaitSearch",
    "PreemptPrefetch",
    "Wait",
    "Load",
    "Abort",
)
FIRST_COMMAND = KINDS.index("Search")
_LOAD_KINDS = ("demand", "prefetch")
_SEARCH_KINDS = ("semantic", "trajectory", "update")
_CORE_KEY = b"finemoe.core"
_WRITTEN_KEY = b"finemoe.written"
_DIGEST_BYTES = 16
_REMEDY = "Give the results directory of a finemoe run, or its decisions.parquet."
_REPAIR = "Run the simulation again for an unaltered log."
#: whole-number columns; −1 where one does not apply
NUMBERS = {
    "layer": pa.int32(),
    "target": pa.int32(),
    "expert": pa.int32(),
    "device": pa.int32(),
    "slot": pa.int32(),
    "evicts": pa.int32(),
    "ticket": pa.int64(),
    "offset": pa.int64(),
    "bytes": pa.int64(),
    "work": pa.int64(),
}
#: list columns
LISTS = {
    "experts": pa.int32(),
    "token_counts": pa.int32(),
    "requests": pa.int64(),
    "tokens": pa.int32(),
    "phases": pa.uint8(),
    "values": pa.float16(),
}
#: The only column that may hold nulls: it applies to two commands.
_OPTIONAL = "sub_kind"
_NAMES = {"kind": KINDS, "sub_kind": _LOAD_KINDS + _SEARCH_KINDS}
_DICTIONARY = pa.dictionary(pa.int8(), pa.string())
SCHEMA = pa.schema(
    {
        "sequence": pa.int64(),
        "time_s": pa.float64(),
        "iteration": pa.int32(),
        "kind": _DICTIONARY,
        "sub_kind": _DICTIONARY,
        "blocking": pa.bool_(),
        **NUMBERS,
        **{name: pa.large_list(kind) for name, kind in LISTS.items()},
        "reason": pa.large_string(),
    }
)


@dataclass(frozen=True)
class Decisions:
    """A decision log as read, and what its writer noted of it."""

    table: pa.Table  # of SCHEMA
    options: dict[str, Any]  # of the core
    written_rows: int
    altered_columns: tuple[str, ...]  # all that differ from what was written
    options_altered: bool


def log_table(log: Mapping[str, Any]) -> pa.Table:
    """The core's log (`Core.take_log`) as a table of SCHEMA.

    One row per event or command. `sub_kind` is demand or prefetch of a Load, semantic, trajectory or
    update of a Search. `values` holds f16 gate rows, embeddings or stored maps. −1 and empty lists: not
    applicable.
    """
    kind, detail = log["kind"], log["detail"]
    sub_kind = np.full(len(kind), -1, np.int8)
    load, search = kind == KINDS.index("Load"), kind == KINDS.index("Search")
    sub_kind[load] = detail[load]
    sub_kind[search] = detail[search] + len(_LOAD_KINDS)
    columns: dict[str, pa.Array] = {
        "sequence": pa.array(np.arange(len(kind))),
        "time_s": pa.array(log["time_s"]),
        "iteration": pa.array(log["iteration"]),
        "kind": pa.DictionaryArray.from_arrays(pa.array(kind.astype(np.int8)), pa.array(KINDS)),
        "sub_kind": pa.DictionaryArray.from_arrays(
            pa.array(sub_kind, mask=sub_kind < 0), pa.array(_NAMES["sub_kind"])
        ),
        "blocking": pa.array(log["blocking"]),
    }
    for name, kind_of in NUMBERS.items():
        columns[name] = pa.array(log[name], type=kind_of)
    for name, kind_of in LISTS.items():
        values, ends = log[name]
        array = pa.array(values.view(np.float16) if name == "values" else values, type=kind_of)
        columns[name] = pa.LargeListArray.from_arrays(_offsets(ends), array)
    text, ends = log["reason"]
    columns["reason"] = pa.LargeStringArray.from_buffers(
        len(ends), pa.py_buffer(_offsets(ends).to_numpy()), pa.py_buffer(text)
    )
    return pa.table(columns, schema=SCHEMA)


def decision_table(log: Mapping[str, Any], options: Mapping[str, int | float | str | bool]) -> pa.Table:
    """`log_table` with the core's options, the number of rows and the digests in its metadata."""
    table = log_table(log)
    core = json.dumps(options, sort_keys=True).encode()
    written = {"rows": table.num_rows, "columns": _digests(table), "core": _digest(core)}
    return table.replace_schema_metadata(
        {_CORE_KEY: core, _WRITTEN_KEY: json.dumps(written, sort_keys=True).encode()}
    )


def list_parts(array: pa.LargeListArray) -> tuple[Any, Any]:
    """Offsets, from 0, and values of a list column, as NumPy arrays."""
    if not len(array):
        return np.zeros(1, np.int64), array.values.to_numpy(zero_copy_only=False)[:0]
    offsets = array.offsets.to_numpy()
    values = array.values.to_numpy(zero_copy_only=False)
    return offsets - offsets[0], values[offsets[0] : offsets[-1]]


def kind_codes(array: pa.DictionaryArray, name: str) -> Any:
    """Per row of `kind` or `sub_kind`, the place of its name: int8, −1 where null, −2 where unknown."""
    known = _NAMES[name]
    places = [known.index(text) if text in known else -2 for text in array.dictionary.to_pylist()]
    return np.asarray([*places, -1], np.int8)[array.indices.fill_null(len(places)).to_numpy()]


def _offsets(ends: Any) -> pa.Array:
    return pa.array(np.concatenate([np.zeros(1, np.int64), np.asarray(ends, np.int64)]))


def _digest(*parts: Any) -> str:
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _digests(table: pa.Table) -> dict[str, str]:
    """BLAKE2b of every column's little-endian values; the layout in the file does not matter.

    Names count as the int8 of `kind_codes`, flags as bytes. Few rows of most columns apply: of NUMBERS, lists
    and text, the bits (`np.packbits`) of the rows that are not −1 or empty, then the numbers or the lengths
    (int64) of these rows, then the values in the lists.
    """
    return {name: _digest(*_parts(name, table.column(name).combine_chunks())) for name in table.column_names}


def _parts(name: str, array: pa.Array) -> Iterator[Any]:
    arrays: tuple[Any, ...]
    if name in _NAMES:
        arrays = (kind_codes(array, name),)
    elif name in LISTS or name == "reason":
        offsets, values = list_parts(array) if name in LISTS else _text_parts(array)
        arrays = (*_applying(np.diff(offsets), 0), values)
    elif name in NUMBERS:
        arrays = _applying(array.to_numpy(), -1)
    else:
        arrays = (array.to_numpy(zero_copy_only=False),)
    for values in arrays:
        yield np.ascontiguousarray(values, values.dtype.newbyteorder("<")).view(np.uint8)


def _applying(numbers: Any, empty: int) -> tuple[Any, Any]:
    applies = numbers != empty
    return np.packbits(applies), numbers[applies]


def _text_parts(array: pa.LargeStringArray) -> tuple[Any, Any]:
    if not len(array):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, offset_buffer, text = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64, len(array) + 1, 8 * array.offset)
    content = np.frombuffer(text or b"", np.uint8)[offsets[0] : offsets[-1]]
    return offsets, content


def read_decisions(path: Path) -> Decisions:
    """A decision log; TraceError for anything that is none, or whose columns or metadata are not a log's.

    A log that merely is not what was written is returned, with what was altered.
    """
    table = _read(path)
    metadata = table.schema.metadata or {}
    if _CORE_KEY not in metadata:
        raise TraceError(path, "a Parquet file, but no decision log.", remedy=_REMEDY)
    if _WRITTEN_KEY not in metadata:
        raise TraceError(
            path,
            "the log does not say how many rows it had, nor their digests.",
            place=f"metadata {_WRITTEN_KEY.decode()}",
            remedy=_REPAIR,
        )
    options = _json(path, metadata, _CORE_KEY)
    written = _json(path, metadata, _WRITTEN_KEY)
    rows, columns, core = (written.get(key) for key in ("rows", "columns", "core"))
    if (
        type(rows) is not int
        or rows < 0
        or not isinstance(columns, dict)
        or set(columns) != set(SCHEMA.names)
    ):
        raise TraceError(
            path,
            "it must hold the number of rows and a digest of every column.",
            place=f"metadata {_WRITTEN_KEY.decode()}",
            remedy=_REPAIR,
        )
    _check_columns(path, table.schema)
    table = table.select(SCHEMA.names)
    _check_values(path, table)
    altered = tuple(name for name, digest in _digests(table).items() if columns[name] != digest)
    return Decisions(table, options, rows, altered, core != _digest(metadata[_CORE_KEY]))


def _read(path: Path) -> pa.Table:
    try:
        if not path.exists():
            raise TraceError(path, "there is no decision log (--decisions none writes none).", remedy=_REMEDY)
        if not path.is_file():
            raise TraceError(path, "neither a results directory nor a file.", remedy=_REMEDY)
        table = pq.ParquetFile(path).read()  # read_table would make columns of folders named a=b
        table.validate(full=True)
    except (OSError, MemoryError, pa.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise TraceError(path, f"not a readable Parquet file ({reason}).", remedy=_REMEDY) from None
    return table


def _json(path: Path, metadata: Mapping[bytes, bytes], key: bytes) -> dict[str, Any]:
    try:
        found = json.loads(metadata[key].decode())
    except (ValueError, RecursionError) as error:
        problem = f"not JSON text ({error})."
    else:
        if isinstance(found, dict):
            return found
        problem = "not a JSON object."
    raise TraceError(path, problem, place=f"metadata {key.decode()}", remedy=_REPAIR)


def _check_columns(path: Path, schema: pa.Schema) -> None:
    for name, kind in zip(schema.names, schema.types, strict=True):
        if name not in SCHEMA.names:
            raise TraceError(path, "no column of a decision log.", place=f"column {name}", remedy=_REPAIR)
        if schema.names.count(name) > 1:
            raise TraceError(path, "the column is there twice.", place=f"column {name}", remedy=_REPAIR)
        expected = SCHEMA.field(name).type
        if kind != expected:
            problem = f"its type is {kind}, that of a decision log is {expected}."
            raise TraceError(path, problem, place=f"column {name}", remedy=_REPAIR)
    for name in SCHEMA.names:
        if name not in schema.names:
            raise TraceError(path, "the column is missing.", place=f"column {name}", remedy=_REPAIR)


def _check_values(path: Path, table: pa.Table) -> None:
    """No nulls but in `sub_kind`, and known kinds only."""
    for name in table.column_names:
        if name == _OPTIONAL:
            continue
        array = table.column(name).combine_chunks()
        problem = "there is no value."
        row = _first(array.is_null())
        if row is None and name in LISTS:
            inner = _first(array.flatten().is_null())
            row = None if inner is None else array.value_parent_indices()[inner].as_py()
        if row is None and name == "kind":
            row = _first(kind_codes(array, name) < 0)
            problem = "" if row is None else f"{array[row].as_py()!r} is no kind of event or command."
        if row is not None:
            raise TraceError(path, problem, place=f"row {row}, column {name}", remedy=_REPAIR)


def _first(flags: Any) -> int | None:
    """Where the first of the flags is set."""
    places = np.flatnonzero(flags)
    return int(places[0]) if places.size else None

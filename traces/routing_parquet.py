"""Columns of a routing trace: its Arrow schema, and requests to and from Arrow tables (docs/routing-
format.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import TraceError
from .routing import Half, RequestRouting, RoutingMeta
from .routing_check import check_routing

META_KEY = b"finemoe.routing"
FORMAT_VERSION = 1
RECORD_AGAIN = "Record or import the trace again."


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """JSON under `META_KEY` in the schema metadata."""

    version: int
    meta: RoutingMeta


def schema_of(meta: RoutingMeta) -> pa.Schema:
    """The columns of a trace with this meta, and the meta itself."""
    rows = pa.list_(pa.float16(), meta.layers * meta.experts)
    fields = [
        pa.field("request", pa.int32(), nullable=False),
        pa.field("iteration", pa.int32(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("gate", rows, nullable=False),
        pa.field("experts", pa.list_(pa.uint16()), nullable=False),
        pa.field("token_counts", pa.list_(pa.int32()), nullable=False),
        pa.field("experts_per_layer", pa.list_(pa.uint16(), meta.layers), nullable=False),
    ]
    if meta.embedding_width:
        fields.append(pa.field("embedding", pa.list_(pa.float16(), meta.embedding_width)))
    fields += [pa.field(f"speculation_{d}", rows, nullable=False) for d in meta.speculation]
    return pa.schema(fields, metadata={META_KEY: msgspec.json.encode(Header(FORMAT_VERSION, meta))})


def columns_of(meta: RoutingMeta, speculation: tuple[int, ...]) -> list[str]:
    """The columns that `request_of` needs."""
    names = ["tokens", "gate", "experts", "token_counts", "experts_per_layer"]
    if meta.embedding_width:
        names.append("embedding")
    return names + [f"speculation_{d}" for d in speculation]


def table_of(request: int, routing: RequestRouting, meta: RoutingMeta, schema: pa.Schema) -> pa.Table:
    """The rows of one request; `routing` must obey the rules."""
    n, width = routing.iterations, meta.layers * meta.experts

    def fixed(values: npt.NDArray[Any], size: int) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), size)

    first = "decode" if meta.prefill == "none" else "prefill"
    bounds = pa.array(routing.offsets[:: meta.layers].astype(np.int32))
    columns = {
        "request": pa.array(np.full(n, request, np.int32)),
        "iteration": pa.array(np.arange(n, dtype=np.int32)),
        "phase": pa.array([first] + ["decode"] * (n - 1)),
        "tokens": pa.array(routing.tokens(meta.top_k).astype(np.int32)),
        "gate": fixed(routing.gate, width),
        "experts": pa.ListArray.from_arrays(bounds, pa.array(routing.experts)),
        "token_counts": pa.ListArray.from_arrays(bounds, pa.array(routing.token_counts)),
        "experts_per_layer": fixed(np.diff(routing.offsets).astype(np.uint16), meta.layers),
    }
    if meta.embedding_width:
        columns["embedding"] = (
            pa.nulls(n, schema.field("embedding").type)
            if routing.embedding is None
            else fixed(routing.embedding, meta.embedding_width)
        )
    for distance in meta.speculation:
        columns[f"speculation_{distance}"] = fixed(routing.speculation[distance], width)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def request_of(
    table: pa.Table, request: int, meta: RoutingMeta, speculation: tuple[int, ...], path: Path
) -> RequestRouting:
    """One request from its rows, checked; raises `TraceError` for what breaks a rule of the format."""
    n = table.num_rows
    columns = {name: table[name].combine_chunks() for name in table.column_names}

    def refuse(place: str, problem: str) -> TraceError:
        return TraceError(path, problem, place=f"request {request}, {place}", remedy=RECORD_AGAIN)

    def flat(name: str) -> npt.NDArray[Any]:
        return np.asarray(columns[name].flatten().to_numpy(zero_copy_only=False))

    def rows(name: str) -> Half:
        return flat(name).reshape(n, meta.layers, meta.experts)

    for name, column in columns.items():
        inner = 0 if name == "tokens" else column.flatten().null_count
        if inner or (column.null_count and not (name == "embedding" and column.null_count == n)):
            raise refuse(name, "empty value.")
    embedding = None
    if meta.embedding_width and columns["embedding"].null_count == 0:
        embedding = flat("embedding").reshape(n, meta.embedding_width)
    lengths = flat("experts_per_layer").astype(np.int64)
    per_row = lengths.reshape(n, meta.layers).sum(axis=1)
    for name in ("experts", "token_counts"):
        found = np.diff(columns[name].offsets.to_numpy())
        if (found != per_row).any():
            at = int(np.argmax(found != per_row))
            raise refuse(
                f"iteration {at}, {name}", f"{found[at]} values, experts_per_layer sums to {per_row[at]}."
            )
    routing = RequestRouting(
        gate=rows("gate"),
        experts=flat("experts"),
        token_counts=flat("token_counts"),
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        embedding=embedding,
        speculation={d: rows(f"speculation_{d}") for d in speculation},
    )
    check_routing(routing, meta, path, request)
    stated, counted = columns["tokens"].to_numpy(), routing.tokens(meta.top_k)
    if (stated != counted).any():
        at = int(np.argmax(stated != counted))
        raise refuse(f"iteration {at}, tokens", f"{stated[at]} tokens, the token counts say {counted[at]}.")
    return routing


def meta_of(schema: pa.Schema, path: Path) -> RoutingMeta:
    """The meta of a file with this schema; raises `TraceError` if it is not a routing trace of this
    version."""

    def refuse(place: str, problem: str, remedy: str = RECORD_AGAIN) -> TraceError:
        return TraceError(path, problem, place=place, remedy=remedy)

    found = f"found: {', '.join(schema.names)}"
    raw = (schema.metadata or {}).get(META_KEY)
    if raw is None:
        raise refuse(
            "schema metadata",
            f"no {META_KEY.decode()!r}, so this is not a routing trace (columns {found}).",
            "Make one with the importer or the recorder.",
        )
    try:
        header = msgspec.json.decode(raw, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refuse("schema metadata", f"{error}.") from None
    if header.version != FORMAT_VERSION:
        raise refuse(
            "schema metadata", f"format version {header.version}, this program reads {FORMAT_VERSION}."
        )
    for field in schema_of(header.meta):
        if schema.names.count(field.name) != 1:
            raise refuse(f"column {field.name}", f"missing or double ({found}).")
        if schema.field(field.name).type != field.type:
            raise refuse(
                f"column {field.name}", f"type {schema.field(field.name).type}, expected {field.type}."
            )
    return header.meta


def request_starts(rows: pa.Table, meta: RoutingMeta, path: Path) -> list[int]:
    """First row of each request, and the number of rows, from the columns request, iteration and phase.

    Raises `TraceError` unless requests and their iterations are numbered from 0, ascending, without gaps.
    """
    if rows.num_rows == 0:
        raise TraceError(path, "no rows.", remedy=RECORD_AGAIN)
    if any(column.null_count for column in rows.columns):
        raise TraceError(path, "empty values in request, iteration or phase.", remedy=RECORD_AGAIN)
    request = rows["request"].to_numpy().astype(np.int64)
    iteration = rows["iteration"].to_numpy()
    starts = np.flatnonzero(np.diff(request, prepend=request[0] - 1))
    sizes = np.diff(starts, append=len(request))
    expected = np.arange(len(request)) - np.repeat(starts, sizes)
    numbers = np.repeat(np.arange(len(starts)), sizes)
    phase = np.where((expected == 0) & (meta.prefill != "none"), "prefill", "decode")
    wrong = (iteration != expected) | (request != numbers)
    wrong |= rows["phase"].to_numpy() != phase.astype(object)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise TraceError(
            path,
            f"request {request[at]}, iteration {iteration[at]}, phase {rows['phase'][at]}; expected "
            f"request {numbers[at]}, iteration {expected[at]}, phase {phase[at]}.",
            place=f"row {at}",
            remedy="Sort the rows by request and iteration, numbered from 0 without gaps.",
        )
    return [*(int(x) for x in starts), len(request)]

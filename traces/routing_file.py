"""Routing traces as Parquet files: a streaming writer and a memory-mapped reader (docs/routing-format.md)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import TraceError
from .files import check_replaceable, replacing, unreadable_kind, unwritable
from .routing import RequestRouting, RoutingMeta, arrange
from .routing_check import check_routing
from .routing_parquet import columns_of, meta_of, request_of, request_starts, schema_of, table_of

CACHED_REQUESTS = 8


def _is_recording(path: Path) -> bool:
    """An npz or a route CSV, which `finemoe trace import` reads."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(16).startswith((b"PK\x03\x04", b"# route_trace"))
    return False


def write_routing(path: str | Path, meta: RoutingMeta, requests: Iterable[RequestRouting]) -> int:
    """Write a routing trace and return its number of requests, numbered in the order they come.

    One request is in memory at a time and is one row group. The file appears under its name only when it is
    complete. Raises `TraceError` for a request that breaks a rule of the format, for no request at all, and
    for a `path` that exists and is not a Parquet file.
    """
    path = Path(path)
    check_replaceable(path)
    try:
        with replacing(path) as partial:
            with partial.open("xb") as file, RoutingWriter(file, path, meta) as writer:
                for routing in requests:
                    writer.add(routing)
            if writer.requests == 0:
                raise TraceError(path, "no requests to write.", remedy="Give at least one request.")
    except OSError as error:
        raise unwritable(path, error) from error
    return writer.requests


class RoutingWriter:
    """Writes a routing trace into an open file, request by request; whole when it is left without an error.

    `path` is what errors name. `write_routing` is the way to a file of its own.
    """

    def __init__(self, file: BinaryIO, path: Path, meta: RoutingMeta) -> None:
        self._path, self._meta = path, meta
        self._schema = schema_of(meta)
        self._writer = pq.ParquetWriter(
            file, self._schema, compression="zstd", use_dictionary=False, write_page_checksum=True
        )
        self.requests = 0  #: written so far

    def add(self, routing: RequestRouting) -> None:
        """Write the next request; TraceError for one that breaks a rule of the format."""
        for distance in self._meta.speculation:
            if distance not in routing.speculation:
                raise TraceError(
                    self._path, f"no rows at distance {distance}.", place=f"request {self.requests}"
                )
        check_routing(routing, self._meta, self._path, self.requests)
        table = table_of(self.requests, routing, self._meta, self._schema)
        self._writer.write_table(table, row_group_size=routing.iterations)
        self.requests += 1

    def __enter__(self) -> RoutingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()


class RoutingFile:
    """A recorded or imported routing trace, read request by request through a memory map.

    Request r of a run uses recording r mod N. A recording longer than asked for is cut; a shorter one
    continues by cycling its decode iterations from the first one. The prefill's token counts are scaled to
    the prompt's length. Where no prefill was recorded, iteration 0 is the first decode iteration with its
    counts scaled. Raises `TraceError` for a file that is not a routing trace, and for a request that breaks a
    rule when it is read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        kind = unreadable_kind(self.path)
        if kind is not None:
            raise TraceError(self.path, f"this is {kind}.", remedy="Name a regular Parquet file.")
        try:
            self._file = pq.ParquetFile(self.path, memory_map=True, page_checksum_verification=True)
            self.meta = meta_of(self._file.schema_arrow, self.path)
            order = self._file.read(columns=["request", "iteration", "phase"])
            self._starts = request_starts(order, self.meta, self.path)
        except FileNotFoundError:
            raise TraceError(self.path, "no such file.") from None
        except (
            pa.ArrowException,
            OSError,
            UnicodeDecodeError,
        ) as error:  # the last: damaged names of columns
            if _is_recording(self.path):
                raise TraceError(
                    self.path,
                    "a recording of chosen experts, not yet a routing trace.",
                    remedy=f"Make one of it: finemoe trace import {self.path} ROUTING.parquet.",
                ) from None
            raise self._unreadable(error) from None
        sizes = [self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)]
        self._group_starts = np.concatenate(([0], np.cumsum(sizes)))
        self._cache: dict[tuple[int, tuple[int, ...]], RequestRouting] = {}
        self._continued: dict[int, int] = {}
        self._rescaled: set[int] = set()

    @property
    def requests(self) -> int:
        """N, the number of recorded requests."""
        return len(self._starts) - 1

    @property
    def continued_requests(self) -> int:
        """Requests asked for so far that were longer than their recording."""
        return len(self._continued)

    @property
    def continued_iterations(self) -> int:
        """Iterations of those requests that repeat earlier ones of the recording."""
        return sum(self._continued.values())

    @property
    def rescaled_prefills(self) -> int:
        """Requests asked for so far whose prompt had another length than the recorded one."""
        return len(self._rescaled)

    def remarks(self) -> tuple[str, ...]:
        """States continued recordings and rescaled prefills."""
        remarks = []
        if self._continued:
            remarks.append(
                f"routing: {self.continued_requests} requests are longer than their recording; "
                f"{self.continued_iterations} decode iterations repeat earlier ones"
            )
        if self._rescaled:
            count = self.rescaled_prefills
            remarks.append(f"routing: {count} prefills of the routing trace scaled to the requests' prompts")
        return tuple(remarks)

    def afresh(self) -> RoutingFile:
        """See `RoutingSource`."""
        other = copy.copy(self)
        other._continued, other._rescaled = {}, set()
        return other

    def others(self, served: Iterable[int], count: int) -> list[int]:
        """See `RoutingSource`."""
        taken = {request % self.requests for request in served}
        return [number for number in range(self.requests) if number not in taken][:count]

    def recorded(self, request: int, speculation: tuple[int, ...] = ()) -> RequestRouting:
        """Recording number `request` (0 … N − 1) as it stands in the file, checked."""
        for distance in speculation:
            if distance not in self.meta.speculation:
                raise TraceError(
                    self.path,
                    f"no speculation rows at distance {distance}; it has {list(self.meta.speculation)}.",
                    place="columns",
                    remedy="Choose a distance it has, or a policy that does not speculate.",
                )
        key = (request, tuple(sorted(set(speculation))))
        if key not in self._cache:
            while len(self._cache) >= CACHED_REQUESTS:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = self._read(*key)
        return self._cache[key]

    def routing_for(
        self, request: int, prompt_tokens: int, output_tokens: int, speculation: tuple[int, ...] = ()
    ) -> RequestRouting:
        """See `RoutingSource`."""
        recording = request % self.requests
        routing = self.recorded(recording, speculation)
        first = 0 if self.meta.prefill == "none" else 1
        cycle = routing.iterations - first
        if output_tokens > 1 and cycle == 0:
            raise TraceError(
                self.path,
                f"no decode iteration to continue with, {output_tokens - 1} are asked for.",
                place=f"request {recording}",
                remedy="Record at least two output tokens per request.",
            )
        order = np.arange(output_tokens)
        order[1:] = first + (order[1:] - first) % max(cycle, 1)
        if output_tokens > routing.iterations:
            self._continued[request] = output_tokens - routing.iterations
        if int(routing.tokens(self.meta.top_k)[0]) != prompt_tokens:
            self._rescaled.add(request)
        return arrange(routing, order, prompt_tokens, self.meta.top_k)

    def _read(self, request: int, speculation: tuple[int, ...]) -> RequestRouting:
        start, end = self._starts[request], self._starts[request + 1]
        first = int(np.searchsorted(self._group_starts, start, side="right")) - 1
        last = int(np.searchsorted(self._group_starts, end, side="left"))
        try:
            table = self._file.read_row_groups(
                range(first, last), columns=columns_of(self.meta, speculation), use_threads=False
            )
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._unreadable(error, place=f"request {request}") from None
        table = table.slice(start - int(self._group_starts[first]), end - start)
        return request_of(table, request, self.meta, speculation, self.path)

    def _unreadable(self, error: Exception, place: str = "") -> TraceError:
        reason = str(error).splitlines()[0].rstrip(".")
        return TraceError(
            self.path,
            f"cannot be read as Parquet ({reason}).",
            place=place,
            remedy="Copy or record it again.",
        )

"""Append-only column stores for what happened to each request and in each iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    import pyarrow
    from numpy.typing import NDArray

    from .scheduler import Phase

_CHUNK_ROWS = (
    8192  # rows held as Python tuples before they become columns: bounds memory, keeps appends cheap
)


class ColumnLog:
    """Rows go in one at a time, columns come out as NumPy arrays or an Arrow table."""

    columns: ClassVar[dict[str, str]]  # name -> NumPy type

    def __init__(self) -> None:
        self._rows: list[tuple[float | str, ...]] = []
        self._blocks: list[NDArray[np.void]] = []
        self._type = np.dtype(list(self.columns.items()))

    def __len__(self) -> int:
        return sum(len(block) for block in self._blocks) + len(self._rows)

    def _append(self, row: tuple[float | str, ...]) -> None:
        self._rows.append(row)
        if len(self._rows) >= _CHUNK_ROWS:
            self._seal()

    def _seal(self) -> None:
        if self._rows:
            self._blocks.append(np.array(self._rows, dtype=self._type))
            self._rows = []

    def table(self) -> NDArray[np.void]:
        """All rows as one structured array, in order of appending."""
        self._seal()
        if len(self._blocks) > 1:
            self._blocks = [np.concatenate(self._blocks)]
        return self._blocks[0] if self._blocks else np.empty(0, dtype=self._type)

    def column(self, name: str) -> NDArray[Any]:
        """One column, in order of appending."""
        column: NDArray[Any] = self.table()[name]
        return column

    def to_arrow(self) -> pyarrow.Table:
        """All rows as an Arrow table; text columns become dictionaries."""
        import pyarrow as pa

        rows = self.table()
        arrays = {}
        for name in self.columns:
            array = pa.array(np.ascontiguousarray(rows[name]))
            arrays[name] = array.dictionary_encode() if pa.types.is_string(array.type) else array
        return pa.table(arrays)


class RequestLog(ColumnLog):
    """One row per finished request, in the order of finishing. Times in seconds since the run began."""

    columns: ClassVar[dict[str, str]] = {
        "request": "i8",
        "arrival_s": "f8",
        "admitted_s": "f8",  # start of its prefill step
        "first_token_s": "f8",  # end of its prefill step
        "finished_s": "f8",
        "prompt_tokens": "i8",
        "output_tokens": "i8",
        "counted": "?",  # False: a warm-up request
    }

    def append(
        self,
        request: int,
        arrival_s: float,
        admitted_s: float,
        first_token_s: float,
        finished_s: float,
        prompt_tokens: int,
        output_tokens: int,
        counted: bool,
    ) -> None:
        """Note a finished request."""
        self._append(
            (request, arrival_s, admitted_s, first_token_s, finished_s, prompt_tokens, output_tokens, counted)
        )


class IterationLog(ColumnLog):
    """One row per step of the scheduler. Expert counts are unique experts per layer, summed over the
    layers."""

    columns: ClassVar[dict[str, str]] = {
        "start_s": "f8",
        "end_s": "f8",
        "phase": "U7",
        "batch": "i4",  # requests
        "tokens": "i4",
        "activated": "i4",
        "hits": "i4",  # resident and ready at the gate
        "late": "i4",  # in flight at the gate
        "misses": "i4",
        "demand_bytes": "i8",
        "stall_s": "f8",  # compute waited for demand loads (late prefetches included)
        "search_wait_s": "f8",  # compute waited for a search or for a blocking prefetch
        "compute_s": "f8",
        # Busy seconds of all links together from the run's beginning to the step's start and end.
        "link_busy_start_s": "f8",
        "link_busy_end_s": "f8",
    }

    def append(
        self,
        start_s: float,
        end_s: float,
        phase: Phase,
        batch: int,
        tokens: int,
        activated: int,
        hits: int,
        late: int,
        misses: int,
        demand_bytes: int,
        stall_s: float,
        search_wait_s: float,
        compute_s: float,
        link_busy_start_s: float,
        link_busy_end_s: float,
    ) -> None:
        """Note a finished step."""
        self._append(
            (
                start_s,
                end_s,
                phase,
                batch,
                tokens,
                activated,
                hits,
                late,
                misses,
                demand_bytes,
                stall_s,
                search_wait_s,
                compute_s,
                link_busy_start_s,
                link_busy_end_s,
            )
        )

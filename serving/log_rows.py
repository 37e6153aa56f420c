"""A decision log as rows: its columns, its lists, and how each event is fed to a core."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ..errors import CoreError
from .decisions import KINDS, NUMBERS, kind_codes, list_parts

if TYPE_CHECKING:
    from ..policy.core import Core

#: number columns and kinds that `LogRows.describe` shows
SHOWN = ("sub_kind", *NUMBERS)


class LogRows:
    """A decision table as NumPy columns, with random access to its lists."""

    def __init__(self, table: pa.Table, layers: int, experts: int) -> None:
        self.layers, self.experts = layers, experts
        self._table = table.combine_chunks()
        self.kind = kind_codes(self._table["kind"].combine_chunks(), "kind")
        self._columns: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.kind)

    def column(self, name: str) -> Any:
        """A column as NumPy values; strings as objects."""
        if name not in self._columns:
            chunk = self._table[name].combine_chunks()
            if pa.types.is_dictionary(chunk.type):
                chunk = chunk.dictionary_decode()
            self._columns[name] = chunk.to_numpy(zero_copy_only=False)
        return self._columns[name]

    def list_parts(self, name: str) -> tuple[Any, Any]:
        """Offsets and values of a list column."""
        key = f"{name} list"
        if key not in self._columns:
            self._columns[key] = list_parts(self._table[name].combine_chunks())
        parts: tuple[Any, Any] = self._columns[key]
        return parts

    def items(self, name: str, index: int) -> Any:
        offsets, values = self.list_parts(name)
        return values[offsets[index] : offsets[index + 1]]

    def gate_rows(self, index: int) -> Any:
        """The row's `values` as gate rows [B, J]; CoreError where they are none."""
        values = self.items("values", index)
        if len(values) % self.experts:
            raise CoreError(f"{len(values)} values are no rows of {self.experts} probabilities")
        return values.reshape(-1, self.experts)

    def describe(self, index: int) -> str:
        """One line: sequence, kind, and the fields that are set."""
        shown = [f"#{index}", f"{self.column('time_s')[index]:.9g}s", KINDS[self.kind[index]]]
        for name in SHOWN:
            value = self.column(name)[index]
            if value is not None and value != -1:
                shown.append(f"{name}={value}")
        experts = self.items("experts", index)
        if len(experts):
            shown.append(f"experts={experts.tolist()}")
        reason = self.column("reason")[index]
        return " ".join([*shown, reason] if reason else shown)

    def feed(self, core: Core, index: int, time_s: float | None = None) -> int:
        """Play the event of that row, at its time or another; returns the core's mask."""
        feeder = _FEEDERS[KINDS[self.kind[index]]]
        return feeder(self, core, index, float(self.column("time_s")[index]) if time_s is None else time_s)


def _seed_store(rows: LogRows, core: Core, i: int, time_s: float) -> int:
    ages, values = rows.items("requests", i), rows.items("values", i)
    size = len(ages) * rows.layers * rows.experts
    return core.seed_store(
        values[:size], values[size:] if len(values) > size else None, ages.tolist(), time_s
    )


def _begin_iteration(rows: LogRows, core: Core, i: int, time_s: float) -> int:
    parts = [rows.items(name, i).tolist() for name in ("requests", "tokens", "phases")]
    if len({len(part) for part in parts}) > 1:
        raise CoreError(f"{len(parts[0])} requests, {len(parts[1])} tokens and {len(parts[2])} phases")
    made = [
        (request, "decode" if flag & 1 else "prefill", tokens, bool(flag & 2))
        for request, tokens, flag in zip(*parts, strict=True)
    ]
    embeddings = rows.items("values", i)
    return core.begin_iteration(made, embeddings if len(embeddings) else None, time_s)


def _gate(rows: LogRows, core: Core, i: int, time_s: float) -> int:
    experts, counts = rows.items("experts", i).tolist(), rows.items("token_counts", i).tolist()
    # After the token counts of the experts come those of each row, where the predictor needs them.
    row_counts = np.array(counts[len(experts) :], np.int32).reshape(-1, rows.experts)
    return core.gate(
        int(rows.column("layer")[i]),
        rows.gate_rows(i),
        experts,
        counts[: len(experts)],
        time_s,
        row_counts if row_counts.size else None,
    )


def _foresight(rows: LogRows, core: Core, i: int, time_s: float) -> int:
    ends = np.cumsum(rows.items("token_counts", i))
    steps = np.split(rows.items("experts", i), ends)[:-1]
    return core.foresight(int(rows.column("ticket")[i]), [step.tolist() for step in steps], time_s)


_FEEDERS: dict[str, Callable[[LogRows, Core, int, float], int]] = {
    "seed_store": _seed_store,
    "preload": lambda rows, core, i, t: core.preload(rows.items("experts", i).tolist(), t),
    "begin_iteration": _begin_iteration,
    "gate": _gate,
    "speculation": lambda rows, core, i, t: core.speculation(
        int(rows.column("layer")[i]), int(rows.column("target")[i]), rows.gate_rows(i), t
    ),
    "search_done": lambda rows, core, i, t: core.search_done(int(rows.column("ticket")[i]), t),
    "loaded": lambda rows, core, i, t: core.loaded(int(rows.column("expert")[i]), t),
    "paused": lambda rows, core, i, t: core.paused(
        int(rows.column("expert")[i]), int(rows.column("bytes")[i]), t
    ),
    "load_failed": lambda rows, core, i, t: core.load_failed(
        int(rows.column("expert")[i]), str(rows.column("reason")[i]), t
    ),
    "computed": lambda rows, core, i, t: core.computed(
        int(rows.column("layer")[i]), rows.items("experts", i).tolist(), t
    ),
    "end_iteration": lambda rows, core, i, t: core.end_iteration(t, rows.items("requests", i).tolist()),
    "foresight": _foresight,
}

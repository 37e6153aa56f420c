"""Route CSVs (`# route_trace v1`): which experts a streaming engine's gates chose, token by token, and which
of them its cache held. docs/routing-format.md says what each column means."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from ..errors import TraceError
from .files import unreadable_kind
from .routing_check import ROW_SUM_TOLERANCE

PREFILL, DECODE = 0, 1  # values of `phase`
COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes")
MAGIC = b"# route_trace"
_MAX_EXPERTS = 65_535  # ids are stored as u16
_REMEDY = "Record the trace again, or repair the row."
_SHAPE = re.compile(
    r"# model=(.+?)(?: arch=\S+)? n_layer=([0-9]{1,4}) n_expert=([0-9]{1,6}) n_expert_used=([0-9]{1,6})"
)
_LAYER = re.compile(r"# layer=([0-9]{1,4}) expert_bytes=([0-9]{1,15}) dense_bytes=([0-9]{1,15})")
_WHOLE = "^[0-9]{1,15}$"
_DECIMAL = r"^[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?$"

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RouteTrace:
    """A route CSV. A cell is what one token chose in one layer: C cells in the file's order, K slots each.

    model         name of the model's file
    expert_bytes  i64 [L], bytes of one expert of each layer that has experts
    layer_numbers i64 [L], their numbers in the file, where layers without experts count too
    turn, phase, step, layer   i64 [C]; layers are 0 … L − 1 here
    expert        i64 [C, K], the largest weight first
    weight        f64 [C, K], as applied
    residency     i64 [C, K]: 0 a miss, 1 a hit, 2 a hit on an expert that a prefetch had brought
    read_bytes    i64 [C, K], bytes that the engine read for it
    """

    path: Path
    model: str
    experts: int
    expert_bytes: Int64s
    layer_numbers: Int64s
    turn: Int64s
    phase: Int64s
    step: Int64s
    layer: Int64s
    expert: Int64s
    weight: npt.NDArray[np.float64]
    residency: Int64s
    read_bytes: Int64s

    @property
    def layers(self) -> int:
        """L"""
        return len(self.expert_bytes)

    @property
    def top_k(self) -> int:
        """K"""
        return int(self.expert.shape[1])


def first_bytes(path: Path, count: int | None) -> bytes:
    """The first `count` bytes of a file, all of them for None."""
    kind = unreadable_kind(path)
    if kind is not None:
        raise TraceError(path, f"this is {kind}.", remedy="Name a regular file.")
    try:
        with path.open("rb") as file:
            return file.read(-1 if count is None else count)
    except FileNotFoundError:
        raise TraceError(path, "no such file.") from None
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror}).", remedy="Check the file.") from None


def read_route_csv(path: str | Path) -> RouteTrace:
    """Read and check a whole route CSV. Raises `TraceError` for the first thing that is wrong."""
    path = Path(path)
    head = _Head(path, first_bytes(path, None))
    values = {name: head.column(name) for name in COLUMNS}
    top_k, count = head.top_k, len(values["turn"])
    refuse = head.refuse
    if count == 0:
        raise TraceError(path, "no rows.", remedy="Record at least one prompt.")
    refuse("phase", values["phase"] > DECODE, values, "0 is prefill, 1 is decode")
    known = np.flatnonzero(head.layer_bytes)
    number = np.full(len(head.layer_bytes) + 1, -1)  # the last place: layers that the header does not have
    number[known] = np.arange(len(known))
    layer = number[np.minimum(values["layer"], len(head.layer_bytes))]
    refuse("layer", layer < 0, values, "the header has no experts for that layer")
    refuse("slot", values["slot"] != np.arange(count) % top_k, values, f"slots 0 … {top_k - 1} must follow")
    refuse("expert", values["expert"] >= head.experts, values, f"the layer has 0 … {head.experts - 1}")
    refuse("weight", values["weight"] > 1, values, "routing weights must be in [0, 1]")
    refuse("residency", values["residency"] > 2, values, "0 is a miss, 1 a hit, 2 a hit of a prefetch")
    own = head.layer_bytes[values["layer"]]
    read = values["expert_bytes"]
    refuse("expert_bytes", (read != 0) & (read != own), values, "neither 0 nor the header's for that layer")
    if count % top_k:
        raise TraceError(path, f"{count} rows are no multiple of {top_k}.", place="end", remedy=_REMEDY)

    cells = {name: value.reshape(-1, top_k) for name, value in values.items()}
    for name in ("turn", "phase", "step", "layer"):
        differs = cells[name] != cells[name][:, :1]
        refuse(name, differs.ravel(), values, "differs within the slots of one token")
    ordered = np.sort(cells["expert"], axis=1)
    twice = np.repeat((ordered[:, 1:] == ordered[:, :-1]).any(axis=1), top_k)
    refuse("expert", twice, values, "a token chose the same expert twice")
    heavy = np.repeat(cells["weight"].sum(axis=1) > 1 + ROW_SUM_TOLERANCE, top_k)
    refuse("weight", heavy, values, "the token's weights sum to more than 1")
    return RouteTrace(
        path=path,
        model=head.model,
        experts=head.experts,
        expert_bytes=head.layer_bytes[known],
        layer_numbers=known,
        turn=cells["turn"][:, 0],
        phase=cells["phase"][:, 0],
        step=cells["step"][:, 0],
        layer=layer.reshape(-1, top_k)[:, 0],
        expert=cells["expert"],
        weight=cells["weight"],
        residency=cells["residency"],
        read_bytes=cells["expert_bytes"],
    )


class _Head:
    """The header of a route CSV, and access to the columns under it."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        lines, self._first_line = [], 1
        rest = content.removeprefix(b"\xef\xbb\xbf")
        while rest.startswith(b"#"):
            line, _, rest = rest.partition(b"\n")
            lines.append(line.decode("utf-8", "backslashreplace").rstrip())
            self._first_line += 1
        if not lines or lines[0] != "# route_trace v1":
            found = (lines[0] if lines else "nothing")[:60]
            remedy = "Version 1 is read; export that."
            raise TraceError(path, f"{found!r}, not '# route_trace v1'.", place="line 1", remedy=remedy)
        shapes = [match for text in lines if (match := _SHAPE.fullmatch(text))]
        if len(shapes) != 1:
            problem = f"{len(shapes)} lines '# model=… n_layer=… n_expert=… n_expert_used=…', not 1."
            raise TraceError(path, problem, place="header", remedy=_REMEDY)
        self.model = PurePosixPath(shapes[0][1]).name.removesuffix(".gguf")
        layers, self.experts, self.top_k = (int(number) for number in shapes[0].groups()[1:])
        sizes = {int(match[1]): int(match[2]) for text in lines if (match := _LAYER.fullmatch(text))}
        if sorted(sizes) != list(range(layers)) or not any(sizes.values()):
            problem = f"n_layer={layers}, but {len(sizes)} lines '# layer=… expert_bytes=…' with sizes."
            raise TraceError(path, problem, place="header", remedy=_REMEDY)
        if not 1 <= self.top_k <= self.experts <= _MAX_EXPERTS:
            problem = f"n_expert_used={self.top_k} of n_expert={self.experts} (at most {_MAX_EXPERTS})."
            raise TraceError(path, problem, place="header", remedy=_REMEDY)
        self.layer_bytes = np.array([sizes[layer] for layer in range(layers)])
        header, _, rows = rest.partition(b"\n")
        self._first_line += 1
        names = header.decode("utf-8", "backslashreplace").strip().split(",")
        for name in COLUMNS:
            if names.count(name) != 1:
                problem = f"{names.count(name)} columns of that name (found: {', '.join(names)[:200]})."
                raise TraceError(path, problem, place=f"column {name}", remedy=_REMEDY)
        self._table = self._split(names, rows.rstrip())

    def _split(self, names: list[str], rows: bytes) -> Any:
        ragged: list[Any] = []

        def remember(row: Any) -> str:
            ragged.append(row)
            return "error"

        labels = [name if name in COLUMNS else f"{place}:{name}" for place, name in enumerate(names)]
        types = {name: pa.binary() for name in COLUMNS}
        if not rows:
            return pa.table({name: pa.array([], kind) for name, kind in types.items()})
        if not rows.isascii():  # pyarrow decodes a ragged row as UTF-8 before it hands it over
            rows = rows.decode("utf-8", "backslashreplace").encode()
        try:
            return pacsv.read_csv(
                io.BytesIO(rows),
                read_options=pacsv.ReadOptions(column_names=labels, use_threads=False),
                parse_options=pacsv.ParseOptions(
                    quote_char=False, ignore_empty_lines=False, invalid_row_handler=remember
                ),
                convert_options=pacsv.ConvertOptions(include_columns=list(COLUMNS), column_types=types),
            )
        except pa.ArrowInvalid as error:
            if not ragged:
                reason = str(error).splitlines()[0].rstrip(".")
                raise TraceError(self.path, f"not a table ({reason}).", remedy=_REMEDY) from None
            row = ragged[0]
            raise TraceError(
                self.path,
                f"{row.actual_columns} cells, but {row.expected_columns} columns ({row.text[:80]!r}).",
                place=self._place(row.number - 1),
                remedy=_REMEDY,
            ) from None

    def column(self, name: str) -> npt.NDArray[Any]:
        """The numbers of a column: f64 for `weight`, else i64 of 0 or more."""
        cells = self._table[name].combine_chunks()
        decimal = name == "weight"
        plain = np.asarray(pc.match_substring_regex(cells, _DECIMAL if decimal else _WHOLE))
        if not plain.all():
            row = int(np.argmin(plain))
            found = cells[row].as_py().decode("utf-8", "backslashreplace")[:60]
            problem = f"{found!r}: {'a number' if decimal else 'a whole number'} of 0 or more is expected."
            remedy = "Record with an engine that knows its routing weights." if found == "nan" else _REMEDY
            raise TraceError(self.path, problem, place=f"{self._place(row)}, column {name}", remedy=remedy)
        return np.asarray(cells.cast(pa.string()).cast(pa.float64() if decimal else pa.int64()))

    def refuse(
        self, name: str, bad: npt.NDArray[np.bool_], values: dict[str, npt.NDArray[Any]], problem: str
    ) -> None:
        """Raise `TraceError` for the first row of `bad`, if there is one."""
        if bad.any():
            row = int(np.argmax(bad))
            place = f"{self._place(row)}, column {name}"
            raise TraceError(self.path, f"{values[name][row]}: {problem}.", place=place, remedy=_REMEDY)

    def _place(self, row: int) -> str:
        return f"row {row + 1} (line {self._first_line + row})"

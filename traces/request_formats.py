"""The request trace formats, told apart by their columns; a further format is one more row of `FORMATS`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import TraceError


@dataclass(frozen=True)
class RequestFormat:
    """Where a format keeps arrival time, prompt length and output length.

    `ticks_per_unit` says how many nanoseconds one unit of a numeric time has; a date needs no unit.
    """

    name: str
    time: str
    prompt: str
    output: str
    ticks_per_unit: int

    @property
    def columns(self) -> tuple[str, str, str]:
        """Columns that must be present, in the order (time, prompt, output)."""
        return self.time, self.prompt, self.output


SECOND = 1_000_000_000
MILLISECOND = 1_000_000

AZURE = RequestFormat("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", SECOND)

FORMATS = (
    AZURE,  # Azure/AzurePublicDataset, LLM inference traces of 2023 and 2024
    RequestFormat("vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens", SECOND),
    RequestFormat("mooncake", "timestamp", "input_length", "output_length", MILLISECOND),
)


def recognise(path: Path, names: Sequence[str]) -> RequestFormat:
    """The first format whose columns are all among `names` (any order, further columns allowed).

    Raises TraceError naming the columns found and those expected.
    """
    for form in FORMATS:
        if set(form.columns) <= set(names):
            _refuse_repeated(path, form, names)
            return form
    best = max(FORMATS, key=lambda form: len(set(form.columns) & set(names)))
    missing = [column for column in best.columns if column not in names]
    if len(missing) == len(best.columns):
        problem = "these are not the columns of a request trace"
    else:
        problem = f"missing column {', '.join(missing)} of the {best.name} format"
    found = ", ".join(repr(name[:40]) for name in names[:12]) + (", …" if len(names) > 12 else "")
    expected = "; ".join(f"{', '.join(form.columns)} ({form.name})" for form in FORMATS)
    raise TraceError(
        path,
        f"{problem} (found: {found or 'none'}; expected: {expected}).",
        place="header",
        remedy="Rename the columns to those of one format.",
    )


def _refuse_repeated(path: Path, form: RequestFormat, names: Sequence[str]) -> None:
    for column in form.columns:
        if list(names).count(column) > 1:
            raise TraceError(
                path,
                f"column {column} appears {list(names).count(column)} times.",
                place="header",
                remedy="Keep one of them.",
            )

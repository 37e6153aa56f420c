"""How numbers and tables look."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from ..serving.cells import CellKey

_PIPED_WIDTH = 160  # a pipe has no width: wide enough that no table wraps


def console() -> Console:
    """Standard output; plain text of a fixed width when it is piped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH, soft_wrap=False)


def grid_table(keys: Iterable[CellKey]) -> Table:
    """A table whose first columns tell the cells apart, as `cell_parts` does."""
    keys = list(keys)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("policy", "cache"):
        table.add_column(name, no_wrap=True)
    if len({key.hardware for key in keys}) > 1:
        table.add_column("hardware", no_wrap=True)
    if len({key.rate_per_s for key in keys}) > 1:
        table.add_column("rate", justify="right", no_wrap=True)
    return table


def number(value: float | None) -> str:
    """Three significant digits; n/a where there is none."""
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(share: float | None) -> str:
    """A share in percent; n/a where there is none."""
    return "n/a" if share is None else f"{100 * share:.1f}%"


def gigabytes(count: int | None) -> str:
    """Bytes as GB of 10^9."""
    return "n/a" if count is None else number(count / 1e9)

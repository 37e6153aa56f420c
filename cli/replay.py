"""`finemoe replay`: does a fresh core decide what the recorded one decided?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXIT_DIFFERS = 1
_LOG = "decisions.parquet"


def replay_command(
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS", help="Results directory, or decisions.parquet.")
    ],
) -> None:
    """Feed the recorded events to a fresh core: identical, or the first command that differs."""
    from ..serving.replay import replay

    differs = False
    for path in _logs(results):
        report = replay(path)
        size = f"{report.events:,} events, {report.commands:,} commands, {report.iterations:,} iterations"
        found = report.divergence
        if found is None:
            print(f"{path}: identical ({size})")
            continue
        differs = True
        print(f"{path}: DIFFERS at #{found.sequence} in iteration {found.iteration} ({size})")
        for line in found.context:
            print(f"  before    {line}")
        print(f"  logged    {found.logged}")
        print(f"  replayed  {found.replayed}")
    if differs:
        raise typer.Exit(EXIT_DIFFERS)


def _logs(results: Path) -> list[Path]:
    """The decision logs of a results directory: its own, or one per cell of a grid."""
    cells = sorted(results.glob(f"*/{_LOG}"))
    return cells if cells and not (results / _LOG).exists() else [results]

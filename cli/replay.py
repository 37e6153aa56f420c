"""`finemoe replay`: does a fresh core decide what the recorded one decided?"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
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
    """Feed the recorded events to a fresh core: identical, or where the decisions or the log differ."""
    from ..serving.replay import replay

    differs = False
    for path in _logs(results):
        with redirect_stdout(sys.stderr):  # what a policy of the user's prints is no result
            report = replay(path)
        size = f"{report.events:,} events, {report.commands:,} commands, {report.iterations:,} iterations"
        if report.identical:
            print(f"{path}: identical ({size})")
            continue
        differs = True
        found = report.divergence
        altered = f"the log is not the one that was written: {'; '.join(report.alterations)}"
        if found is None:
            print(f"{path}: DIFFERS: {altered} ({size})")
            continue
        print(f"{path}: DIFFERS at #{found.sequence} in iteration {found.iteration} ({size})")
        if report.alterations:
            print(f"  altered   {altered}")
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

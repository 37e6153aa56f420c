"""A grid of cells, one after another, and their results directory: the same in both worlds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from .. import __version__
from ..errors import CapacityError, SettingError
from .cells import CellKey, cell_labels, cell_names
from .metrics import CellSummary
from .outcome import CellOutcome, Progress, series_of, summary_of
from .results import Results, ResultsWriter
from .settings import RunSettings, settings_dict
from .settings_file import to_toml

if TYPE_CHECKING:
    import pyarrow as pa

    from ..policy.system import System
    from ..traces.requests import RequestSelection
    from .selection import Requests

RESULTS_ROOT = Path("finemoe-results")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a grid. Where it cannot run, `problem` is its status and `memory`, its memory split, None.

    `requests` arrive at the cell's rate; `name` is that of its folder. `hardware` is a profile or a backend.
    """

    system: System
    expert_cache: str
    expert_cache_bytes: int
    hardware: str
    rate_per_s: float | None
    requests: RequestSelection
    memory: msgspec.Struct | None = None
    problem: str = ""
    name: str = ""
    label: str = ""

    @property
    def key(self) -> CellKey:
        """What tells the cell from the others of its grid."""
        return CellKey(self.system.name, self.expert_cache, self.hardware, self.rate_per_s)

    def sizes(self) -> dict[str, int]:
        """Its memory split as people read it: column of a table → number, bytes where it names GB."""
        return {}


class Plan(Protocol):
    """A grid of runs, ready to go."""

    @property
    def settings(self) -> RunSettings:
        """The resolved settings."""

    @property
    def cells(self) -> Sequence[Cell]:
        """All cells, those that cannot run included."""

    @property
    def training(self) -> Requests:
        """Requests that fill the store before the run."""

    @property
    def trace(self) -> Mapping[str, Any]:
        """What the results say of the request trace."""

    @property
    def evidence(self) -> Mapping[str, Any]:
        """Where the figures come from."""

    @property
    def machines(self) -> Mapping[str, str]:
        """Name of each machine → what it is."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to say before the run."""


C = TypeVar("C", bound=Cell)

#: Called now and then during each cell.
OnProgress = Callable[[Cell, Progress], None]


@dataclass(frozen=True)
class Served:
    """A cell that was run: its outcome on so many devices, its wall time, and what is to be said of it."""

    outcome: CellOutcome
    devices: int
    wall_s: float
    notes: tuple[str, ...]
    ttft_defined: bool = True


class CellSink:
    """Where a running cell reports to: its progress, and what is written before its end."""

    def __init__(self, cell: Cell, writer: ResultsWriter, on_progress: OnProgress | None) -> None:
        self._cell, self._writer, self._on_progress = cell, writer, on_progress

    @property
    def shown(self) -> bool:
        """Whether anybody wants to know of progress."""
        return self._on_progress is not None

    def progress(self, progress: Progress) -> None:
        """Say how far the cell is."""
        if self._on_progress is not None:
            self._on_progress(self._cell, progress)

    def decisions(self, table: pa.Table) -> None:
        """Write the decision log. As soon as it is complete: that frees its memory, and leaves little to
        write at the end."""
        self._writer.write_decisions(self._cell.name, table)

    def folder(self) -> Path:
        """The folder of the unfinished cell, for files that are written while it runs."""
        return self._writer.cell_folder(self._cell.name)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a grid. `results`: the finished cells, which are on disk as well; None without any."""

    def __init__(self, results: Results | None) -> None:
        super().__init__("interrupted")
        self.results = results


def run_grid(
    plan: Plan,
    serve: Callable[[Cell, CellSink], Served],
    output: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Results:
    """Run every cell that can run with `serve`, and write the results directory.

    Raises CapacityError where none fits, and `Interrupted` on Ctrl-C, with the finished cells.
    """
    names = tuple(cell.name for cell in plan.cells)
    writer = (
        ResultsWriter.fresh(RESULTS_ROOT, names, plan.evidence)
        if output is None
        else ResultsWriter.replacing(output, names, plan.evidence)
    )
    toml = to_toml(plan.settings)
    runs = [_not_run(cell, cell.problem or "NOT RUN: interrupted") for cell in plan.cells]
    try:
        writer.write_summary(_results(plan, runs), toml)
        for place, cell in enumerate(plan.cells):
            if cell.problem:
                continue
            try:
                served = serve(cell, CellSink(cell, writer, on_progress))
            except CapacityError as error:
                runs[place] = _not_run(cell, f"DOES NOT FIT: {error}")
                writer.drop_cell(cell.name)
                continue
            summary = summary_of(
                cell,
                served.outcome,
                plan.settings,
                devices=served.devices,
                wall_s=served.wall_s,
                notes=served.notes,
                ttft_defined=served.ttft_defined,
            )
            series = series_of(cell, served.outcome, served.devices)
            writer.write_cell(cell.name, served.outcome.requests, served.outcome.iterations, series)
            runs[place] = summary  # only now: what is called finished is on disk
            writer.write_summary(_results(plan, runs), toml)
        if not any(run.ran for run in runs):
            raise CapacityError(runs[0].status.removeprefix("DOES NOT FIT: "))
        writer.write_summary(_results(plan, runs), toml)
        directory = writer.commit()
    except KeyboardInterrupt:
        if not any(run.ran for run in runs):
            writer.discard()
            raise Interrupted(None) from None
        directory = writer.keep_partial(_results(plan, runs), toml)
        raise Interrupted(_results(plan, runs, directory)) from None
    except BaseException as error:
        # What cannot be written is dropped, to give its space back; after any other failure the finished
        # cells stay in DIR.partial.
        if isinstance(error, SettingError) or not any(run.ran for run in runs):
            writer.discard()
        else:
            error.add_note(f"finished runs are kept in {writer.staging}")
        raise
    return _results(plan, runs, directory)


def named_cells(cells: list[C]) -> tuple[C, ...]:
    """The cells with their names. SettingError where two would share a folder."""
    keys = [cell.key for cell in cells]
    names = zip(cell_names(keys), cell_labels(keys), strict=True)
    named = [replace(cell, name=name, label=label) for cell, (name, label) in zip(cells, names, strict=True)]
    by_folder: dict[str, Cell] = {}
    for cell in named:
        other = by_folder.setdefault(cell.name, cell)
        if other is not cell:
            raise SettingError(
                f"{other.label!r} and {cell.label!r} would both be kept in the folder {cell.name}. "
                "Write --expert-cache, --hardware or --rate of one of them differently, or leave it out."
            )
    return tuple(named)


def refuse_unless_any_runs(cells: Sequence[Cell], without: str) -> None:
    """SettingError where no cell can run because systems are INACTIVE `without` something, CapacityError
    where they do not fit."""
    if all(cell.problem for cell in cells):
        what, _, why = cells[0].problem.partition(": ")
        if what == "INACTIVE":
            raise SettingError(f"--policy {cells[0].system.name} is INACTIVE {without}: {why}.")
        raise CapacityError(why)


def _not_run(cell: Cell, status: str) -> CellSummary:
    return CellSummary(
        policy=cell.system.name,
        expert_cache=cell.expert_cache,
        expert_cache_bytes=cell.expert_cache_bytes,
        hardware=cell.hardware,
        rate_per_s=cell.rate_per_s,
        status=status,
    )


def _results(plan: Plan, runs: list[CellSummary], directory: Path | None = None) -> Results:
    return Results(
        runs=tuple(runs),
        config=settings_dict(plan.settings),
        trace=plan.trace,
        evidence=plan.evidence,
        version=__version__,
        partial=any(run.status.startswith("NOT RUN") for run in runs),
        directory=directory,
    )

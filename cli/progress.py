"""The progress bar of a grid: the run's own time, iterations per second, ETA."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from ..serving.grid import Cell, Plan
    from ..serving.outcome import Progress


class ProgressBar:
    """A line on standard error per running cell; nothing at all where `shown` is false."""

    def __init__(self, plan: Plan, *, shown: bool) -> None:
        self._cells = [cell for cell in plan.cells if not cell.problem]
        self._kind = " simulated" if plan.settings.backend == "sim" else ""
        self._shown = shown
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._cell: Cell | None = None
        self._began_s = 0.0

    def __enter__(self) -> ProgressBar:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TextColumn("{task.fields[speed]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, cell: Cell, progress: Progress) -> None:
        """Show how far a cell is."""
        if self._bar is None:
            return
        if cell is not self._cell or self._task is None:
            self._start(self._bar, cell, progress)
        assert self._task is not None
        elapsed_s = max(time.perf_counter() - self._began_s, 1e-3)
        speed = f"{progress.run_s:,.0f} s{self._kind}, {progress.iterations / elapsed_s:,.0f} iterations/s"
        self._bar.update(self._task, completed=progress.finished, speed=speed)

    def _start(self, bar: RichProgress, cell: Cell, progress: Progress) -> None:
        if self._task is not None:
            bar.remove_task(self._task)
        place = next(i for i, one in enumerate(self._cells, 1) if one is cell)
        title = f"{place}/{len(self._cells)} {cell.label}"
        self._task = bar.add_task(title, total=progress.requests, speed="")
        self._cell = cell
        self._began_s = time.perf_counter()

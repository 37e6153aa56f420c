"""The results directory: what a run leaves behind, written whole or marked as partial.

    DIR/summary.json            every run's figures, the settings, the trace, evidence and version
    DIR/config.resolved.toml    settings that rerun it exactly (`finemoe-sim --config FILE`)
    DIR/wall.json               wall times, which differ from run to run and stand in no other file
    DIR/requests.parquet        one row per finished request
    DIR/iterations.parquet      one row per step
    DIR/timeseries.parquet      one row per second
    DIR/decisions.parquet       the core's event and command log, where it is kept
    DIR/routing.parquet         what the gates said, of a real run: a routing trace

A grid of several cells has one folder per cell with the Parquet files, named by policy and cache
(`DIR/lru-24GB/`) and by hardware and rate where the grid has several (`DIR/lru-24GB-h100-0.5rps/`); the other
files stand in DIR and cover all cells. Everything is written into `DIR.partial` and renamed at the end, so a
killed run leaves the old results as they were and `DIR.partial` with the finished cells beside them. What is
not whole yet has a name that ends in `.part`. The same settings give the same bytes, wall.json aside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import SettingError
from .cells import cell_names
from .logs import IterationLog, RequestLog
from .metrics import CellSummary
from .output_folder import FORMAT, SUMMARY, beside, check_output, identity, unwritable
from .sweep import saturation

if TYPE_CHECKING:
    import pyarrow

_ROW_GROUP = 65_536  # rows that are encoded at a time: bounds memory


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a grid of runs gave. `partial`: it was interrupted, and some cells did not run."""

    runs: tuple[CellSummary, ...]
    config: Mapping[str, Any]
    trace: Mapping[str, Any]
    evidence: Mapping[str, Any]
    version: str
    partial: bool = False
    directory: Path | None = None

    def to_json(self, *, wall: bool = True) -> str:
        """The results as indented JSON; without `wall`, the same settings give the same text."""
        runs = [msgspec.to_builtins(run) for run in self.runs]
        if not wall:
            for run in runs:
                del run["wall_s"]
        payload = {
            "format": FORMAT,
            "partial": self.partial,
            "runs": runs,
            "saturation": saturation(self.runs),
            "config": self.config,
            "trace": self.trace,
            "evidence": self.evidence,
            "version": self.version,
        }
        return _json(payload)


def _json(payload: object) -> str:
    return msgspec.json.format(msgspec.json.encode(payload), indent=2).decode() + "\n"


class ResultsWriter:
    """Collects a run's files in `DIR.partial` and puts them in place with `commit`."""

    def __init__(self, directory: Path, cells: tuple[str, ...], evidence: Mapping[str, Any]) -> None:
        """Make `DIR.partial`, which must not exist, for the results of `cells` (names from `cell_names`).

        `evidence` goes into the metadata of every Parquet file.
        """
        self.directory = directory
        self._cells = cells
        self._evidence = msgspec.json.encode(evidence)
        self._staging = beside(directory, "partial")
        self._staging.mkdir(parents=True)
        # Held open so that its inode stands for it alone, also after another run has removed it.
        self._handle: int | None = os.open(self._staging, os.O_RDONLY)
        self._identity = identity(self._staging)

    @property
    def staging(self) -> Path:
        """DIR.partial."""
        return self._staging

    @classmethod
    def replacing(cls, directory: Path, cells: tuple[str, ...], evidence: Mapping[str, Any]) -> ResultsWriter:
        """Open a directory that is absent, empty, or holds older results, which `commit` replaces.

        SettingError for anything else: nobody's files are overwritten.
        """
        check_output(directory)
        old = beside(directory, "old")
        try:
            if old.exists() and not directory.exists():  # killed between the two renames of `commit`
                os.rename(old, directory)
            for place in (beside(directory, "partial"), old):
                if place.exists():
                    shutil.rmtree(place)
            return cls(directory, cells, evidence)
        except OSError as error:
            raise unwritable(directory, error) from error

    @classmethod
    def fresh(cls, root: Path, cells: tuple[str, ...], evidence: Mapping[str, Any]) -> ResultsWriter:
        """Open the first free numbered folder of `root`: 0001, 0002, …; those of killed runs are not free."""
        number = 1
        while True:
            directory = root / f"{number:04d}"
            try:
                if not os.path.lexists(directory) and not os.path.lexists(beside(directory, "old")):
                    return cls(directory, cells, evidence)
            except FileExistsError:  # of a killed run, or of another process that took the number just now
                pass
            except OSError as error:
                raise unwritable(root, error) from error
            number += 1

    def write_decisions(self, cell: str, decisions: pyarrow.Table) -> None:
        """Write the decision log of a cell that still runs; SettingError where it cannot be written."""
        with self._writing():
            self._write_tables(cell, decisions=decisions)

    def write_cell(
        self, cell: str, requests: RequestLog, iterations: IterationLog, series: pyarrow.Table
    ) -> None:
        """Write the other Parquet files of a finished cell; its folder appears when all are written.

        Raises SettingError where they cannot be written.
        """
        with self._writing():
            part = self._write_tables(
                cell,
                requests=requests.to_arrow().sort_by("request"),
                iterations=iterations.to_arrow(),
                timeseries=series,
            )
            if len(self._cells) > 1:
                os.rename(part, self._staging / cell)
                return
            for path in part.iterdir():
                os.rename(path, self._staging / path.name)
            part.rmdir()

    def cell_folder(self, cell: str) -> Path:
        """The folder of a cell that still runs, for files that are written by others while it does."""
        with self._writing():
            return self._write_tables(cell)

    def drop_cell(self, cell: str) -> None:
        """Drop what was written of a cell that will not be finished."""
        with self._writing():
            part = self._staging / f"{cell}.part"
            if part.exists():
                shutil.rmtree(part)

    def _write_tables(self, cell: str, **tables: pyarrow.Table) -> Path:
        """Write tables into the folder of an unfinished cell, which it returns."""
        part = self._staging / f"{cell}.part"
        part.mkdir(exist_ok=True)
        for name, table in tables.items():
            self._write(table, part / f"{name}.parquet")
        return part

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What the operating system says about a write as SettingError; also where DIR.partial is no longer
        the one made here, because another run took the same name."""
        try:
            if identity(self._staging) != self._identity:
                raise SettingError(
                    f"--output: {self._staging} was taken over by another run. Give each its own directory."
                )
            yield
        except OSError as error:
            raise unwritable(self.directory, error) from error

    def _write(self, table: pyarrow.Table, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        metadata = (table.schema.metadata or {}) | {b"finemoe.evidence": self._evidence}
        words = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
        pq.write_table(  # dictionaries and statistics of numbers would take as long again, for few bytes
            table.replace_schema_metadata(metadata),
            path,
            compression="zstd",
            row_group_size=_ROW_GROUP,
            use_dictionary=words or False,
            write_statistics=False,
        )

    def write_summary(self, results: Results, config_toml: str) -> None:
        """Write the files that cover all cells; called after each cell, so that a killed run keeps them."""
        names = cell_names(run.key for run in results.runs)
        wall = {name: run.wall_s for name, run in zip(names, results.runs, strict=True)}
        texts = {
            SUMMARY: results.to_json(wall=False),
            "config.resolved.toml": config_toml,
            "wall.json": _json({"wall_s": wall}),
        }
        with self._writing():
            for name, text in texts.items():
                part = self._staging / f"{name}.part"
                part.write_text(text, "utf-8")
                os.replace(part, self._staging / name)

    def commit(self) -> Path:
        """Put the results in place of what was there; returns the directory."""
        old = beside(self.directory, "old")
        with self._writing():
            if self.directory.exists():
                os.rename(self.directory, old)
            os.rename(self._staging, self.directory)
            if old.exists():
                shutil.rmtree(old)
        self._close()
        return self.directory

    def keep_partial(self, results: Results, config_toml: str) -> Path:
        """Keep the cells that an interrupted run finished: in place, or in `DIR.partial` where older results
        stand. Folders and summary agree: what `results` does not call finished is removed."""
        if identity(self.directory) == self._identity:  # interrupted when all was in place
            return self.directory
        with self._writing():
            names = cell_names(run.key for run in results.runs)
            ran = {name for name, run in zip(names, results.runs, strict=True) if run.ran}
            for entry in self._staging.iterdir():
                if entry.is_dir() and entry.name not in ran:
                    shutil.rmtree(entry)
        self.write_summary(results, config_toml)
        if not (self.directory / SUMMARY).exists():
            return self.commit()
        self._close()
        return self._staging

    def discard(self) -> None:
        """Drop what was written, as far as it is still there and this run's own."""
        if identity(self._staging) == self._identity:
            shutil.rmtree(self._staging, ignore_errors=True)
        self._close()

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

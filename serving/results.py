"""The results directory: what a run leaves behind, written whole or marked as partial.

    DIR/summary.json            every run's figures, the settings, the trace, evidence and version
    DIR/config.resolved.toml    settings that rerun it exactly (`finemoe-sim --config FILE`)
    DIR/wall.json               wall times, which differ from run to run and stand in no other file
    DIR/requests.parquet        one row per finished request
    DIR/iterations.parquet      one row per step
    DIR/decisions.parquet       the core's event and command log, where it is kept

A grid of several cells has one folder per cell, `DIR/POLICY-CACHE/`, with the three Parquet files; the other
files stand in DIR and cover all cells. Everything is written into `DIR.partial` and renamed at the end, so a
killed run leaves the old results as they were and `DIR.partial` with the finished cells beside them. The
same settings give the same bytes, wall.json aside.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import SettingError
from .logs import IterationLog, RequestLog
from .metrics import CellSummary

if TYPE_CHECKING:
    import pyarrow

FORMAT = "finemoe results 1"
_SUMMARY = "summary.json"
_CELL_FILES = frozenset({"requests.parquet", "iterations.parquet", "decisions.parquet"})
_TOP_FILES = frozenset({_SUMMARY, "config.resolved.toml", "wall.json"})


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
            "config": self.config,
            "trace": self.trace,
            "evidence": self.evidence,
            "version": self.version,
        }
        return _json(payload)


def _json(payload: object) -> str:
    return msgspec.json.format(msgspec.json.encode(payload), indent=2).decode() + "\n"


def cell_name(policy: str, expert_cache: str) -> str:
    """The folder of a cell: `finemoe-24GB`."""
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", f"{policy}-{expert_cache}")


class ResultsWriter:
    """Collects a run's files in `DIR.partial` and puts them in place with `commit`."""

    def __init__(self, directory: Path, cells: tuple[str, ...], evidence: Mapping[str, Any]) -> None:
        """Make `DIR.partial`, which must not exist, for the results of `cells` (names from `cell_name`).

        `evidence` goes into the metadata of every Parquet file.
        """
        self.directory = directory
        self._cells = cells
        self._evidence = msgspec.json.encode(evidence)
        self._staging = _beside(directory, "partial")
        self._staging.mkdir(parents=True)

    @classmethod
    def replacing(cls, directory: Path, cells: tuple[str, ...], evidence: Mapping[str, Any]) -> ResultsWriter:
        """Open a directory that is absent, empty, or holds older results, which `commit` replaces.

        SettingError for anything else: nobody's files are overwritten.
        """
        old = _beside(directory, "old")
        try:
            if old.exists() and not directory.exists():  # killed between the two renames of `commit`
                os.rename(old, directory)
            leftovers = (_beside(directory, "partial"), old)
            for place in (directory, *leftovers):
                _check_ours(place)
            for place in leftovers:
                if place.exists():
                    shutil.rmtree(place)
            return cls(directory, cells, evidence)
        except OSError as error:
            raise _unwritable(directory, error) from error

    @classmethod
    def fresh(cls, root: Path, cells: tuple[str, ...], evidence: Mapping[str, Any]) -> ResultsWriter:
        """Open the first free numbered folder of `root`: 0001, 0002, …; those of killed runs are not free."""
        number = 1
        while True:
            directory = root / f"{number:04d}"
            try:
                if not directory.exists() and not _beside(directory, "old").exists():
                    return cls(directory, cells, evidence)
            except FileExistsError:  # of a killed run, or of another process that took the number just now
                pass
            except OSError as error:
                raise _unwritable(root, error) from error
            number += 1

    def write_cell(
        self,
        cell: str,
        requests: RequestLog,
        iterations: IterationLog,
        decisions: pyarrow.Table | None,
    ) -> None:
        """Write the Parquet files of one finished cell."""
        folder = self._staging / cell if len(self._cells) > 1 else self._staging
        folder.mkdir(exist_ok=True)
        self._write(requests.to_arrow().sort_by("request"), folder / "requests.parquet")
        self._write(iterations.to_arrow(), folder / "iterations.parquet")
        if decisions is not None:
            self._write(decisions, folder / "decisions.parquet")

    def _write(self, table: pyarrow.Table, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        metadata = (table.schema.metadata or {}) | {b"finemoe.evidence": self._evidence}
        words = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
        pq.write_table(  # dictionaries and statistics of numbers would take as long again, for few bytes
            table.replace_schema_metadata(metadata),
            path,
            compression="zstd",
            use_dictionary=words or False,
            write_statistics=False,
        )

    def write_summary(self, results: Results, config_toml: str) -> None:
        """Write the files that cover all cells; called after each cell, so that a killed run keeps them."""
        wall = {cell_name(run.policy, run.expert_cache): run.wall_s for run in results.runs}
        texts = {
            _SUMMARY: results.to_json(wall=False),
            "config.resolved.toml": config_toml,
            "wall.json": _json({"wall_s": wall}),
        }
        for name, text in texts.items():
            part = self._staging / f"{name}.part"
            part.write_text(text, "utf-8")
            os.replace(part, self._staging / name)

    def commit(self) -> Path:
        """Put the results in place of what was there; returns the directory."""
        old = _beside(self.directory, "old")
        try:
            if self.directory.exists():
                os.rename(self.directory, old)
            os.rename(self._staging, self.directory)
        except OSError as error:
            raise _unwritable(self.directory, error) from error
        if old.exists():
            shutil.rmtree(old)
        return self.directory

    def keep_partial(self) -> Path:
        """Keep what an interrupted run finished: in place, or in `DIR.partial` where older results stand."""
        return self._staging if (self.directory / _SUMMARY).exists() else self.commit()

    def discard(self) -> None:
        """Drop what was written: the run failed before its first cell was finished."""
        shutil.rmtree(self._staging)


def _beside(directory: Path, ending: str) -> Path:
    return directory.with_name(f"{directory.name}.{ending}")


def _unwritable(place: Path, error: OSError) -> SettingError:
    return SettingError(f"--output: {place} cannot be written ({error.strerror}). Choose another directory.")


def _check_ours(place: Path) -> None:
    """Raise SettingError unless `place` is absent, empty, or holds results and nothing else."""
    if not place.exists():
        return
    foreign = _foreign(place)
    if foreign is not None:
        raise SettingError(
            f"--output: {place} holds {foreign}, which is not FineMoE's. "
            "Choose an empty or new directory, or move that file away."
        )


def _foreign(place: Path) -> str | None:
    """The first entry of `place` that `ResultsWriter` did not write, or None."""
    if not place.is_dir():
        return "a file of that name"
    entries = sorted(entry.name for entry in place.iterdir())
    if not entries:
        return None
    try:
        summary = json.loads((place / _SUMMARY).read_text("utf-8"))
        ours = summary["format"] == FORMAT
        cells = {cell_name(run["policy"], run["expert_cache"]) for run in summary["runs"]}
    except (OSError, ValueError, LookupError, TypeError):
        return entries[0]
    for name in entries:
        if name in cells:
            inside = sorted(entry.name for entry in (place / name).iterdir())
            strange = [f"{name}/{entry}" for entry in inside if entry not in _CELL_FILES]
            if strange:
                return strange[0]
        elif not ours or name.removesuffix(".part") not in _CELL_FILES | _TOP_FILES:
            return name
    return None

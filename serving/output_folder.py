"""The results directory as a place: what belongs into it, and whose files are in the way.

Nobody's files are overwritten: a directory is used only if it is absent, empty, or holds results of this
program and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import SettingError
from .cells import CellKey, cell_names

FORMAT = "finemoe results 1"
SUMMARY = "summary.json"
CELL_FILES = frozenset(
    f"{name}.parquet" for name in ("requests", "iterations", "timeseries", "decisions", "routing")
)
TOP_FILES = frozenset({SUMMARY, "config.resolved.toml", "wall.json"})


def beside(directory: Path, ending: str) -> Path:
    """`DIR.ending`, next to `directory`."""
    return directory.with_name(f"{directory.name}.{ending}")


def identity(place: Path) -> tuple[int, int] | None:
    """What tells a directory from a later one of the same name; None where there is none."""
    try:
        found = place.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def check_output(directory: Path) -> None:
    """Raise SettingError unless results can be written as `directory`, with nobody's files in the way."""
    if directory.name in ("", "..") or "\0" in str(directory):
        raise SettingError(
            f"--output is {str(directory)!r}, which is not the name of a directory that could be replaced. "
            "Give a name of its own: --output DIR."
        )
    try:
        for place in (directory, beside(directory, "partial"), beside(directory, "old")):
            _check_ours(place)
    except OSError as error:
        raise unwritable(directory, error) from error


def unwritable(place: Path, error: OSError) -> SettingError:
    """What the operating system said, as the error of an option."""
    return SettingError(
        f"--output: {place} cannot be written ({error.strerror or error}). Choose another directory."
    )


def _check_ours(place: Path) -> None:
    """Raise SettingError unless `place` is absent, empty, or holds results and nothing else."""
    if place.is_symlink():
        raise SettingError(f"--output: {place} is a link. Give the directory itself.")
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
    if not _is_file(place / SUMMARY):
        return entries[0]
    try:
        summary = json.loads((place / SUMMARY).read_text("utf-8"))
        ours = summary["format"] == FORMAT
        cells = set(cell_names(summary_keys(summary)))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return entries[0]
    for name in entries:
        plain = name.removesuffix(".part")
        if name in cells or plain in cells:
            strange = _foreign_in_cell(place / name)
            if strange is not None:
                return strange
        elif not ours or plain not in CELL_FILES | TOP_FILES or not _is_file(place / name):
            return name
    return None


def summary_keys(summary: dict[str, Any]) -> list[CellKey]:
    """The cells of a summary.json; what is none raises LookupError or TypeError."""
    return [_key(run) for run in summary["runs"]]


def _key(run: dict[str, Any]) -> CellKey:
    run = {"hardware": "", "rate_per_s": None} | run  # results of version 0.1 had neither
    return CellKey(run["policy"], run["expert_cache"], run["hardware"], run["rate_per_s"])


def _foreign_in_cell(folder: Path) -> str | None:
    if folder.is_symlink() or not folder.is_dir():
        return folder.name
    for entry in sorted(folder.iterdir()):
        if entry.name not in CELL_FILES or not _is_file(entry):
            return f"{folder.name}/{entry.name}"
    return None


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()

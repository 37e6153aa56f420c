"""CRC-32C of every expert, in a file of the checkpoint: damage is found when an expert is first read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import _core
from ..errors import SettingError
from ..traces.files import replacing, unreadable_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .expert_layout import ExpertLayout

NAME = "finemoe-checksums.json"


def read_checksums(folder: Path, layout: ExpertLayout) -> NDArray[np.uint32] | None:
    """uint32 [L·J], or None where the checkpoint has none. SettingError for a file of another checkpoint."""
    path = folder / NAME
    _check_kind(path)
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
        values = np.array(content["crc32c"], np.uint32)
        pieces = content["pieces"]
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise SettingError(
            f"{path} cannot be read ({error}). Write it again: finemoe model checksum."
        ) from error
    if values.shape != (len(layout.file),) or pieces != layout.length.tolist():
        raise SettingError(
            f"{path} is of another checkpoint: {values.size} experts, {len(layout.file)} are here, or other "
            "sizes. Write it again: finemoe model checksum."
        )
    return values


def write_checksums(
    folder: Path, layout: ExpertLayout, on_expert: Callable[[int], None] = lambda _: None
) -> Path:
    """Read every expert once and write the file; `on_expert` is told each one that is done.

    Raises SettingError where the file cannot be written, TransferError where an expert cannot be read; no
    part of a file is left.
    """
    from .sources import file_source

    path = folder / NAME
    _check_kind(path)
    source = file_source(layout, None, direct=False)
    slab = np.empty(layout.slab_bytes, np.uint8)
    sums = []
    for expert in range(len(layout.file)):
        source.read(expert, slab)
        checksum = 0
        for place, length in zip(layout.place.tolist(), layout.length.tolist(), strict=True):
            checksum = _core.crc32c(slab[place : place + length], checksum)
        sums.append(checksum)
        on_expert(expert)
    try:
        with replacing(path) as partial:
            partial.write_text(json.dumps({"pieces": layout.length.tolist(), "crc32c": sums}) + "\n", "utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise SettingError(f"{path} cannot be written ({reason}). Check the folder and its space.") from error
    return path


def _check_kind(path: Path) -> None:
    kind = "a folder" if path.is_dir() else unreadable_kind(path)
    if kind is not None:
        raise SettingError(f"{path} is {kind}. Remove it, then: finemoe model checksum.")

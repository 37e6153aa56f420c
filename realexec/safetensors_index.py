"""Where each tensor of a safetensors checkpoint lies, read from the files' headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..traces.files import unreadable_kind

_LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class TensorPlace:
    """A tensor's bytes: `length` of them from `offset` of the checkpoint's file number `file`."""

    file: int
    offset: int
    length: int
    dtype: str  # safetensors' name: F32, BF16, …
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointIndex:
    """The files of a checkpoint and its tensors by name."""

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorPlace]


def read_index(folder: str | Path) -> CheckpointIndex:
    """Read the headers of a folder's safetensors files, no weights.

    Raises SettingError naming the file and what is wrong with it: none there, not safetensors, truncated, a
    tensor that the index promises and no file has.
    """
    folder = Path(folder)
    listed = folder / "model.safetensors.index.json"
    if listed.is_file():
        weight_map = _json(listed).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise SettingError(f"{listed} has no weight_map of file names. Save the checkpoint again.")
        names = sorted(set(weight_map.values()))
        if any("/" in name or "\\" in name for name in names):
            raise SettingError(f"{listed} names files outside its folder. Save the checkpoint again.")
    elif (folder / "model.safetensors").is_file():
        weight_map, names = {}, ["model.safetensors"]
    else:
        raise SettingError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json. Give the folder of a "
            "checkpoint in safetensors; other formats are not read."
        )
    files = tuple(folder / name for name in names)
    tensors: dict[str, TensorPlace] = {}
    for number, path in enumerate(files):
        for name, place in _header(path, number):
            if weight_map.get(name, path.name) == path.name:
                tensors[name] = place
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise SettingError(
            f"{folder}: {len(missing)} tensors of the index are in no file, the first {missing[0]}. "
            "Copy the checkpoint again."
        )
    return CheckpointIndex(folder, files, tensors)


def _header(path: Path, number: int) -> Iterator[tuple[str, TensorPlace]]:
    kind = unreadable_kind(path)
    if kind is not None:
        raise SettingError(f"{path} is {kind}. Give the folder of a checkpoint with regular files.")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > min(_LARGEST_HEADER, size - 8):
                raise SettingError(f"{path} is not safetensors, or truncated ({size} bytes). Copy it again.")
            header = json.loads(file.read(length))
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError):
        raise SettingError(f"{path} has a header that is no JSON. Copy it again.") from None
    if not isinstance(header, dict):
        raise SettingError(f"{path} has a header that is no table of tensors. Copy it again.")
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _place(path, number, name, entry, 8 + length, size)


def _place(path: Path, number: int, name: str, entry: Any, data: int, size: int) -> TensorPlace:
    try:
        begin, end = entry["data_offsets"]
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        elements = 1
        for extent in shape:
            elements *= extent
        whole = all(type(value) is int and value >= 0 for value in (begin, end, *shape))
        sound = (
            whole
            and begin <= end
            and end - begin == elements * _DTYPE_BYTES.get(dtype, (end - begin) / max(1, elements))
        )
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise SettingError(f"{path}: tensor {name} has a damaged entry in the header. Copy the file again.")
    if data + end > size:
        raise SettingError(
            f"{path} is truncated: {name} ends at byte {data + end}, the file at {size}. Copy it again."
        )
    return TensorPlace(number, data + begin, end - begin, dtype, shape)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError):
        raise SettingError(f"{path} is no JSON. Copy it again.") from None
    return content if isinstance(content, dict) else {}

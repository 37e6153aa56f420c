"""Arrays of npz and npy files, never through pickle; a `TraceError` for everything that is not one."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import TraceError
from .files import unreadable_kind

_MALFORMED = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
NPY_MAGIC = b"\x93NUMPY"


def array_names(path: Path) -> list[str]:
    """Names of the arrays of an npz archive; empty for what is no zip file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except _MALFORMED:
        return []


def load_npz(
    path: Path, names: Iterable[str], remedy: str, *, optional: Iterable[str] = ()
) -> dict[str, npt.NDArray[Any]]:
    """The arrays `names` of an npz file, and those of `optional` that it has."""
    kind = unreadable_kind(path)
    if kind is not None:
        raise TraceError(path, f"this is {kind}.", remedy="Name a regular npz file.")
    try:
        with path.open("rb") as stream:  # np.load would leave a broken archive open
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise TraceError(path, "a single array, not an npz archive.", remedy=remedy)
            for name in names:
                if name not in archive.files:
                    found = ", ".join(archive.files) or "nothing"
                    raise TraceError(path, f"missing (found: {found}).", place=f"array {name}", remedy=remedy)
            return {name: archive[name] for name in (*names, *optional) if name in archive.files}
    except FileNotFoundError:
        raise TraceError(path, "no such file.") from None
    except _MALFORMED as error:
        raise TraceError(
            path, f"cannot be read as npz without pickle ({_reason(error)}).", remedy=remedy
        ) from None


def load_npy(path: Path, content: bytes, place: str, remedy: str) -> npt.NDArray[Any]:
    """The array of a whole npy file's bytes."""
    try:
        return np.asarray(np.load(io.BytesIO(content), allow_pickle=False))
    except _MALFORMED as error:
        raise TraceError(
            path, f"cannot be read as npy without pickle ({_reason(error)}).", place=place, remedy=remedy
        ) from None


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")

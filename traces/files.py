"""Which files FineMoE reads and replaces: regular ones to read, its own kind to replace."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import TraceError

_PARQUET = b"PAR1"
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def unreadable_kind(path: Path) -> str | None:
    """What `path` is where reading it could wait or run for ever, as "a named pipe"; None for regular files.

    Also None for folders and for what is absent: opening them says so at once.
    """
    try:
        mode = path.stat().st_mode
    except ValueError:
        return "no path (it holds a NUL character)"
    except OSError:
        return None
    return _KINDS.get(stat.S_IFMT(mode))


def check_replaceable(path: Path) -> None:
    """Raise TraceError unless `path` is absent or a regular Parquet file: nothing else is replaced.

    A device, a link and another program's file are never what a user means to overwrite, and with swapped
    arguments the destination is the source.
    """
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise TraceError(path, "the destination is a link.", remedy="Name the file it should point to.")
        if stat.S_ISDIR(mode):
            raise TraceError(path, "the destination is a directory.", remedy="Name a file in it.")
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
            raise TraceError(path, f"the destination is {kind}.", remedy="Choose another name.")
        with path.open("rb") as file:
            first = file.read(len(_PARQUET))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None
    if first != _PARQUET:
        raise TraceError(
            path,
            f"the destination exists and is no Parquet file (it begins with {first.hex(' ') or 'nothing'}).",
            remedy="Choose another name, or remove that file first.",
        )


def unwritable(path: Path, error: Exception) -> TraceError:
    """The refusal of a destination that the operating system does not let us write."""
    reason = str(error).splitlines()[0].rstrip(".")
    return TraceError(path, f"cannot be written ({reason}).", remedy="Check the folder and its free space.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write `path` in the block: a new file beside it, which takes its name when the block ends and
    is gone where it fails. OSErrors are the caller's."""
    partial = path.parent / f".{path.name}.{os.getpid()}.partial"
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with suppress(OSError):  # the usual case: it was moved, or could not be created
            partial.unlink()

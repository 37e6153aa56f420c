"""What the requests of a routing trace are about, from a file beside it."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import TraceError
from .files import unreadable_kind

_REMEDY = 'Give one request per line: JSON with a "category", or the category itself.'


def read_categories(path: str | Path) -> list[str]:
    """One category per line and request: JSON Lines with a text `category`, or plain text.

    Raises `TraceError` with the line for what is neither, and for a file that cannot be read.
    """
    path = Path(path)
    kind = unreadable_kind(path)
    if kind is not None:
        raise TraceError(path, f"this is {kind}.", remedy="Name a text file.")
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = "no UTF-8 text" if isinstance(error, ValueError) else error.strerror
        raise TraceError(path, f"cannot be read ({reason}).", remedy=_REMEDY) from None
    found = []
    for number, line in enumerate(lines, start=1):
        text: object = line.strip()
        if line.lstrip().startswith("{"):
            try:
                text = json.loads(line).get("category")
            except (ValueError, RecursionError) as error:
                raise TraceError(
                    path, f"no JSON ({error}).", place=f"line {number}", remedy=_REMEDY
                ) from None
        if not isinstance(text, str) or not text:
            raise TraceError(
                path, f"{line.strip()[:60]!r} has no category.", place=f"line {number}", remedy=_REMEDY
            )
        found.append(text)
    if not found:
        raise TraceError(path, "an empty file.", remedy=_REMEDY)
    return found

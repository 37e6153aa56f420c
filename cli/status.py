"""What a long command is doing, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """What is being done, in a line on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as line:
        yield lambda text: line.update(text)

"""Entry points of the commands, light enough that Ctrl-C ends them quietly while the rest is imported."""

from __future__ import annotations

import sys
from typing import NoReturn

_EXIT_INTERRUPTED = 130  # shell.py's, whose import may be what is interrupted


def main() -> NoReturn:
    """`finemoe`."""
    try:
        from .main import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


def simulate_main() -> NoReturn:
    """`finemoe-sim`."""
    try:
        from .simulate import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)

"""How every command ends: one line for bad input, a traceback for a bug, and the right exit code."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from ..errors import CapacityError, InputError, PolicyError, TransferError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141  # what a shell says of a process that SIGPIPE has ended


class InterruptTold(Exception):  # noqa: N818 - no error
    """Ctrl-C, and the command has said itself what is kept."""


def run(app: typer.Typer, name: str) -> NoReturn:
    """Run a command line and exit: 0, 2 on bad input, usage or unreadable experts, 130 on Ctrl-C, 141 where
    nobody reads the output any more."""
    try:
        code = _command(app, name)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        code = EXIT_CLOSED_PIPE
    except PolicyError as error:
        code = fail(error.headline, error.traceback)
        _print_notes(error)
    except (InputError, CapacityError, TransferError) as error:
        code = fail(str(error))
        _print_notes(error)
    except (KeyboardInterrupt, typer.Abort):
        print("finemoe: interrupted, nothing was kept", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except MemoryError as error:
        what = f" ({error})" if str(error) else ""
        code = fail(f"not enough memory{what}. Take fewer requests, or keep fewer --decisions.")
    except OSError as error:
        _drop_output()
        code = fail(f"{error}. Check the path and the free space of its folder.")
    except Exception as error:
        # Usage errors come from the parser under typer, which is a private copy in some versions of typer.
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        code = fail(f"{usage().rstrip('.')}. See {name} --help.")
    sys.exit(code if isinstance(code, int) else 0)


def _print_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        print(f"finemoe: {note}", file=sys.stderr)


def _command(app: typer.Typer, name: str) -> object:
    try:
        code: object = app(standalone_mode=False, prog_name=name)
    except InterruptTold:
        return EXIT_INTERRUPTED
    except SystemExit as end:  # the parser under typer ends the process itself where a pipe is closed
        raise BrokenPipeError from end
    if code == EXIT_INTERRUPTED:  # what some versions of typer make of KeyboardInterrupt
        raise KeyboardInterrupt
    return code


def _drop_output() -> None:
    """Let what is still in the buffer go nowhere where it cannot be written, so that the interpreter's last
    flush finds no fault."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str, traceback: str = "") -> int:
    """Say what was wrong with the input, in one line on standard error, before the user's own traceback."""
    print("finemoe: error:", " ".join(message.split()), file=sys.stderr)
    if traceback:
        print(traceback, file=sys.stderr)
    return EXIT_BAD_INPUT


def show_version(wanted: bool) -> None:
    """The `--version` of every command."""
    if wanted:
        from .. import __version__

        print(f"finemoe {__version__}")
        raise typer.Exit


def help_without_command(context: typer.Context) -> None:
    """Show a command group's help where no command is named."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit

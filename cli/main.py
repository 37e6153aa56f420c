"""`finemoe VERB`: the simulator and the tools around it."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from .model import model_app
from .replay import replay_command
from .shell import help_without_command, run, show_version
from .simulate import simulate_command
from .systems import systems_command
from .trace import trace_app

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    help="Simulate expert offloading policies for Mixture-of-Experts serving.",
)
app.command("sim", help="Simulate serving a request trace; the same as finemoe-sim.")(simulate_command)
app.command("replay", help="Feed recorded decisions to a fresh core and compare.")(replay_command)
app.command("systems", help="List the systems that --policy accepts.")(systems_command)
app.add_typer(trace_app, name="trace")
app.add_typer(model_app, name="model")


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    help_without_command(context)


def main() -> NoReturn:
    """Entry point of `finemoe`."""
    run(app, "finemoe")

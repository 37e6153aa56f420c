"""`finemoe systems`: the systems that `--policy` accepts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..policy.system import System


def systems_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the systems that `--policy` accepts, with what each is composed of."""
    systems = _all_systems()
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(systems), indent=2).decode())
        return
    from rich.table import Table

    from .formats import console

    table = Table(box=None, pad_edge=False)
    for name in ("system", "group", "predictor", "eviction", "description", "source"):
        table.add_column(name, overflow="fold")
    for system in systems:
        row = (
            system.name,
            system.group,
            system.predictor,
            system.eviction,
            system.description,
            system.source,
        )
        table.add_row(*(str(value) for value in row))
    console().print(table)


def _all_systems() -> list[System]:
    """Ours, and those that installed packages add; what is wrong with one of these is said beside."""
    from ..errors import InputError
    from ..policy.plugin_load import plugin_names
    from ..policy.systems import SYSTEMS, find_system

    systems = list(SYSTEMS.values())
    for name in plugin_names():
        if name in SYSTEMS:
            print(
                f"finemoe: the plug-in {name} has the name of a system of ours, which runs", file=sys.stderr
            )
            continue
        try:
            systems.append(find_system(name))
        except InputError as error:
            print(f"finemoe: the plug-in {name} cannot be used: {error}", file=sys.stderr)
    return systems

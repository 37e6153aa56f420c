"""`finemoe systems`: the systems that `--policy` accepts."""

from __future__ import annotations

from typing import Annotated

import typer


def systems_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the systems that `--policy` accepts, with what each is composed of."""
    from ..policy.systems import SYSTEMS

    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(list(SYSTEMS.values())), indent=2).decode())
        return
    from rich.table import Table

    from .formats import console

    table = Table(box=None, pad_edge=False)
    for name in ("system", "group", "predictor", "eviction", "description", "source"):
        table.add_column(name, overflow="fold")
    for system in SYSTEMS.values():
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

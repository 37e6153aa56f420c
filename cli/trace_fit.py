"""`finemoe trace fit`: a preset of the synthetic generator from a routing trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .status import status_line


def fit_command(
    routing: Annotated[Path, typer.Argument(metavar="ROUTING", help="Routing trace (Parquet).")],
    output: Annotated[Path, typer.Option(metavar="FILE.toml", help="Preset to write.")],
    categories: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='What each request is about, one per line: JSON with a "category", or text.'
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of split and draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit the synthetic generator to a routing trace (minutes), and compare them on requests held out."""
    from ..traces.fit import fit_preset
    from ..traces.fit_categories import read_categories
    from ..traces.preset_file import check_preset_output, write_preset

    check_preset_output(output)  # before minutes of work
    labels = None if categories is None else read_categories(categories)
    with status_line() as tell:
        fit = fit_preset(routing, categories=labels, seed=seed, progress=tell)
    write_preset(output, fit.preset)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(fit), indent=2).decode())
    else:
        from .fit_table import print_fit

        print_fit(fit)

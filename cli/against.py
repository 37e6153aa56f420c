"""`finemoe-sim --replay RESULTS`: the simulator's decisions against those of a real run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from .formats import console, number, percent

if TYPE_CHECKING:
    from ..serving.decision_diff import Comparison
    from ..sim.against import CellAgainst

_TAKEN = ("backend", "hardware", "set")


def print_against(results: Path, options: Mapping[str, object], *, as_json: bool) -> None:
    """Simulate a real run's iterations and print how far decisions agree, and where they first part."""
    import msgspec

    from ..errors import SettingError
    from ..serving.settings import flag
    from ..sim.against import against

    for name, value in options.items():
        if value is not None and (name not in _TAKEN or (name == "backend" and value != "sim")):
            raise SettingError(
                f"{flag(name)} {value} means nothing with --replay, which takes all from the recorded run. "
                "Leave it out."
            )
    hardware, overrides = options.get("hardware"), options.get("set")
    cells = against(
        results,
        None if hardware is None else str(hardware),
        tuple(overrides) if isinstance(overrides, list) else (),
    )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(cells), indent=2).decode())
        return
    print(f"recorded  {results}")
    print(f"machine   {cells[0].hardware}: links, searches and computing of the simulator\n")
    console().print(_table(cells))
    print("Same gates and same batches in both: what differs is when loads and searches ended.")
    for cell in cells:
        _print_differences(cell.name, cell.comparison)


def _table(cells: list[CellAgainst]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("cell", no_wrap=True)
    for name in (
        "iterations",
        "layers",
        "same\nrequired",
        "same\nresident",
        "hit rate\nrecorded",
        "hit rate\nsimulated",
        "loads\nrecorded",
        "loads\nsimulated",
        "stall s\nrecorded",
        "stall s\nsimulated",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        found = cell.comparison
        table.add_row(
            cell.name,
            f"{cell.iterations:,}",
            f"{found.layers:,}",
            percent(found.equal_requirements / found.layers),
            percent(found.equal_lookups / found.layers),
            percent(found.recorded_hit_rate),
            percent(found.simulated_hit_rate),
            f"{found.recorded_loads:,}",
            f"{found.simulated_loads:,}",
            number(cell.recorded_stall_s),
            number(cell.simulated_stall_s),
        )
    return table


def _print_differences(name: str, found: Comparison) -> None:
    if not found.differences:
        print(f"\n{name}: no decision differs")
    for first in found.differences:
        place = "before its first gate" if first.layer < 0 else f"layer {first.layer}"
        print(f"\n{name}: first difference in iteration {first.iteration}, {place}: {first.what}")
        print(f"  recorded   {first.recorded}")
        print(f"  simulated  {first.simulated}")
        print(f"  why        {first.why}")
        for world, lines in (("recorded", first.recorded_before), ("simulated", first.simulated_before)):
            for line in lines:
                print(f"  {world:<9}  {line}")

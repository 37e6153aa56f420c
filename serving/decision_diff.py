"""Two decision logs of the same iterations in two worlds: where and why their decisions part.

What the gates said is the same in both, and so is what they required. What a gate found resident, and what
was loaded and evicted, also hangs on when loads and searches ended, which is the world's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .decisions import FIRST_COMMAND, KINDS
from .log_rows import LogRows

_SHOWN_ROWS = 6


class Lookup(NamedTuple):
    """What a gate required, and which of it was resident or still loading; ids."""

    iteration: int
    layer: int
    row: int
    required: tuple[int, ...]
    hits: tuple[int, ...]
    late: tuple[int, ...]


class Load(NamedTuple):
    """A load, and the expert whose slot it took (−1: nobody's)."""

    iteration: int
    layer: int  # of the last gate before it; −1: none in this iteration
    row: int
    kind: str
    expert: int
    evicted: int


@dataclass(frozen=True)
class Told:
    """What a log says of lookups and of each device's loads, in order."""

    rows: LogRows
    lookups: tuple[Lookup, ...]
    loads: dict[int, tuple[Load, ...]]  # by device

    @property
    def hit_rate(self) -> float | None:
        """Resident at their gate, of all that gates required."""
        required = sum(len(lookup.required) for lookup in self.lookups)
        return sum(len(lookup.hits) for lookup in self.lookups) / required if required else None


@dataclass(frozen=True)
class Difference:
    """The first place where decisions differ: what each world had there, why, and the rows before it."""

    iteration: int
    layer: int
    what: str
    recorded: str
    simulated: str
    why: str
    recorded_before: tuple[str, ...]
    simulated_before: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Two logs of the same iterations compared, layer by layer."""

    layers: int  # gates in both
    equal_requirements: int
    equal_lookups: int  # gates that found the same experts resident, and the same loading
    recorded_hit_rate: float | None
    simulated_hit_rate: float | None
    recorded_loads: int
    simulated_loads: int
    differences: tuple[Difference, ...]  # the first lookup and the first load that differ, in their order


def told_by(rows: LogRows) -> Told:
    """Follow a log: who is in which slot, and in which state, at every gate."""
    columns = [rows.column(name).tolist() for name in ("iteration", "layer", "expert", "device", "slot")]
    kinds, sub_kind = rows.kind.tolist(), rows.column("sub_kind")
    state: dict[int, str] = {}
    slots: dict[tuple[int, int], int] = {}
    lookups: list[Lookup] = []
    loads: dict[int, list[Load]] = defaultdict(list)
    layer_now = -1
    for row, (iteration, layer, expert, device, slot) in enumerate(zip(*columns, strict=True)):
        kind = KINDS[kinds[row]]
        if kind == "Load":
            before = slots.get((device, slot), -1)
            evicted = -1 if before == expert else before
            state.pop(evicted, None)
            slots[device, slot] = expert
            state[expert] = "loading"
            loads[device].append(Load(iteration, layer_now, row, str(sub_kind[row]), expert, evicted))
        elif kind == "loaded":
            state[expert] = "resident"
        elif kind in ("paused", "load_failed"):
            state[expert] = "partial"
        elif kind == "preload":
            state.update(dict.fromkeys(rows.items("experts", row).tolist(), "resident"))
        elif kind == "begin_iteration":
            layer_now = -1
        elif kind == "gate":
            layer_now = layer
            required = tuple((rows.items("experts", row) + layer * rows.experts).tolist())
            hits = tuple(e for e in required if state.get(e) == "resident")
            late = tuple(e for e in required if state.get(e) == "loading")
            lookups.append(Lookup(iteration, layer, row, required, hits, late))
    return Told(rows, tuple(lookups), {device: tuple(of) for device, of in loads.items()})


def compare(recorded: Told, simulated: Told) -> Comparison:
    """Compare lookups gate by gate, and loads device by device in their order."""
    pairs = list(zip(recorded.lookups, simulated.lookups, strict=False))
    return Comparison(
        layers=len(pairs),
        equal_requirements=sum(one.required == other.required for one, other in pairs),
        equal_lookups=sum(_found(one) == _found(other) for one, other in pairs),
        recorded_hit_rate=recorded.hit_rate,
        simulated_hit_rate=simulated.hit_rate,
        recorded_loads=sum(map(len, recorded.loads.values())),
        simulated_loads=sum(map(len, simulated.loads.values())),
        differences=_differences(recorded, simulated, pairs),
    )


def _found(lookup: Lookup) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return lookup.hits, lookup.late


def _differences(
    recorded: Told, simulated: Told, pairs: Sequence[tuple[Lookup, Lookup]]
) -> tuple[Difference, ...]:
    found: list[tuple[tuple[int, int, int], Difference]] = []
    for one, other in pairs:
        if _found(one) != _found(other):
            found.append(((one.iteration, one.layer, 1), _lookup_difference(recorded, simulated, one, other)))
            break
    loads: list[tuple[tuple[int, int, int], Difference]] = []
    for device in sorted(recorded.loads.keys() | simulated.loads.keys()):
        mine, theirs = recorded.loads.get(device, ()), simulated.loads.get(device, ())
        same = min(len(mine), len(theirs))
        at = next((i for i in range(same) if mine[i][3:] != theirs[i][3:]), same)
        if at < max(len(mine), len(theirs)):
            a, b = (of[at] if at < len(of) else None for of in (mine, theirs))
            place = a or b
            assert place is not None
            key = (place.iteration, place.layer, 0)
            loads.append((key, _load_difference(recorded, simulated, device, a, b)))
    found += [min(loads, key=lambda item: item[0])] if loads else []
    return tuple(difference for _, difference in sorted(found, key=lambda item: item[0]))


def _lookup_difference(recorded: Told, simulated: Told, one: Lookup, other: Lookup) -> Difference:
    expert = next(
        e
        for e in sorted({*one.required, *other.required})
        if (e in one.hits, e in one.late) != (e in other.hits, e in other.late)
    )
    return Difference(
        iteration=one.iteration,
        layer=one.layer,
        what=f"gate finds expert {expert}",
        recorded=_state(expert, one),
        simulated=_state(expert, other),
        why=f"recorded: {_history(recorded.rows, expert, one.row)}; "
        f"simulated: {_history(simulated.rows, expert, other.row)}",
        recorded_before=_before(recorded.rows, one.row),
        simulated_before=_before(simulated.rows, other.row),
    )


def _load_difference(
    recorded: Told, simulated: Told, device: int, one: Load | None, other: Load | None
) -> Difference:
    place = one or other
    assert place is not None
    return Difference(
        iteration=place.iteration,
        layer=place.layer,
        what=f"device {device} loads",
        recorded=_load(one),
        simulated=_load(other),
        why=f"recorded: {_trigger(recorded.rows, one)}; simulated: {_trigger(simulated.rows, other)}",
        recorded_before=_before(recorded.rows, one.row) if one else (),
        simulated_before=_before(simulated.rows, other.row) if other else (),
    )


def _state(expert: int, lookup: Lookup) -> str:
    return "resident" if expert in lookup.hits else "still loading" if expert in lookup.late else "absent"


def _load(load: Load | None) -> str:
    if load is None:
        return "nothing more"
    evicted = "a free slot" if load.evicted < 0 else f"the slot of {load.evicted}"
    place = f"iteration {load.iteration}, layer {load.layer}"
    return f"{load.kind} of expert {load.expert} into {evicted} ({place})"


def _trigger(rows: LogRows, load: Load | None) -> str:
    """The event that a load was decided at."""
    if load is None:
        return "no further load"
    row = load.row
    while row >= 0 and rows.kind[row] >= FIRST_COMMAND:
        row -= 1
    return f"decided at {rows.describe(row)}"


def _history(rows: LogRows, expert: int, gate: int) -> str:
    """The last thing that happened to an expert before a gate, and when its load ended if that was after."""
    evicting = KINDS.index("Load")
    loaded = KINDS.index("loaded")
    about = rows.column("expert") == expert
    about |= (rows.kind == evicting) & (rows.column("evicts") == expert)
    before = np.flatnonzero(about[:gate])
    last = f"last {rows.describe(int(before[-1]))}" if before.size else "never loaded"
    after = np.flatnonzero((about & (rows.kind == loaded))[gate:])
    times = rows.column("time_s")
    if before.size and rows.kind[before[-1]] != loaded and after.size:
        late_s = times[gate + int(after[0])] - times[gate]
        return f"{last}, loaded {late_s * 1e3:.3g} ms after the gate"
    if before.size and rows.kind[before[-1]] == loaded:
        return f"{last}, {(times[gate] - times[int(before[-1])]) * 1e3:.3g} ms before the gate"
    return last


def _before(rows: LogRows, row: int) -> tuple[str, ...]:
    return tuple(rows.describe(i) for i in range(max(0, row - _SHOWN_ROWS), row + 1))

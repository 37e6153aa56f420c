"""The figures that a hardware profile is made of: names, units and bounds, and the checks of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Literal, get_args

import msgspec

from ..errors import SettingError, did_you_mean

Evidence = Literal["MEASURED", "CALIBRATED", "SIMULATED", "DERIVED", "ASSUMED"]
EVIDENCE: tuple[Evidence, ...] = get_args(Evidence)
MAX_DEVICES = 57  # of the policy core (csrc/types.hpp)

# unit -> factor to the base unit, per dimension; GB = 10^9, GiB = 2^30. Decimal: 5 us is 5e-6 exactly.
_Units = dict[str, Decimal]
_BYTES: _Units = {unit: Decimal(1000**i) for i, unit in enumerate(("B", "kB", "MB", "GB", "TB"))}
_BYTES |= {unit: Decimal(1024**i) for i, unit in enumerate(("KiB", "MiB", "GiB"), start=1)}
_BANDWIDTH: _Units = {f"{unit}/s": factor for unit, factor in _BYTES.items()}
_TIME: _Units = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}
_FLOPS: _Units = {"FLOP/s": Decimal(1), "GFLOP/s": Decimal(10**9), "TFLOP/s": Decimal(10**12)}
_RATE: _Units = {"values/s": Decimal(1)}
_RATIO: _Units = {"1": Decimal(1)}


class Rule(msgspec.Struct, frozen=True):
    """What a figure may be: its units, whether it is a whole number, and its bounds in base units."""

    units: _Units
    whole: bool = False
    least: float = 0.0  # excluded when 0
    most: float = math.inf
    several_devices: bool = False  # present exactly when there are several devices
    optional: bool = False
    beside: str = ""  # an optional figure that needs this one as well


# Far beyond every machine, so that a mistyped figure is an error and not a time without end.
LEAST_RATE = 1e3  # bytes/s, FLOP/s, values/s
MOST_TIME_S = 3600.0

RULES = {
    "devices": Rule(_RATIO, whole=True, least=1, most=MAX_DEVICES),
    "device_memory_bytes": Rule(_BYTES, whole=True),
    "memory_reserve_bytes": Rule(_BYTES, whole=True),
    "memory_bandwidth": Rule(_BANDWIDTH, least=LEAST_RATE),
    "memory_efficiency": Rule(_RATIO, least=1e-6, most=1.0),
    "peak_flops": Rule(_FLOPS, least=LEAST_RATE),
    "flops_efficiency": Rule(_RATIO, least=1e-6, most=1.0),
    "kernel_launch_s": Rule(_TIME, most=MOST_TIME_S),
    "link_latency_s": Rule(_TIME, most=MOST_TIME_S),
    "link_bandwidth": Rule(_BANDWIDTH, least=LEAST_RATE),
    "link_chunk_bytes": Rule(_BYTES, whole=True, least=1),
    "copy_slowdown": Rule(_RATIO, least=1.0, most=1e3),
    "peer_latency_s": Rule(_TIME, most=MOST_TIME_S, several_devices=True),
    "peer_bandwidth": Rule(_BANDWIDTH, least=LEAST_RATE, several_devices=True),
    "host_memory_bytes": Rule(_BYTES, whole=True),
    "host_bandwidth": Rule(_BANDWIDTH, least=LEAST_RATE, optional=True),
    "ssd_latency_s": Rule(_TIME, most=MOST_TIME_S, optional=True, beside="ssd_bandwidth"),
    "ssd_bandwidth": Rule(_BANDWIDTH, least=LEAST_RATE, optional=True, beside="ssd_latency_s"),
    "search_latency_s": Rule(_TIME, most=MOST_TIME_S),
    "search_rate": Rule(_RATE, least=LEAST_RATE),
}


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number as its file states it."""

    value: int | float
    unit: str
    source: str
    evidence: Evidence


def missing_figure(place: str, key: str) -> str:
    """What to say of a figure that is missing. `place`: a file, or the option that changed figures."""
    if place.startswith("--"):
        return f"{place}: {key} is missing. Give it as well: --set {key.replace('_', '.', 1)}=…"
    return f"{place}: {key} is missing. Add a table [{key}] with value, unit, source, evidence."


def check_together(place: str, figures: Mapping[str, Figure], *, peer_needed: bool) -> None:
    """Raise SettingError for figures that are missing beside others, or mean nothing beside them."""
    several = figures["devices"].value != 1
    missing = [key for key, rule in RULES.items() if rule.several_devices and key not in figures]
    for key, rule in RULES.items():
        if key in figures and rule.several_devices and not several:
            raise SettingError(f"{place}: {key} has no meaning with one device. Remove it.")
        if key in figures and rule.beside and rule.beside not in figures:
            raise SettingError(missing_figure(place, rule.beside))
    if several and missing and peer_needed:
        if not place.startswith("--"):
            raise SettingError(missing_figure(place, missing[0]))
        words = " ".join(f"--set {key.removesuffix('_s').replace('_', '.', 1)}=…" for key in missing)
        raise SettingError(
            f"{place}: {figures['devices'].value} devices need peer figures, which this profile has not. "
            f"Add {words}, such as 10us and 50GB/s, or --peer-link pcie."
        )


def check_reserve(place: str, reserve_bytes: float, memory_bytes: float) -> None:
    """Raise SettingError unless the reserve leaves device memory."""
    if reserve_bytes >= memory_bytes:
        raise SettingError(f"{place}: memory_reserve_bytes leaves nothing of device_memory_bytes. Lower it.")


def read_figure(path: Path, key: str, table: object) -> Figure:
    """The table of one figure in a file; SettingError for unknown, missing or wrong fields."""
    if not isinstance(table, dict):
        raise SettingError(
            f"{path}: {key} is {table!r}; a table of value, unit, source and evidence is needed."
        )
    known = Figure.__struct_fields__
    for field in table:
        if field not in known:
            hint = did_you_mean(field, known, cutoff=0.5)
            raise SettingError(f"{path}: {key}.{field} is unknown.{hint} Remove or rename it.")
    try:
        figure = msgspec.convert(table, Figure)
    except msgspec.ValidationError as error:
        raise SettingError(
            f"{path}: {key}: {error}. A number `value`, `unit`, `source` and `evidence` "
            f"(one of {', '.join(EVIDENCE)}) are needed."
        ) from None
    if not figure.source.strip():
        raise SettingError(f"{path}: {key}.source is empty. Say who measured the value or how it is derived.")
    return figure


def base_value(place: str, key: str, figure: Figure) -> float | int:
    """The value in base units; SettingError for a unit or a value that the figure cannot have."""
    rule = RULES[key]
    if figure.unit not in rule.units:
        raise SettingError(f"{place}: {key}.unit is {figure.unit!r}. Use one of {', '.join(rule.units)}.")
    value = float(Decimal(repr(figure.value)) * rule.units[figure.unit])
    if not math.isfinite(value) or value <= 0 or value < rule.least or value > rule.most:
        bounds = f"at least {rule.least:g}" if rule.least else "above 0"
        bounds += f" and at most {rule.most:g}" if rule.most < math.inf else ""
        raise SettingError(f"{place}: {key}.value is {figure.value!r}; a finite number {bounds} is needed.")
    if not rule.whole:
        return value
    if value != round(value):
        raise SettingError(
            f"{place}: {key}.value is {figure.value!r} {figure.unit}; a whole number is needed."
        )
    return round(value)

"""Hardware profiles: a machine's figures, each with unit, source and evidence, read from TOML.

A profile file has `name`, `description` and one table per figure, named like `HardwareProfile`'s attribute:

    [link_bandwidth]
    value = 23.9
    unit = "GB/s"
    source = "who measured it, or how it follows from other figures"
    evidence = "MEASURED"
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Literal, get_args

import msgspec

from ..errors import SettingError
from ..traces.files import unreadable_kind

Evidence = Literal["MEASURED", "CALIBRATED", "SIMULATED", "DERIVED", "ASSUMED"]
EVIDENCE: tuple[Evidence, ...] = get_args(Evidence)
MAX_DEVICES = 57  # of the policy core (csrc/types.hpp)
PROFILE_FOLDER = Path(__file__).parent / "profiles"

# unit -> factor to the base unit, per dimension; GB = 10^9, GiB = 2^30. Decimal: 5 us is 5e-6 exactly.
_Units = dict[str, Decimal]
_BYTES: _Units = {unit: Decimal(1000**i) for i, unit in enumerate(("B", "kB", "MB", "GB", "TB"))}
_BYTES |= {unit: Decimal(1024**i) for i, unit in enumerate(("KiB", "MiB", "GiB"), start=1)}
_BANDWIDTH: _Units = {f"{unit}/s": factor for unit, factor in _BYTES.items()}
_TIME: _Units = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}
_FLOPS: _Units = {"FLOP/s": Decimal(1), "GFLOP/s": Decimal(10**9), "TFLOP/s": Decimal(10**12)}
_RATE: _Units = {"values/s": Decimal(1)}
_RATIO: _Units = {"1": Decimal(1)}


class _Rule(msgspec.Struct, frozen=True):
    """What a figure may be: its units, whether it is a whole number, and its bounds in base units."""

    units: _Units
    whole: bool = False
    least: float = 0.0  # excluded when 0
    most: float = math.inf
    several_devices: bool = False  # present exactly when there are several devices


_RULES = {
    "devices": _Rule(_RATIO, whole=True, least=1, most=MAX_DEVICES),
    "device_memory_bytes": _Rule(_BYTES, whole=True),
    "memory_reserve_bytes": _Rule(_BYTES, whole=True),
    "memory_bandwidth": _Rule(_BANDWIDTH),
    "memory_efficiency": _Rule(_RATIO, most=1.0),
    "peak_flops": _Rule(_FLOPS),
    "flops_efficiency": _Rule(_RATIO, most=1.0),
    "kernel_launch_s": _Rule(_TIME),
    "link_latency_s": _Rule(_TIME),
    "link_bandwidth": _Rule(_BANDWIDTH),
    "link_chunk_bytes": _Rule(_BYTES, whole=True, least=1),
    "copy_slowdown": _Rule(_RATIO, least=1.0),
    "peer_latency_s": _Rule(_TIME, several_devices=True),
    "peer_bandwidth": _Rule(_BANDWIDTH, several_devices=True),
    "host_memory_bytes": _Rule(_BYTES, whole=True),
    "search_latency_s": _Rule(_TIME),
    "search_rate": _Rule(_RATE),
}


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number as its file states it."""

    value: int | float
    unit: str
    source: str
    evidence: Evidence


class HardwareProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One machine in base units: bytes, bytes/s, FLOP/s, seconds. Memory and links are per device."""

    name: str
    description: str
    devices: int
    device_memory_bytes: int
    #: not usable for weights, KV or experts: context, activations, fragmentation
    memory_reserve_bytes: int
    memory_bandwidth: float
    #: share of `memory_bandwidth` that kernels reach
    memory_efficiency: float
    #: bf16, dense
    peak_flops: float
    #: share of `peak_flops` that large products reach
    flops_efficiency: float
    kernel_launch_s: float
    #: fixed cost of one host-to-device copy
    link_latency_s: float
    link_bandwidth: float
    #: a preempted copy stops at the next multiple of this
    link_chunk_bytes: int
    #: factor on compute time while a copy runs on the same device
    copy_slowdown: float
    #: device to device, for activations under expert parallelism; None with one device
    peer_latency_s: float | None = None
    peer_bandwidth: float | None = None
    host_memory_bytes: int
    #: fixed cost of one search on the CPU, and the stored values it scans per second
    search_latency_s: float
    search_rate: float
    figures: dict[str, Figure]

    def evidence(self) -> dict[str, tuple[float, str, str, str]]:
        """Attribute → (value, unit, evidence, source), value and unit as the file states them."""
        return {key: (f.value, f.unit, f.evidence, f.source) for key, f in self.figures.items()}


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that ship with FineMoE."""
    return tuple(sorted(path.stem for path in PROFILE_FOLDER.glob("*.toml")))


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """The shipped profile of that name, or the one in a TOML file.

    Raises SettingError: unknown name or key (with the nearest one), missing key, wrong unit, or a value that
    is not a positive finite number within its bounds.
    """
    text = str(name_or_path)
    names = profile_names()
    if text in names:
        return _read(PROFILE_FOLDER / f"{text}.toml")
    path = Path(name_or_path)
    if text and (path.suffix == ".toml" or os.path.exists(path)):  # which never raises
        return _read(path)
    raise SettingError(
        f"--hardware {text!r} is unknown.{_nearest(text, names)} "
        f"Known: {', '.join(names)}; or give the path of a .toml file."
    )


def _nearest(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""


def _read(path: Path) -> HardwareProfile:
    kind = unreadable_kind(path)
    if kind is not None:
        raise SettingError(f"{path}: this is {kind}. Give a profile's .toml file.")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(
            f"{path}: cannot be read ({error.strerror}). Give a profile's .toml file."
        ) from None
    except RecursionError:
        raise SettingError(f"{path}: nested too deeply for a profile. Give a profile's .toml file.") from None
    except ValueError as error:
        raise SettingError(f"{path}: not TOML ({error}). Give a profile's .toml file.") from None
    for key in tables:
        if key not in _RULES and key not in ("name", "description"):
            raise SettingError(
                f"{path}: key {key} is unknown.{_nearest(key, tuple(_RULES))} Remove or rename it."
            )
    texts: dict[str, str] = {}
    for key in ("name", "description"):
        if not isinstance(tables.get(key), str):
            raise SettingError(f'{path}: {key} is missing or no text. Add {key} = "…".')
        texts[key] = tables[key]
    figures = {key: _figure(path, key, tables[key]) for key in _RULES if key in tables}
    _check_present(path, figures)
    numbers = {key: _base_value(path, key, figure) for key, figure in figures.items()}
    if numbers["memory_reserve_bytes"] >= numbers["device_memory_bytes"]:
        raise SettingError(f"{path}: memory_reserve_bytes leaves nothing of device_memory_bytes. Lower it.")
    return msgspec.convert({**texts, **numbers, "figures": figures}, HardwareProfile)


def _check_present(path: Path, figures: dict[str, Figure]) -> None:
    several = "devices" in figures and figures["devices"].value != 1
    for key, rule in _RULES.items():
        wanted = several or not rule.several_devices
        if wanted and key not in figures:
            raise SettingError(
                f"{path}: {key} is missing. Add a table [{key}] with value, unit, source, evidence."
            )
        if key in figures and not wanted:
            raise SettingError(f"{path}: {key} has no meaning with one device. Remove it.")


def _figure(path: Path, key: str, table: object) -> Figure:
    if not isinstance(table, dict):
        raise SettingError(
            f"{path}: {key} is {table!r}; a table of value, unit, source and evidence is needed."
        )
    known = Figure.__struct_fields__
    for field in table:
        if field not in known:
            raise SettingError(
                f"{path}: {key}.{field} is unknown.{_nearest(field, known)} Remove or rename it."
            )
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


def _base_value(path: Path, key: str, figure: Figure) -> float | int:
    rule = _RULES[key]
    if figure.unit not in rule.units:
        raise SettingError(f"{path}: {key}.unit is {figure.unit!r}. Use one of {', '.join(rule.units)}.")
    value = float(Decimal(repr(figure.value)) * rule.units[figure.unit])
    if not math.isfinite(value) or value <= 0 or value < rule.least or value > rule.most:
        bounds = f"at least {rule.least:g}" if rule.least else "above 0"
        bounds += f" and at most {rule.most:g}" if rule.most < math.inf else ""
        raise SettingError(f"{path}: {key}.value is {figure.value!r}; a finite number {bounds} is needed.")
    if not rule.whole:
        return value
    if value != round(value):
        raise SettingError(
            f"{path}: {key}.value is {figure.value!r} {figure.unit}; a whole number is needed."
        )
    return round(value)

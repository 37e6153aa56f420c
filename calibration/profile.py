"""Hardware profiles: a machine's figures, each with unit, source and evidence, read from TOML.

A profile file has `name`, `description` and one table per figure, named like `HardwareProfile`'s attribute:

    [link_bandwidth]
    value = 23.9
    unit = "GB/s"
    source = "who measured it, or how it follows from other figures"
    evidence = "MEASURED"

`apply_overrides` changes figures of a profile that was read: `link.bandwidth=55GB/s`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..errors import SettingError, did_you_mean
from ..traces.files import unreadable_kind
from .figures import (
    RULES,
    Figure,
    base_value,
    check_reserve,
    check_together,
    missing_figure,
    read_figure,
)

PROFILE_FOLDER = Path(__file__).parent / "profiles"


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
    #: what all links together can read from host memory; None: as much as they ask for
    host_bandwidth: float | None = None
    #: one read, of experts that host memory has no room for; None: there is no SSD
    ssd_latency_s: float | None = None
    ssd_bandwidth: float | None = None
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
        f"--hardware {text!r} is unknown.{did_you_mean(text, names, cutoff=0.5)} "
        f"Known: {', '.join(names)}; or give the path of a .toml file."
    )


def load_machine(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    host_memory: str | None = None,
    peer_needed: bool = True,
) -> HardwareProfile:
    """`load_profile` with the overrides of `--set` and `--host-memory`; see `apply_overrides`."""
    profile = apply_overrides(load_profile(name_or_path), overrides, peer_needed=peer_needed)
    if host_memory is None:
        return profile
    if profile.figures["host_memory_bytes"].source == "--set":
        raise SettingError("--host-memory and --set host.memory are the same figure. Give one of them.")
    return apply_overrides(
        profile, [f"host.memory={host_memory}"], option="--host-memory", peer_needed=peer_needed
    )


def apply_overrides(
    profile: HardwareProfile,
    overrides: Sequence[str],
    *,
    option: str = "--set",
    peer_needed: bool = True,
) -> HardwareProfile:
    """The profile with figures replaced by texts such as "link.bandwidth=55GB/s" or "devices=2".

    A figure is named as in the file, with "." or "_" between words, and without its final "_s" or "_bytes" if
    that is shorter. Values have the units of the files; counts and ratios have none. What is given is
    ASSUMED, with `option` as its source; figures that were derived from it stay as they are. With one device
    the peer figures go. `peer_needed`: several devices must have peer figures.

    Raises SettingError: unknown or repeated name, value that is no number with its unit or out of bounds, or
    figures that do not go together.
    """
    if not overrides:
        return profile
    given: dict[str, Figure] = {}
    for text in overrides:
        key, figure = _override(option, text)
        if key in given:
            raise SettingError(f"{option} gives {key} twice. Keep one of them.")
        given[key] = figure
    numbers: dict[str, object] = {key: base_value(option, key, figure) for key, figure in given.items()}
    figures = profile.figures | given
    if numbers.get("devices") == 1:
        peers = [key for key, rule in RULES.items() if rule.several_devices and key not in given]
        figures = {key: figure for key, figure in figures.items() if key not in peers}
        numbers |= dict.fromkeys(peers)
    place = f"{option} on {profile.name}"
    check_together(place, figures, peer_needed=peer_needed)
    changed = msgspec.structs.replace(
        profile,
        description=f"{profile.description}; {option} changed {', '.join(given)}",
        figures={key: figures[key] for key in RULES if key in figures},
        **numbers,
    )
    check_reserve(place, changed.memory_reserve_bytes, changed.device_memory_bytes)
    return changed


_NUMBER = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*", re.DOTALL)
_SHORT = {key.removesuffix("_s").removesuffix("_bytes"): key for key in RULES}


def _override(option: str, text: str) -> tuple[str, Figure]:
    """The figure's name and value of one override."""
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingError(f"{option} {text[:60]!r} has no value. Write it as link.bandwidth=55GB/s.")
    word = name.strip().replace(".", "_")
    key = _SHORT.get(word, word)
    if key not in RULES:
        hint = did_you_mean(word, RULES, cutoff=0.5)
        raise SettingError(
            f"{option} {name.strip()[:60]} is no figure of a profile.{hint} "
            "docs/models-and-hardware.md lists them."
        )
    bare = "1" in RULES[key].units
    form = "a bare number" if bare else f"a number with one of the units {', '.join(RULES[key].units)}"
    match = _NUMBER.fullmatch(value)
    if match is None or bare != (match[2] == "") or (match[2] or "1") not in RULES[key].units:
        which = f"{option} {name.strip()}" if option == "--set" else option
        raise SettingError(f"{which} is {value[:60]!r}. Give {form}.")
    number = float(match[1])
    whole = number.is_integer() and abs(number) < 2**53
    return key, Figure(int(number) if whole else number, match[2] or "1", option, "ASSUMED")


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
        if key not in RULES and key not in ("name", "description"):
            hint = did_you_mean(key, RULES, cutoff=0.5)
            raise SettingError(f"{path}: key {key} is unknown.{hint} Remove or rename it.")
    texts: dict[str, str] = {}
    for key in ("name", "description"):
        if not isinstance(tables.get(key), str):
            raise SettingError(f'{path}: {key} is missing or no text. Add {key} = "…".')
        texts[key] = tables[key]
    figures = {key: read_figure(path, key, tables[key]) for key in RULES if key in tables}
    for key, rule in RULES.items():
        if key not in figures and not rule.several_devices and not rule.optional:
            raise SettingError(missing_figure(str(path), key))
    check_together(str(path), figures, peer_needed=True)
    numbers = {key: base_value(str(path), key, figure) for key, figure in figures.items()}
    check_reserve(str(path), numbers["memory_reserve_bytes"], numbers["device_memory_bytes"])
    return msgspec.convert({**texts, **numbers, "figures": figures}, HardwareProfile)

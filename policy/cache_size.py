"""How large an expert cache is: what people write, and how many slots that is."""

from __future__ import annotations

import re
from fractions import Fraction

from ..errors import SettingError
from .core import owned_experts

_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30}) ?(?P<unit>[A-Za-z]*)")
_FORMS = "Give bytes (24GB, 16GiB), a fraction of all experts above 0 and up to 1 (0.25), or slots (96slots)"


def parse_cache_size(
    text: str, routed_experts: int, expert_bytes: int, *, name: str = "--expert-cache"
) -> int:
    """Bytes of an expert cache, total over devices: '24GB', '16GiB', '0.25' of all routed experts, '96slots'.

    A fraction is rounded down to whole experts. Raises SettingError naming the option, the value and the
    forms.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise SettingError(f"{name} {text!r} is no size. {_FORMS}.")
    number, unit = Fraction(match["number"]), match["unit"]
    if number == 0:
        raise SettingError(f"{name} {text!r} is zero. {_FORMS}.")
    if unit in _UNITS:
        return int(number * _UNITS[unit])
    if unit in ("slot", "slots"):
        if number.denominator != 1:
            raise SettingError(f"{name} {text!r}: slots come whole. {_FORMS}.")
        return int(number) * expert_bytes
    if unit:
        raise SettingError(f"{name} {text!r}: unit {unit!r} is none of {', '.join(_UNITS)}, slots. {_FORMS}.")
    if number > 1:
        raise SettingError(f"{name} {text!r} has no unit, and a fraction is at most 1. {_FORMS}.")
    slots = int(number * routed_experts)
    if slots == 0:
        raise SettingError(f"{name} {text!r} is less than one of {routed_experts} experts. {_FORMS}.")
    return slots * expert_bytes


def parse_bandwidth(text: str, *, name: str) -> float:
    """Bytes per second: '2GB/s', '500 MB/s'. SettingError naming the option, the value and the form."""
    match = _SIZE.fullmatch(text.removesuffix("/s"))
    if not text.endswith("/s") or match is None or match["unit"] not in _UNITS:
        raise SettingError(f"{name} {text!r} is no bandwidth. Give bytes per second: 2GB/s.")
    bytes_per_s = float(Fraction(match["number"]) * _UNITS[match["unit"]])
    if bytes_per_s <= 0:
        raise SettingError(f"{name} {text!r} is zero. Give bytes per second: 2GB/s.")
    return bytes_per_s


def slots_per_device(
    cache_bytes: int, routed_experts: int, expert_bytes: int, devices: int, *, name: str = "--expert-cache"
) -> int:
    """floor(total / devices / expert bytes) slots, or, where the total holds every routed expert, a slot for
    each expert that a device owns. SettingError where that is none."""
    if cache_bytes >= routed_experts * expert_bytes:
        return owned_experts(1, routed_experts, devices, 0)
    slots = cache_bytes // devices // expert_bytes
    if slots < 1:
        raise SettingError(
            f"{name} of {bytes_text(cache_bytes)} over {devices} device(s) holds no expert of "
            f"{bytes_text(expert_bytes)} per device. "
            f"Give {bytes_text(devices * expert_bytes)} ({devices}slots)."
        )
    return slots


def cycle_warning(layers: int, top_k: int, routed_experts: int, slots: int) -> tuple[str, ...]:
    """A warning, where so few slots that even LRU has no or hardly any hits."""
    cycle, certain = layers * top_k, (layers - 1) * top_k
    if slots > cycle or slots == routed_experts:
        return ()
    text = f"{slots} expert slots are at or below one token cycle ({layers} layers x top-{top_k} = {cycle})"
    if slots <= certain:
        text += f"; LRU has no hits at all with {certain} slots or fewer"
    return (f"{text}. Give more than {cycle} slots where memory allows.",)


def bytes_text(count: int) -> str:
    """A number of bytes, and the same in GB."""
    return f"{count} bytes ({count / 1e9:.2f} GB)"

"""What `load_model` accepts: every argument is checked before a file is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SettingError, did_you_mean
from ..policy.cache_size import parse_bandwidth
from ..serving.settings import CHOICES, LEAST, MAX_INTEGER, MOST

_TEXTS = ("policy", "expert_cache", "pinned_memory")
_PATHS = ("folder", "history")
_FLAGS = ("direct", "progress")
_LEAST = {name: LEAST[name] for name in ("prefetch_distance", "store_capacity", "seed")}
_LEAST["log_iterations"] = -1
_OPTIONAL = ("history", "prefetch_distance", "bandwidth_limit", "pinned_memory")
_RULES = ("frequency", "frequency_decay", "preempt_scope", "rank_prefill_by_tokens")


def check_arguments(given: Mapping[str, Any], rules: Mapping[str, Any]) -> None:
    """Raise SettingError, with the argument's name, for one of another type or out of range.

    given: the named arguments of `load_model` without `device`, which `parse_devices` checks; rules: the
    other keywords.
    """
    for name, value in given.items():
        if value is None and name in _OPTIONAL:
            continue
        if name in _TEXTS and not isinstance(value, str):
            raise _bad(name, value, "Give text.")
        if name in _PATHS and not isinstance(value, (str, Path)):
            raise _bad(name, value, "Give a path.")
        if name in _FLAGS and not isinstance(value, bool):
            raise _bad(name, value, "Give True or False.")
        if name in _LEAST:
            _check_integer(name, value)
    if given["source"] not in CHOICES["source"]:
        raise _bad("source", given["source"], "Give 'file' or 'host'.")
    if given["pinned_memory"] is not None and given["source"] != "host":
        raise SettingError("pinned_memory is of source='host': nothing else is pinned. Leave it out.")
    _check_rules(rules)


def bandwidth_of(given: float | str | None) -> float | None:
    """Bytes per second of `bandwidth_limit=`; None for no limit."""
    if given is None:
        return None
    if isinstance(given, str):
        return parse_bandwidth(given, name="bandwidth_limit")
    if not (_is_number(given) and math.isfinite(given) and given > 0):
        raise _bad("bandwidth_limit", given, "Give bytes per second: 2e9, or '2GB/s'.")
    return float(given)


def _check_rules(rules: Mapping[str, Any]) -> None:
    for name, value in rules.items():
        if name not in _RULES:
            near = did_you_mean(name, _RULES)
            raise SettingError(f"{name} is no argument of load_model; rules are {', '.join(_RULES)}.{near}")
        if name in CHOICES and value not in CHOICES[name]:
            raise _bad(name, value, f"Choose {' or '.join(map(repr, CHOICES[name]))}.")
        if name == "frequency_decay" and not (_is_number(value) and 0 < value <= 1):
            raise _bad(name, value, "Give a number above 0 and at most 1.")
        if name == "rank_prefill_by_tokens" and not isinstance(value, bool):
            raise _bad(name, value, "Give True or False.")


def _check_integer(name: str, value: Any) -> None:
    least, most = _LEAST[name], MOST.get(name, MAX_INTEGER)
    if type(value) is not int or not least <= value <= most:
        raise _bad(name, value, f"Give a whole number from {least} to {most}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bad(name: str, value: object, remedy: str) -> SettingError:
    return SettingError(f"{name} is {value!r}. {remedy}")

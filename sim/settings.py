"""Every setting of a run, from flags and from a TOML file, checked in one place.

Flag, TOML key and field share one name: `--max-num-seqs`, `max_num_seqs = 8`, `settings.max_num_seqs`.
Flags win over the file, the file over the defaults. `to_toml` writes a file that reruns the run exactly.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ..errors import SettingError, did_you_mean
from ..policy.model_spec import EXPERT_DTYPES, ExpertDtype
from ..serving.slo import parse_slo
from ..traces.files import unreadable_kind
from .compute import PEER_LINKS, PeerLink
from .memory import DENSE, Dense

T = TypeVar("T", bound="str | int | float | None")


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one run or grid; a SettingError names option, value and remedy."""

    trace: str  # path of a request trace
    model: str = "mixtral-8x7b"  # a name, or the path of a config.json
    hardware: tuple[str, ...] = ("rtx3090x6",)  # names, or paths of profiles
    set: tuple[str, ...] = ()  # figures of the profiles, changed: "link.bandwidth=55GB/s"
    host_memory: str | None = None  # in place of the profile's own; what does not fit is on the SSD
    dense: Dense = "device0"  # where dense weights and KV cache are
    peer_link: PeerLink = "nvlink"  # what activations take between devices
    policy: tuple[str, ...] = ("finemoe",)  # names of systems, or ("all",)
    expert_cache: tuple[str, ...] = ("24GB",)  # over all devices: bytes, a fraction of all experts, or slots
    expert_dtype: ExpertDtype = "bf16"
    routing: str = "synthetic"  # or the path of a routing trace
    backend: str = "sim"

    num_requests: int | Literal["all"] = 256
    sort: bool = False  # accept time stamps that go backward
    start: int = 0  # requests of the trace left out at its beginning
    sample: int | None = None  # draw that many of them at random
    time_scale: float = 1.0  # factor on the gaps between arrivals
    rate: tuple[float, ...] = ()  # requests per second, in place of the trace's own; excludes time_scale
    prompt_tokens: int | None = None  # in place of the trace's own
    output_tokens: int | None = None
    max_num_seqs: int = 8
    token_budget: int = 8192  # prompt tokens of one prefill step
    offline: bool = False  # one prompt after another, the store filled from 70 % of the requests
    warmup: int = 0  # requests served and not counted
    slo: str | None = None  # limits on latencies: "ttft_p90<2s,tpot_p90<0.2s"
    seed: int = 0

    prefetch_distance: int | None = None  # None: the model's own
    store_capacity: int = 1000  # expert maps
    frequency: Literal["run", "residency"] = "run"
    frequency_decay: float = 1.0
    preempt_scope: Literal["device", "all"] = "device"
    rank_prefill_by_tokens: bool = False

    decisions: int | Literal["all"] = 1000  # iterations whose events and commands are kept
    assumed: tuple[str, ...] = ()  # settings that nobody gave: their defaults are ASSUMED

    def __post_init__(self) -> None:
        for name in _FILES:
            given = getattr(self, name)
            for path in given if isinstance(given, tuple) else (given,):
                problem = path_problem(path)
                if problem:
                    raise _bad(name, repr(path[:60]), problem)
        for name in _LISTS:
            values = [str(value) for value in getattr(self, name)]
            if (not values and name not in _EMPTY) or not all(values):
                raise _bad(name, ",".join(values), "Give one or more values with commas between them.")
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise _bad(name, ",".join(values), f"{twice[0]} stands there twice; name it once.")
        if self.backend in ("cpu", "cuda"):
            raise _bad("backend", self.backend, "That backend is not built yet; use sim.")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise _bad(name, value, f"Choose {' or '.join(choices)}.{did_you_mean(value, choices)}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise _bad(name, value, f"Give a whole number of {least} or more.")
            most = _MOST.get(name, _MAX_INTEGER)
            if isinstance(value, int) and value > most:
                raise _bad(name, value, f"Give a whole number of at most {most}.")
        for name, numbers in (("time_scale", (self.time_scale,)), ("rate", self.rate)):
            for number in numbers:
                if not (math.isfinite(number) and number > 0):
                    raise _bad(name, number, "Give a number above 0.")
        if not 0 < self.frequency_decay <= 1:
            raise _bad("frequency_decay", self.frequency_decay, "Give a number above 0 and at most 1.")
        if self.rate and self.time_scale != 1:
            raise _bad("rate", ",".join(map(str, self.rate)), "It excludes --time-scale: give one of them.")
        if self.slo is not None:
            parse_slo(self.slo)
        if self.offline and (self.rate or self.time_scale != 1):
            raise SettingError(
                "--offline serves one prompt after another, so --rate and --time-scale mean nothing there. "
                "Leave them out."
            )


_CHOICES: dict[str, tuple[str, ...]] = {
    "backend": ("sim",),
    "dense": DENSE,
    "expert_dtype": EXPERT_DTYPES,
    "frequency": ("run", "residency"),
    "peer_link": PEER_LINKS,
    "preempt_scope": ("device", "all"),
}
_LEAST = {
    "num_requests": 1,
    "start": 0,
    "sample": 1,
    "prompt_tokens": 1,
    "output_tokens": 1,
    "max_num_seqs": 1,
    "token_budget": 1,
    "warmup": 0,
    "seed": 0,
    "prefetch_distance": 1,
    "store_capacity": 1,
    "decisions": 0,
}
_MAX_INTEGER = 2**31 - 1
_MOST = {"store_capacity": 1_000_000, "prefetch_distance": 4096, "seed": 2**63 - 1}
# Settings whose defaults say something about the world; the defaults of the others change nothing.
_ASSUMABLE = (
    "model",
    "hardware",
    "dense",
    "peer_link",
    "policy",
    "expert_cache",
    "expert_dtype",
    "routing",
    "num_requests",
    "max_num_seqs",
    "token_budget",
    "seed",
    "prefetch_distance",
    "store_capacity",
    "frequency",
    "preempt_scope",
)
_FIELDS: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(RunSettings)}
_LISTS = ("policy", "expert_cache", "hardware", "rate", "set")
_EMPTY = ("rate", "set")  # lists that need no entry
_FILES = ("trace", "model", "hardware", "routing")  # names, or paths of files
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def flag(name: str) -> str:
    """The flag of a setting: `max_num_seqs` → `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def path_problem(path: str) -> str | None:
    """What makes a text no path, as a sentence, or None."""
    if not path:
        return "Give a name or a path."
    if "\0" in path:
        return "A path has no NUL character; correct it."
    try:
        parts = path.encode("utf-8").split(b"/")
    except UnicodeEncodeError:
        return "It is not UTF-8; rename the file."
    if max(map(len, parts)) > 255 or len(path) > 4095:
        return "That is too long for the name of a file; give a shorter path."
    return None


def _bad(name: str, value: object, remedy: str) -> SettingError:
    return SettingError(f"{flag(name)} is {value}. {remedy}")


def resolve(options: Mapping[str, object], config: str | Path | None = None) -> RunSettings:
    """Settings from options (None: not given) over a TOML file over the defaults.

    What neither gives and is more than "off" is listed in `assumed`. Unknown names are refused with the
    nearest known one.
    """
    if config is not None and not isinstance(config, str | Path):
        raise SettingError(f"--config is {config!r}. Give the path of a TOML file.")
    given = _read(Path(config)) if config is not None else {}
    once_assumed = given.pop("assumed", None)
    chosen = {name: value for name, value in options.items() if value is not None}
    for name in chosen:
        _known(name, "")
    if "trace" not in chosen and "trace" not in given:
        raise SettingError("--trace is missing. Give the file of a request trace: --trace FILE.")
    where = dict.fromkeys(given, f" in {config}") | dict.fromkeys(chosen, "")
    given |= chosen
    if once_assumed is None:
        assumed = tuple(name for name in _ASSUMABLE if name not in given)
    else:  # a rerun of resolved settings: what was ASSUMED then is ASSUMED now, unless it is given
        once = _convert("assumed", once_assumed, f" in {config}")
        for name in once:
            if name not in _ASSUMABLE:
                raise SettingError(
                    f"assumed in {config} has {name!r}, which is no setting that can be ASSUMED."
                    f"{did_you_mean(name, _ASSUMABLE)} Leave it out."
                )
        assumed = tuple(name for name in once if name not in chosen)
    values = {name: _convert(name, value, where[name]) for name, value in given.items()}
    return RunSettings(**values, assumed=assumed)


def to_toml(settings: RunSettings) -> str:
    """The settings as TOML; `resolve({}, config=file)` gives them back. Settings that are None are left
    out."""
    lines = []
    for name in _FIELDS:
        value = getattr(settings, name)
        if value is not None:
            lines.append(f"{name} = {_toml(value)}\n")
    return "".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON's escapes are TOML's; TOML wants DEL escaped as well.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(path: Path) -> dict[str, object]:
    kind = unreadable_kind(path)
    if kind is not None:
        raise SettingError(f"--config {str(path)!r} is {kind}. Give a TOML file.")
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingError(f"--config {path} cannot be read: {error.strerror}.") from error
    except RecursionError:
        raise SettingError(f"--config {path} is nested too deeply. Give a file of settings.") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise SettingError(f"--config {path} is not TOML: {error}.") from error
    values: dict[str, object] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        _known(name, f" in {path}")
        if name in values:
            raise SettingError(f"{key} stands twice in {path}. Keep one of them.")
        values[name] = value
    return values


def _known(name: str, where: str) -> None:
    if name not in _FIELDS:
        raise SettingError(f"{name}{where} is not a setting.{did_you_mean(name, tuple(_FIELDS))}")


def _convert(name: str, value: object, where: str) -> Any:
    """A value from a flag, a keyword or TOML as the field's type."""
    if isinstance(value, Path):
        value = str(value)
    if name in _CHOICES and isinstance(value, str):
        return value  # the settings check it, and know the nearest choice
    given = value
    if name in _LISTS and isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if name == "rate" and isinstance(value, int | float):
        value = [value]
    if name in ("num_requests", "decisions") and isinstance(value, str):
        text = "0" if name == "decisions" and value == "none" else value
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 30 else text
    try:
        # A flag's value is a text; in TOML a number must be one.
        return msgspec.convert(value, _FIELDS[name], strict=bool(where))
    except msgspec.ValidationError as error:
        raise SettingError(f"{flag(name)}{where} is {repr(given)[:60]}. Give {_wanted(name)}.") from error


def _wanted(name: str) -> str:
    if name == "rate":
        return "a number or a list of numbers"
    if name in (*_LISTS, "assumed"):
        return "a text or a list of texts"
    if name == "num_requests":
        return "a whole number or all"
    if name == "decisions":
        return "a whole number, all or none"
    if name in _CHOICES:
        return " or ".join(_CHOICES[name])
    kind = _FIELDS[name]
    return next(word for type_, word in _WORDS.items() if kind == type_ or kind == type_ | None)

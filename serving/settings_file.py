"""Settings from flags and from a TOML file, and back.

Flags win over the file, the file over the defaults. `to_toml` writes a file that reruns the run exactly.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import SettingError, did_you_mean
from ..traces.files import unreadable_kind
from .settings import ASSUMABLE, CHOICES, FIELDS, LISTS, RunSettings, flag, meaningless

#: defaults that differ with a real backend
_REAL_DEFAULTS: dict[str, Any] = {"expert_cache": ("0.5",)}
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


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
    unused = _unused(given, where)
    if once_assumed is None:
        assumed = tuple(name for name in ASSUMABLE if name not in (*given, *unused))
    else:  # a rerun of resolved settings: what was ASSUMED then is ASSUMED now, unless it is given
        once = _convert("assumed", once_assumed, f" in {config}")
        for name in once:
            if name not in ASSUMABLE:
                raise SettingError(
                    f"assumed in {config} has {name!r}, which is no setting that can be ASSUMED."
                    f"{did_you_mean(name, ASSUMABLE)} Leave it out."
                )
        assumed = tuple(name for name in once if name not in chosen)
    values = {name: _convert(name, value, where[name]) for name, value in given.items()}
    if given.get("backend", "sim") != "sim":
        values = _REAL_DEFAULTS | values
    return RunSettings(**values, assumed=assumed)


def _unused(given: Mapping[str, object], where: Mapping[str, str]) -> tuple[str, ...]:
    """Settings that mean nothing with the backend; SettingError where one is given, or the model of a real
    one is not."""
    backend = given.get("backend", "sim")
    if backend not in CHOICES["backend"]:
        return ()  # RunSettings refuses it
    unused = meaningless(str(backend))
    for name in given:
        if name in unused:
            other = "--backend cpu or cuda" if backend == "sim" else "--backend sim"
            raise SettingError(
                f"{flag(name)}{where[name]} means nothing with --backend {backend}. "
                f"Leave it out, or take {other}."
            )
    if backend != "sim" and "model" not in given:
        raise SettingError(
            f"--model is missing. Give the folder of a checkpoint: --backend {backend} --model DIR."
        )
    return unused


def to_toml(settings: RunSettings) -> str:
    """The settings as TOML; `resolve({}, config=file)` gives them back. Settings that are None are left
    out."""
    lines = []
    unused = meaningless(settings.backend)
    for name in FIELDS:
        value = getattr(settings, name)
        if value is not None and name not in unused:
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
    if name not in FIELDS:
        raise SettingError(f"{name}{where} is not a setting.{did_you_mean(name, tuple(FIELDS))}")


def _convert(name: str, value: object, where: str) -> Any:
    """A value from a flag, a keyword or TOML as the field's type."""
    if isinstance(value, Path):
        value = str(value)
    if name in CHOICES and isinstance(value, str):
        return value  # the settings check it, and know the nearest choice
    given = value
    if name in LISTS and isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if name == "rate" and isinstance(value, int | float):
        value = [value]
    if name in ("num_requests", "decisions") and isinstance(value, str):
        text = "0" if name == "decisions" and value == "none" else value
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 30 else text
    try:
        # A flag's value is a text; in TOML a number must be one.
        return msgspec.convert(value, FIELDS[name], strict=bool(where))
    except msgspec.ValidationError as error:
        raise SettingError(f"{flag(name)}{where} is {repr(given)[:60]}. Give {_wanted(name)}.") from error


def _wanted(name: str) -> str:
    if name == "rate":
        return "a number or a list of numbers"
    if name in (*LISTS, "assumed"):
        return "a text or a list of texts"
    if name == "num_requests":
        return "a whole number or all"
    if name == "decisions":
        return "a whole number, all or none"
    if name in CHOICES:
        return " or ".join(CHOICES[name])
    kind = FIELDS[name]
    return next(word for type_, word in _WORDS.items() if kind == type_ or kind == type_ | None)

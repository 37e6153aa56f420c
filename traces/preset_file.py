"""Presets of the synthetic generator as TOML files."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from ..errors import SettingError
from .files import replacing, unwritable
from .routing_preset import RoutingPreset, load_preset

_HEAD = """# Synthetic routing for {model}: what each parameter means stands in routing_preset.py, how routing
# is made in synthetic.py. Every group of parameters names its origin under [evidence].

"""
_MEASURED = """
# Of the generated routing, seed 0: 100 requests of 80 decode iterations, 1,000 stored maps, distance 3.
"""


def preset_text(preset: RoutingPreset) -> str:
    """The preset as TOML; `load_preset` gives it back."""
    plain, groups = [], []
    for name, value in msgspec.to_builtins(preset).items():
        if not isinstance(value, dict):
            plain.append(f"{name} = {_toml(value)}\n")
            continue
        head = _MEASURED if name == "measured" else ""
        lines = [f"{_key(key)} = {_toml(item)}\n" for key, item in value.items()]
        groups.append(f"{head}\n[{name}]\n{''.join(lines)}")
    printable = "".join(c if c.isprintable() else " " for c in preset.model)
    return _HEAD.format(model=printable) + "".join(plain) + "".join(groups)


def check_preset_output(path: Path) -> None:
    """Raise SettingError unless `path` is absent or a preset: nothing else is replaced."""
    if path.is_symlink() or path.is_dir():
        what = "a link" if path.is_symlink() else "a directory"
        raise SettingError(f"--output {path} is {what}. Name a TOML file.")
    if not path.parent.is_dir():
        raise SettingError(f"--output {path}: there is no folder {path.parent}. Create it first.")
    if path.exists():
        try:
            load_preset(path)
        except SettingError:
            raise SettingError(
                f"--output {path} exists and is no preset. Choose another name, or remove that file first."
            ) from None


def write_preset(path: Path, preset: RoutingPreset) -> None:
    """Write the preset; the file appears under its name only when it is complete."""
    check_preset_output(path)
    try:
        with replacing(path) as partial, partial.open("x", encoding="utf-8") as file:
            file.write(preset_text(preset))
    except OSError as error:
        raise unwritable(path, error) from error


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        items = [_toml(item) for item in value]
        if len(items) <= 10:
            return "[" + ", ".join(items) + "]"
        rows = [", ".join(items[at : at + 10]) for at in range(0, len(items), 10)]
        return "[\n" + "".join(f"    {row},\n" for row in rows) + "]"
    if isinstance(value, int) and value >= 1_000_000:
        return f"{value:_}"
    # JSON's numbers and escapes are TOML's; TOML wants DEL escaped as well.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

"""Find a user's policy by its text, `path.py:Class` or an entry point's name, and make it fit for the core.

Nothing here is imported unless such a policy is asked for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..errors import PolicyError, SettingError, did_you_mean
from .core import total_slots
from .plugin import Policy, Shape
from .plugin_file import digest_of, import_file
from .plugin_guard import USERS_ERRORS, GuardedPolicy, users_traceback
from .system import System

GROUP = "finemoe.systems"
_TRAITS = ("eviction", "selector", "priority")


@dataclass(frozen=True)
class LoadedPolicy:
    """A user's class; `digest`: of its source and its helpers in the same folder, empty without a source."""

    policy: type[Policy]
    digest: str


def policy_system(text: str) -> System:
    """The system that `--policy path.py:Class` runs. Errors as of `load_policy`."""
    return _system_of(text, load_policy(text).policy)


def load_policy(text: str) -> LoadedPolicy:
    """The class of `path.py:Class` (from the current directory on) or of an entry point that is one.

    Raises SettingError where there is no such file, class or entry point, or it is no Policy, and
    PolicyError, with the user's traceback, where importing it fails.
    """
    if ":" not in text:
        return _loaded(text, _load_entry(text))
    file, _, name = text.rpartition(":")
    if not file or not name.isidentifier():
        raise SettingError(f"--policy {text} is no policy. Write path.py:Class.")
    path = Path(file)
    if not path.is_file():
        raise SettingError(
            f"--policy {text}: there is no file {file}. Give its path, relative to the current directory."
        )
    imported = import_file(text, path)
    found = getattr(imported.module, name, None)
    if found is None:
        has = [name for name, value in vars(imported.module).items() if _is_policy(value)]
        hint = did_you_mean(name, has, cutoff=0.4) or f" Its policies: {', '.join(has) or 'none'}."
        raise SettingError(f"--policy {text}: {file} has no class {name}.{hint}")
    _check_policy(text, found)
    return LoadedPolicy(found, imported.digest)


def guarded_policy(options: Mapping[str, int | float | str | bool]) -> GuardedPolicy:
    """A fresh policy for a core of these options, whose `policy` says which one.

    Raises SettingError where it cannot be found or its source is not that of the options, PolicyError where
    its file or its constructor raises.
    """
    text = str(options["policy"])
    loaded = load_policy(text)
    if loaded.digest != options["policy_digest"]:
        raise SettingError(
            f"the source of the policy {text} has changed since the run: its digest was "
            f"{options['policy_digest'] or 'none'}, it is {loaded.digest or 'none'}. Restore it or run again."
        )
    names = ("layers", "experts", "top_k", "devices", "slots_per_device")
    layers, experts, top_k, devices, slots_per_device = (int(options[name]) for name in names)
    shape = Shape(
        layers=layers,
        experts=experts,
        top_k=top_k,
        prefetch_distance=int(options["prefetch_distance"]),
        devices=devices,
        slots=total_slots(layers, experts, devices, slots_per_device),
        expert_bytes=int(options["expert_bytes"]),
        embedding_width=int(options["embedding_width"]),
        seed=int(options["policy_seed"]),
    )
    try:
        policy = loaded.policy(shape)
    except USERS_ERRORS as error:
        raise PolicyError(text, "", "its constructor failed", users_traceback(error, (__file__,))) from error
    return GuardedPolicy(text, policy, layers, experts)


def plugin_names() -> tuple[str, ...]:
    """Names of the entry points, none of which is imported for it."""
    return tuple(sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)}))


def plugin_system(name: str) -> System:
    """The system of an entry point: a subclass of Policy, or a System. Errors as of `load_policy`."""
    value = _load_entry(name)
    if not isinstance(value, System):
        return _system_of(name, _loaded(name, value).policy)
    if "plugin" in (value.predictor, value.eviction) or value.policy is not None:
        raise SettingError(
            f"--policy {name}: its System names a policy. Let the entry point name the Policy class itself."
        )
    changed = {"name": name, "group": "plugin"}
    return System(**{field: getattr(value, field) for field in System.__struct_fields__} | changed)


def _load_entry(name: str) -> object:
    entries = {entry.value: entry for entry in importlib.metadata.entry_points(group=GROUP, name=name)}
    if not entries:
        raise SettingError(f"--policy {name}: no installed package has an entry point {name} in {GROUP}.")
    if len(entries) > 1:
        raise SettingError(
            f"--policy {name}: {len(entries)} installed packages give a system of that name "
            f"({', '.join(sorted(entries))}). Uninstall all but one."
        )
    (entry,) = entries.values()
    try:
        return entry.load()
    except USERS_ERRORS as error:
        internal = (__file__, str(importlib.metadata.__file__), str(importlib.__file__))
        raise PolicyError(
            name, "", f"{entry.value} cannot be imported", users_traceback(error, internal)
        ) from error


def _loaded(text: str, value: object) -> LoadedPolicy:
    """The class of an entry point."""
    _check_policy(text, value)
    assert isinstance(value, type)
    try:
        source = inspect.getsourcefile(value)
    except TypeError:
        source = None
    return LoadedPolicy(value, digest_of([Path(source)]) if source and Path(source).is_file() else "")


def _system_of(text: str, policy: type[Policy]) -> System:
    own = {name for name in vars(Policy) if getattr(policy, name) is not getattr(Policy, name)}
    return System(
        name=policy.name or policy.__name__,
        description=policy.description or "a policy of your own",
        source=text,
        group="plugin",
        predictor="plugin" if own & {"begin_iteration", "gate", "end_iteration"} else "none",
        selector=policy.selector,
        priority=policy.priority,
        eviction="plugin" if "eviction_key" in own else policy.eviction,
        policy=text,
    )


def _is_policy(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Policy) and value is not Policy


def _check_policy(text: str, value: object) -> None:
    """SettingError unless it is a policy whose class attributes mean something."""
    if not _is_policy(value):
        what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        raise SettingError(f"--policy {text} is {what}. Derive it from finemoe.policy.plugin.Policy.")
    known = [name for name in (*vars(Policy), *_TRAITS) if not name.startswith("_")]
    for name in vars(value):
        hint = did_you_mean(name, known, cutoff=0.8)
        if hint and name not in known:
            raise SettingError(f"--policy {text} has {name}, which nothing calls.{hint} Rename it.")
    hints: dict[str, Any] = get_type_hints(Policy)
    for trait in _TRAITS:
        choices = get_args(get_args(hints[trait])[0])
        given = getattr(value, trait)
        if given not in choices:
            hint = did_you_mean(str(given), choices)
            raise SettingError(
                f"--policy {text}: its {trait} is {given!r}. Choose {' or '.join(choices)}.{hint}"
            )
    for trait in ("name", "description"):
        given = getattr(value, trait)
        if not isinstance(given, str) or not given.isprintable():
            raise SettingError(f"--policy {text}: its {trait} is {given!r}. Give a text of one line.")

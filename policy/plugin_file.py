"""Import a user's policy from a file, and tell whether the file has changed since."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..errors import PolicyError, SettingError
from .plugin_guard import USERS_ERRORS, users_traceback

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class ImportedFile:
    """A policy's module, and what its digest is of."""

    module: ModuleType
    digest: str
    helpers: tuple[str, ...]  # top-level names


_files: dict[Path, ImportedFile] = {}  # imported once, until a source changes


def import_file(text: str, path: Path) -> ImportedFile:
    """Import a file under a private name; helpers are found in its folder."""
    path = path.resolve()
    folder = path.parent
    sources = dict(_sources(path))
    digest = digest_of([path, *(file for files in sources.values() for file in files)])
    known = _files.get(path)
    if known is not None:
        if known.digest == digest:
            return known
        for name in [*sys.modules]:
            if name.partition(".")[0] in known.helpers:
                del sys.modules[name]
    for name in sources:
        _check_helper(text, name, folder)
    private = f"_finemoe_policy_{hashlib.blake2b(f'{path} {digest}'.encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(private, path)
    if spec is None:
        raise SettingError(f"--policy {text}: {path.name} is no Python file. Its name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    importlib.invalidate_caches()
    sys.modules[private] = module
    sys.path.insert(0, str(folder))
    try:
        # Compiled here, and not by the loader, which may find bytecode of an older state of the file.
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except USERS_ERRORS as error:
        del sys.modules[private]
        shown = users_traceback(error, (__file__,))
        raise PolicyError(text, "", f"{path.name} cannot be imported", shown) from error
    finally:
        # Imports inside the policy's methods find helpers still, but shadow nothing of others.
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    _files[path] = ImportedFile(module, digest, tuple(sources))
    return _files[path]


def _sources(path: Path) -> Iterator[tuple[str, list[Path]]]:
    """Helpers that a file imports from its own folder, and those that they import: name and files."""
    folder = path.parent
    if folder.name in ("site-packages", "dist-packages"):  # what is installed there is nobody's helper
        return
    seen: set[str] = {path.stem}
    waiting = [path]
    while waiting:
        for name in _imported(waiting.pop()):
            module, package = folder / f"{name}.py", folder / name
            if name in seen or name == "finemoe":
                continue
            seen.add(name)
            if (package / "__init__.py").is_file():
                files = sorted(package.rglob("*.py"))
            elif module.is_file():
                files = [module]
            else:
                continue
            waiting += files
            yield name, files


def _imported(path: Path) -> list[str]:
    """Top-level names that a file imports; none where it is no Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module)
    return sorted({name.partition(".")[0] for name in names})


def _check_helper(text: str, name: str, folder: Path) -> None:
    """A helper's name must be free: Python would hand out the other module without a word."""
    if name not in sys.modules:
        return
    other = getattr(sys.modules[name], "__file__", None)
    if other is None or folder not in Path(other).resolve().parents:
        raise SettingError(
            f"--policy {text}: its helper {name} has the name of a module that is in use "
            f"({other or 'built in'}). Rename it."
        )


def digest_of(files: list[Path]) -> str:
    """BLAKE2b of the files in this order."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for file in files:
        found.update(hashlib.blake2b(file.read_bytes()).digest())
    return found.hexdigest()

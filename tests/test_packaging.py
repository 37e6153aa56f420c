"""What a wheel holds: every folder of the package with its data, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
ROOT_FILES = ("__init__.py", "__main__.py", "errors.py", "py.typed", "_core.pyi")


def test_pyproject_names_every_folder() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tool["scikit-build"]["wheel"]["packages"] == {f"finemoe/{name}": name for name in FOLDERS}
    assert sorted(tool["mypy"]["packages"]) == [f"finemoe.{name}" for name in FOLDERS]


def test_every_root_module_is_installed() -> None:
    assert {path.name for path in (*ROOT.glob("*.py"), *ROOT.glob("*.pyi"))} < set(ROOT_FILES)
    recipe = (ROOT / "CMakeLists.txt").read_text()
    install = recipe.partition("install(FILES ")[2].partition(" DESTINATION")[0]
    assert sorted(install.split()) == sorted(ROOT_FILES)


@pytest.mark.long
def test_wheel_holds_the_package_and_its_data(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    held = {name.removeprefix("finemoe/") for name in names if not name.startswith("finemoe-")}
    (core,) = {name for name in held if name.startswith("_core.") and name.endswith((".so", ".pyd"))}
    files = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()]
    sources = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert {"calibration/profiles/h200.toml", "traces/samples/azure_conv_synthetic.parquet"} < sources
    assert held == {core, *ROOT_FILES, *sources}
    assert any(name.endswith("licenses/LICENSE") for name in names)

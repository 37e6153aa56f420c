"""scripts/gpu_check.sh as far as it goes without a GPU: whole on the CPU, and refusing what it cannot use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.sh"


def run(out: Path, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": python, "OUT": str(out), "TMPDIR": str(out)}
    return subprocess.run(
        [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.long
def test_the_dry_run_goes_through_every_step(tmp_path: Path) -> None:
    for module in ("torch", "transformers", "accelerate"):
        pytest.importorskip(module, reason=f"{module} is not installed (extra `demo`)")
    found = run(tmp_path, "--dry-run")
    assert found.returncode == 0, found.stdout + found.stderr
    table = (tmp_path / "gpu_check.md").read_text()
    for step in ("tests", "figures"):
        assert re.search(rf"\| {step} \| passed, \d+ s \|", table)
    for name in ("check: all checks", "check: a fresh core decides alike on the same log"):
        assert f"| {name} | passed" in table
    for system in ("resident", "lru 0.5", "finemoe 0.5", "lru 0.25", "finemoe 0.25"):
        assert re.search(rf"\| TPOT, {system} \| [0-9.]+ ms", table)
    assert table in found.stdout
    assert not list(tmp_path.glob("finemoe-gpu-check.*"))


@pytest.mark.parametrize(
    ("arguments", "python", "problem"),
    [
        (["--dry"], sys.executable, "unknown option --dry"),
        (["--dry-run"], "/no/python", "/no/python does not run; set PYTHON"),
    ],
)
def test_what_it_cannot_use_is_said_in_one_line(
    tmp_path: Path, arguments: list[str], python: str, problem: str
) -> None:
    found = run(tmp_path, *arguments, python=python)
    assert found.returncode == 2
    assert problem in found.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("finemoe-gpu-check.*"))


def test_modules_that_lack_are_named_with_the_remedy(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    bare.chmod(0o755)
    found = run(tmp_path, "--dry-run", python=str(bare))
    assert found.returncode == 2
    assert re.search(r"lacks: .*\bmsgspec\b.*scripts/gpu_wheels\.sh", found.stderr)

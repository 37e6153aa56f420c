"""The tutorial's policy, exactly as printed: short, correct, and as good as the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import finemoe
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "writing-a-policy.md").read_text("utf-8")
POLICY, TEST_FILE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(COMMAND,) = re.findall(r"    finemoe-sim ((?:.*\\\n)*.*)\n", PAGE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's two files."""
    (tmp_path / "my_policy.py").write_text(POLICY, "utf-8")
    (tmp_path / "test_my_policy.py").write_text(TEST_FILE, "utf-8")
    return tmp_path


def python(folder: Path, *words: str) -> str:
    """Standard output of a module run in the folder."""
    found = os.pathsep.join([*sys.path, str(Path(finemoe.__file__).absolute().parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": found},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_policy_is_under_40_lines() -> None:
    assert len(POLICY.splitlines()) < 40


def test_the_command_gives_the_hit_rates_of_the_page(folder: Path) -> None:
    words = shlex.split(COMMAND.replace("\\\n", " "))
    trace = words.index("--trace") + 1
    words[trace] = str(ROOT / words[trace])
    lru, mine = json.loads(python(folder, "finemoe", "sim", *words, "--json", "--quiet", "--output", "out"))[
        "runs"
    ]
    assert (lru["policy"], mine["policy"]) == ("lru", "last-iteration")
    told = [float(text) for text in re.findall(r"(\d+\.\d) %", PAGE)]
    assert [round(100 * run["hit_rate"], 1) for run in (lru, mine)] == told
    assert "last-iteration-24GB/decisions.parquet: identical" in python(folder, "finemoe", "replay", "out")


def test_the_contract_runs_over_the_policy_as_the_page_shows(folder: Path) -> None:
    assert "5 passed" in python(folder, "pytest", "-q", "-p", "no:cacheprovider", "test_my_policy.py")

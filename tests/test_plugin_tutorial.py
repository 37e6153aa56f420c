"""The tutorial's policy, exactly as printed: short, correct, and as good as the page says."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from finemoe.cli.simulate import main

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "writing-a-policy.md").read_text("utf-8")
POLICY, TEST_FILE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(COMMAND,) = re.findall(r"    finemoe-sim ((?:.*\\\n)*.*)\n", PAGE)


def test_the_policy_is_under_40_lines() -> None:
    assert len(POLICY.splitlines()) < 40


def test_the_command_gives_the_hit_rates_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_policy.py").write_text(POLICY, "utf-8")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(COMMAND.replace("\\\n", " "))
    words[words.index("--trace") + 1] = str(ROOT / words[words.index("--trace") + 1])
    monkeypatch.setattr("sys.argv", ["finemoe-sim", *words, "--json", "--quiet", "--output", "out"])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    lru, mine = json.loads(printed.getvalue())["runs"]
    assert (lru["policy"], mine["policy"]) == ("lru", "last-iteration")
    told = [float(text) for text in re.findall(r"(\d+\.\d) %", PAGE)]
    assert [round(100 * run["hit_rate"]["all"], 1) for run in (lru, mine)] == told


def test_the_contract_runs_over_the_policy_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_policy.py").write_text(POLICY, "utf-8")
    (tmp_path / "test_my_policy.py").write_text(TEST_FILE, "utf-8")
    monkeypatch.chdir(tmp_path)
    assert pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_my_policy.py"]) == 0

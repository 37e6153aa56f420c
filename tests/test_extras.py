"""Commands that need an extra say so where it is missing, and load it only when they run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from finemoe.errors import SettingError
from finemoe.realexec.extras import require


def test_what_is_missing_is_named_with_its_extra() -> None:
    require("finemoe trace record", "json", "numpy")
    with pytest.raises(SettingError, match=r"absent_one and absent_two.*pip install 'finemoe\[real\]'"):
        require("finemoe trace record", "json", "absent_one", "absent_two")


@pytest.mark.parametrize("arguments", [["trace", "--help"], ["trace", "record", "--help"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    probe = (
        f"import sys; sys.argv = ['finemoe', *{arguments!r}]\n"
        "from finemoe.cli.entry import main\n"
        "try:\n    main()\n"
        "finally:\n    heavy = [name for name in ('torch', 'transformers') if name in sys.modules]\n"
        "    print(heavy, file=sys.stderr)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "record" in done.stdout

"""Find ../shared/data, or skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def shared(path: str) -> Path:
    """Path of a file under shared/data; skips the test where the folder is absent."""
    root = Path(
        os.environ.get("FINEMOE_SHARED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
    )
    if not (root / path).exists():
        pytest.skip(f"needs {path} under {root} (../shared/data is not part of a user's checkout)")
    return root / path

"""The documentation's example of a new system runs, and the pages name files that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from finemoe.policy import systems
from finemoe.policy.system import System
from finemoe.policy.systems import SYSTEMS
from finemoe.sim.run import simulate

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
SAMPLE = ROOT / "traces" / "samples" / "azure_conv_synthetic.parquet"


def test_the_example_of_a_new_system_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "adding-a-system.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"System": System}
    exec(code, names)
    monkeypatch.setitem(systems.SYSTEMS, "map-lru", names["MAP_LRU"])
    options: dict[str, Any] = {"num_requests": 3, "output_tokens": 20, "expert_cache": "0.25"}
    results = simulate(SAMPLE, policy="map-lru,lru", output=tmp_path / "out", **options)
    mapped, plain = results.runs
    assert mapped.policy == "map-lru"
    assert mapped.prefetch_useful_bytes
    assert not plain.prefetch_useful_bytes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_system_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for name, system in SYSTEMS.items():
        assert f"| [`{name}`](docs/systems/{name}.md) |" in readme or (
            system.group == "ablation" and f"`{name}`" in readme
        )

"""Arguments of `load_model`: each bad one is refused by its name, before a file is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from finemoe.errors import SettingError
from finemoe.realexec.load import load_model
from tiny_models import tiny_model


@pytest.mark.parametrize(
    "arguments",
    [
        {"policy": None},
        {"expert_cache": 0.5},
        {"expert_cache": None},
        {"device": 0},
        {"device": None},
        {"device": []},
        {"device": [0]},
        {"source": "disk"},
        {"source": None},
        {"prefetch_distance": 0},
        {"prefetch_distance": 1.0},
        {"prefetch_distance": True},
        {"prefetch_distance": 10**9},
        {"store_capacity": 0},
        {"store_capacity": None},
        {"history": 3},
        {"seed": -1},
        {"direct": 1},
        {"progress": "no"},
        {"bandwidth_limit": 0},
        {"bandwidth_limit": -1.0},
        {"bandwidth_limit": float("nan")},
        {"bandwidth_limit": float("inf")},
        {"bandwidth_limit": True},
        {"bandwidth_limit": "1GB"},
        {"bandwidth_limit": [1]},
        {"log_iterations": -2},
        {"log_iterations": "all"},
        {"pinned_memory": 10**9},
        {"pinned_memory": "1GB"},  # of source="file"
        {"frequency": "always"},
        {"frequency_decay": 0},
        {"frequency_decay": "1"},
        {"preempt_scope": None},
        {"rank_prefill_by_tokens": 1},
        {"store_capacit": 10},
        {"layers": 2},
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_by_its_name(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(arguments))):
        load_model(tmp_path / "nowhere", **arguments)


def test_a_folder_that_is_no_path_is_refused() -> None:
    given: Any = 7
    with pytest.raises(SettingError, match="folder is 7"):
        load_model(given)


def test_what_is_given_is_what_the_model_runs_with(tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    model = load_model(
        tmp_path,
        "finemoe",
        "1.0",
        prefetch_distance=1,
        store_capacity=1,
        bandwidth_limit="1GB/s",
        log_iterations=-1,
        frequency="residency",
        frequency_decay=0.5,
        preempt_scope="all",
        rank_prefill_by_tokens=True,
    )
    options = model.finemoe.options
    assert (options["prefetch_distance"], options["store_capacity"]) == (1, 1)
    assert (options["frequency"], options["frequency_decay"]) == ("residency", 0.5)
    assert (options["preempt_scope"], options["rank_prefill_by_tokens"]) == ("all", True)
    model.finemoe.close()


def test_an_offloaded_model_is_not_saved_without_its_experts(tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model", "lru", "1.0")
    with pytest.raises(SettingError, match=r"experts .* are not in it\. Copy the checkpoint's folder"):
        model.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    model.finemoe.close()

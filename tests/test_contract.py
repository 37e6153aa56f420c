"""The contract, over every system of ours, and what it notices."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from finemoe.policy.contract import SystemContract
from finemoe.policy.contract.log_rules import check_rules
from finemoe.policy.contract.worlds import random_world, serve
from finemoe.policy.systems import SYSTEMS
from finemoe.serving.outcome import CellOutcome


def contract_of(system: str) -> type[SystemContract]:
    """The contract's tests over one system; the oracle is told the future, so one of them is not for it."""
    without = {"test_no_use_of_the_future": None} if system == "oracle" else {}
    return type(f"Test {system}", (SystemContract,), {"system": system, **without})


# pytest finds the classes of a module by their names.
globals().update({f"Test {name}": contract_of(name) for name in SYSTEMS})


BAD = {
    # Chance that is not the policy's own: no two runs are the same.
    "clock": (
        "import itertools\nCOUNT = itertools.count()\n"
        "class Bad(Policy):\n"
        "    def eviction_key(self, expert):\n        return float(hash((next(COUNT), expert.expert)) % 7)\n",
        {"test_two_runs_are_the_same", "test_replay_is_identical", "test_no_use_of_the_future"},
    ),
    # Keeps what it is told.
    "leak": (
        "class Bad(Policy):\n"
        "    def __init__(self, shape):\n        super().__init__(shape)\n        self.told = []\n"
        "    def gate(self, layer, probabilities, row_counts):\n"
        "        self.told.append(probabilities)\n        return {}\n",
        {"test_memory_is_bounded"},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_policy_that_breaks_the_contract_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, broken = BAD[name]
    monkeypatch.chdir(tmp_path)
    Path(f"{name}_policy.py").write_text(f"from finemoe.policy.plugin import Policy\n{source}", "utf-8")
    contract = contract_of(f"{name}_policy.py:Bad")()
    tests: dict[str, tuple[Any, ...]] = {
        "test_rules_and_conservation": (),
        "test_two_runs_are_the_same": (),
        "test_replay_is_identical": (tmp_path,),
        "test_no_use_of_the_future": (),
        "test_memory_is_bounded": (),
    }
    failed = set()
    for test, arguments in tests.items():
        try:
            getattr(contract, test)(*arguments)
        except AssertionError:
            failed.add(test)
    assert failed == broken


def busy_run() -> CellOutcome:
    """A run with demand loads, prefetches, evictions and preemptions."""
    for seed in itertools.count():
        world = random_world(np.random.default_rng(seed))
        outcome = serve(world.cell("finemoe"))
        if outcome.counters["preemptions"] and outcome.counters["evictions"]:
            return outcome
    raise AssertionError


@pytest.mark.parametrize(
    ("kind", "column", "value"),
    [
        ("Load", "slot", 99),
        ("Load", "evicts", -1),
        ("Load", "sub_kind", "prefetch"),
        ("Load", "device", 7),
        ("Wait", "experts", [0]),
        ("PreemptPrefetch", "kind", "WaitSearch"),
    ],
)
def test_a_command_that_breaks_a_rule_is_noticed(kind: str, column: str, value: Any) -> None:
    outcome = busy_run()
    check_rules(outcome)
    assert outcome.decisions is not None
    rows = outcome.decisions.to_pylist()
    place = next(
        i
        for i, row in enumerate(rows)
        if row["kind"] == kind and row[column] != value and (column != "evicts" or row[column] >= 0)
    )
    rows[place][column] = value
    broken = pa.Table.from_pylist(rows, schema=outcome.decisions.schema)
    with pytest.raises(AssertionError):
        check_rules(replace(outcome, decisions=broken))


def test_a_counter_that_is_off_is_noticed() -> None:
    outcome = busy_run()
    counters = {**outcome.counters, "wasted_bytes": outcome.counters["wasted_bytes"] + 1}
    with pytest.raises(AssertionError, match="wasted_bytes"):
        check_rules(replace(outcome, counters=counters))

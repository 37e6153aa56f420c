"""The contract as a test class: set `system`, and pytest runs it over random small worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest

from ...serving.replay import replay
from ..system import System
from ..systems import find_system
from .conservation import check_conservation
from .growth import LINUX, check_growth
from .log_rules import check_rules
from .worlds import World, decisions_of, random_world, serve, with_another_future


class SystemContract:
    """What every system keeps (docs/core.md). Subclass it as `Test…` and name the system."""

    #: a name, "path.py:Class", or a System
    system: ClassVar[str | System]
    #: random worlds per test: model, machine, cache, requests and settings all differ
    worlds: ClassVar[int] = 20

    def test_rules_and_conservation(self) -> None:
        """Required experts stay until they are computed, residency, slots and links keep their limits, loads
        name their victims, preemptions and prefetches come when they may; requests, tokens, time, bytes and
        memory add up."""
        self._over_worlds(_check_rules_and_conservation)

    def test_two_runs_are_the_same(self) -> None:
        """Same inputs, same bytes."""
        self._over_worlds(_check_same)

    def test_replay_is_identical(self, tmp_path: Path) -> None:
        """A fresh core, with a fresh policy, decides the recorded run again."""
        self._over_worlds(lambda system, world: _check_replay(system, world, tmp_path / "decisions.parquet"))

    def test_no_use_of_the_future(self) -> None:
        """Routing that differs from some iteration of a request on changes nothing before that iteration."""
        self._over_worlds(_check_future)

    @pytest.mark.skipif(not LINUX, reason="memory is read from /proc")
    def test_memory_is_bounded(self) -> None:
        """Nothing is kept of 10,000 iterations that are past."""
        check_growth(self._row())

    def _row(self) -> System:
        return self.system if isinstance(self.system, System) else find_system(self.system)

    def _over_worlds(self, check: Callable[[System, World], None]) -> None:
        for number in range(self.worlds):
            world = random_world(np.random.default_rng(number))
            try:
                check(self._row(), world)
            except Exception as error:
                error.add_note(f"in {world}")
                raise


def _check_rules_and_conservation(system: System, world: World) -> None:
    inputs = world.cell(system)
    outcome = serve(inputs)
    check_rules(outcome)
    check_conservation(outcome, inputs)


def _check_same(system: System, world: World) -> None:
    one, other = (serve(world.cell(system)) for _ in range(2))
    assert decisions_of(one).equals(decisions_of(other), check_metadata=True)
    assert one.requests.table().tobytes() == other.requests.table().tobytes()
    assert one.iterations.table().tobytes() == other.iterations.table().tobytes()
    assert one.counters == other.counters
    assert one.memory_bytes == other.memory_bytes
    assert one.busy_s == other.busy_s


def _check_replay(system: System, world: World, path: Path) -> None:
    pq.write_table(decisions_of(serve(world.cell(system))), path)
    report = replay(path)
    assert report.identical, report.divergence or report.alterations


def _check_future(system: System, world: World) -> None:
    rng = np.random.default_rng([world.seed, 1])
    request = world.requests[int(rng.integers(len(world.requests)))]
    first = int(rng.integers(request.output_tokens))
    inputs = world.cell(system)
    one, other = serve(inputs), serve(with_another_future(inputs, request.index, first))
    rows, changed = decisions_of(one).to_pylist(), decisions_of(other).to_pylist()
    pairs = enumerate(zip(rows, changed, strict=False))
    place = next((i for i, (row, other_row) in pairs if row != other_row), None)
    assert place is not None, "the changed routing left no trace at all"
    # What differs first is what the world says, not what the core answers: an embedding or a gate.
    assert rows[place]["kind"] in ("begin_iteration", "gate"), rows[place]
    begun = [row for row in rows[: place + 1] if row["kind"] == "begin_iteration"]
    assert request.index in begun[-1]["requests"]
    assert sum(request.index in row["requests"] for row in begun) == first + 1

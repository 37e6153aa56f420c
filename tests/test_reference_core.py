"""The reference core obeys the rules of DESIGN.md, seen from outside, and timelines worked by hand."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from core_draws import draw_config
from core_walk import Walk
from finemoe.errors import CoreError
from finemoe.policy.contract.observed import ObservedCore
from finemoe.policy.contract.rules import RuleObserver
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import ReferenceCore
from reference_formulas import round_f16
from reference_predictions import Row
from reference_state import Command, Config
from small_policy import policy_for

SEEDS = st.integers(0, 2**32 - 1)


def walked(seed: int, iterations: int = 3) -> Walk:
    """A finished walk of a fresh reference core."""
    rng = np.random.default_rng(seed)
    config = draw_config(rng)
    walk = Walk(ReferenceCore(config, policy_for(config)), config, rng)
    walk.run(iterations)
    return walk


def row(phase: str = "decode", embedding: list[float] | None = None) -> Row:
    values = None if embedding is None else np.array(embedding, dtype=np.float32)
    return Row(request=0, phase=phase, tokens=1, embedding=values)


# -- the whole core


@given(SEEDS)
@settings(deadline=None, max_examples=200)
def test_every_rule_holds_from_outside(seed: int) -> None:
    walked(seed)


@given(SEEDS)
@settings(deadline=None, max_examples=30)
def test_same_events_same_commands_and_rounding_on_entry_changes_nothing(seed: int) -> None:
    walk = walked(seed)
    again, rounded = (ReferenceCore(walk.config, policy_for(walk.config)) for _ in range(2))
    for event, arguments, commands in walk.log:
        assert getattr(again, event)(*arguments) == commands
        halves = [
            round_f16(a) if isinstance(a, np.ndarray) and a.dtype == np.float32 else a for a in arguments
        ]
        assert getattr(rounded, event)(*halves) == commands


@given(SEEDS)
@settings(deadline=None, max_examples=60)
def test_victim_is_the_first_of_a_numpy_sort(seed: int) -> None:
    walk = walked(seed, iterations=2)
    core, config = walk.core, walk.config
    assert isinstance(core, ReferenceCore)
    now = core.iteration * config.layers + core.l_now
    for device in range(config.devices):
        states = {e: core.states[e] for e in core.residents(device)}
        ids = np.array([e for e, s in states.items() if not s.pinned and not s.kept], dtype=int)
        if not len(ids):
            assert core.first_to_go(core.held(device)) is None
            continue
        freq = np.array([core.states[e].freq for e in ids])
        stamp = np.array([core.states[e].stamp for e in ids])
        protected = np.array([core.states[e].privileged for e in ids])
        p = np.array([core.states[e].p for e in ids], dtype=np.float32)
        worth = np.maximum(p, np.float32(1e-6)).astype(np.float64) * freq
        layers, js = np.divmod(ids, config.experts)
        ahead = (layers - core.l_now - 1) % config.layers + 1
        uses = [[s for s, needed in core.future.items() if s > now and e in needed] for e in ids]
        idle = np.array([-min(u) if u else -math.inf for u in uses])
        running = np.zeros((config.layers, config.experts), dtype=np.int64)
        for matrix in core.activations.matrices.values():
            running += matrix
        tokens = running.sum(axis=1)[layers]
        shares = np.divide(running[layers, js], tokens, out=np.zeros(len(ids)), where=tokens > 0)
        columns = {
            "finemoe": (ids, -ahead, freq, worth),
            "lru": (ids, stamp),
            "lfu": (ids, stamp, freq),
            "lfru": (ids, stamp, np.where(protected, 0.0, freq), protected),
            "activation": (ids, stamp, (shares + 1e-6) * (1.0 - layers / config.layers)),
            "belady": (ids, idle),
            "plugin": (ids, stamp, np.array([core.user_key(e) for e in ids] if core.policy else [])),
        }[config.eviction]
        assert core.first_to_go(core.held(device)) == ids[np.lexsort(columns)[0]]


def test_the_walk_reaches_every_kind_of_command_and_counter() -> None:
    seen: set[str] = set()
    for seed in range(250):
        walk = walked(seed)
        for event, _, commands in walk.log:
            seen.add(event)
            seen.update(str(c[0]) for c in commands)
            seen.update(f"Load {c[6]} {'rest' if c[4] else 'whole'}" for c in commands if c[0] == "Load")
        seen.update("spare" for e in walk.rules.spare)
        counters = walk.core.counter_values()
        seen.update(name for name, value in counters.items() if np.any(value))
    wanted = {"Search", "WaitSearch", "PreemptPrefetch", "Wait", "Load", "Abort"}
    wanted |= {f"Load {kind} {part}" for kind in ("demand", "prefetch") for part in ("whole", "rest")}
    wanted |= {"begin_iteration", "gate", "speculation", "search_done", "loaded", "paused", "load_failed"}
    wanted |= {"computed", "end_iteration", "seed_store", "foresight", "preload", "spare"}
    wanted |= set(ReferenceCore(Config(1, 1, 1, 1, 1, 1)).counter_values()) - {"skipped_updates"}
    assert wanted <= seen, sorted(wanted - seen)


@given(SEEDS, st.sampled_from(["slot", "offset", "kind", "evicts", "twice", "none"]))
@settings(deadline=None, max_examples=60)
def test_the_observer_notices_a_wrong_load(seed: int, change: str) -> None:
    walk = walked(seed, iterations=1)
    rules = RuleObserver(ObservedCore.of(asdict(walk.config)))
    for event, arguments, commands in walk.log:
        loads = [i for i, c in enumerate(commands) if c[0] == "Load"]
        aborts = any(c[0] == "Abort" for c in commands)
        if not loads or aborts or (change == "none" and commands[loads[0]][6] == "prefetch"):
            rules.observe(event, arguments, commands)
            continue
        broken = list(commands)
        load = list(broken[loads[0]])
        if change == "slot":
            load[3] += 1
        elif change == "offset":
            load[4] += 1
        elif change == "kind":
            load[6] = "prefetch" if load[6] == "demand" else "demand"
        elif change == "evicts":
            load[7] = load[1] if load[7] == -1 else -1
        broken[loads[0]] = tuple(load)
        if change == "twice":
            broken.insert(loads[0], broken[loads[0]])
        elif change == "none":
            del broken[loads[0]]
        with pytest.raises(AssertionError):
            rules.observe(event, arguments, broken)
        return


# -- timelines worked by hand


def run(core: ReferenceCore, *events: tuple[Any, ...]) -> list[list[Command]]:
    return [getattr(core, event)(*arguments) for event, *arguments in events]


def speculating(**changes: Any) -> ReferenceCore:
    """Two layers of two experts on one device, prefetching by speculation."""
    settings_ = {
        "layers": 2,
        "experts": 2,
        "top_k": 1,
        "devices": 1,
        "slots_per_device": 2,
        "expert_bytes": 100,
    }
    core = ReferenceCore(Config(**(settings_ | {"predictor": "speculate"} | changes)))
    core.begin_iteration([row()])
    return core


def test_a_demand_stops_a_prefetch_which_then_resumes() -> None:
    core = speculating(layers=3, slots_per_device=2)
    p = [[0.75, 0.25]]
    assert core.gate(0, p, [0], [1]) == [("Wait", (0,)), ("Load", 0, 0, 0, 0, 100, "demand", -1)]
    assert run(core, ("loaded", 0), ("computed", 0, [0])) == [[], []]
    assert core.speculation(0, 2, p) == [("Load", 4, 0, 1, 0, 100, "prefetch", -1)]
    assert core.gate(1, p, [1], [1]) == [("PreemptPrefetch", 0), ("Wait", (3,))]
    assert core.paused(4, 30) == [("Load", 3, 0, 0, 0, 100, "demand", 0)]
    assert core.loaded(3) == [("Load", 4, 0, 1, 30, 70, "prefetch", -1)]
    assert run(core, ("computed", 1, [3]), ("gate", 2, p, [0], [1])) == [[], [("Wait", (4,))]]
    assert run(core, ("loaded", 4), ("computed", 2, [4]), ("end_iteration",)) == [[], [], []]
    counters = core.counter_values()
    assert counters["late"] == [[0, 0, 0], [0, 0, 1]]
    assert counters["misses"] == [[0, 0, 0], [1, 1, 0]]
    assert (counters["prefetch_bytes"], counters["useful_bytes"], counters["demand_bytes"]) == (100, 100, 200)


def test_one_slot_chunks_the_layer_and_a_demand_reclaims_the_partial_prefetch() -> None:
    core = speculating(slots_per_device=1)
    p = [[0.75, 0.25]]
    assert core.speculation(-1, 1, p) == [("Load", 2, 0, 0, 0, 100, "prefetch", -1)]
    assert core.gate(0, p, [0, 1], [1, 1]) == [("PreemptPrefetch", 0), ("Wait", (0,))]
    assert core.paused(2, 40) == [("Load", 0, 0, 0, 0, 100, "demand", -1)]
    assert core.counter_values()["wasted_bytes"] == 40
    assert core.loaded(0) == []
    assert core.computed(0, [0]) == [("Wait", (1,)), ("Load", 1, 0, 0, 0, 100, "demand", 0)]


def test_three_failures_abort() -> None:
    core = speculating()
    core.gate(0, [[0.5, 0.5]], [1], [1])
    again = [("Load", 1, 0, 0, 0, 100, "demand", -1)]
    assert [core.load_failed(1, "torn") for _ in range(3)] == [again, again, [("Abort", 1, "torn")]]
    with pytest.raises(CoreError, match="aborted"):
        core.loaded(1)


def test_a_search_sees_the_store_as_of_its_ticket_and_updates_beyond_1024_are_skipped() -> None:
    config = Config(1, 2, 1, 1, 2, 10, store_capacity=2000, embedding_width=1, embedding_work=3)
    core = ReferenceCore(config)
    for i in range(1030):
        begun = core.begin_iteration([row(embedding=[1.0])])
        assert (
            begun[:1] == ([("Search", 2 * i - 1, "semantic", -1, 0, min(i, 1024) * 3, False)] if i else [])
            or i > 1024
        )
        core.gate(0, [[1.0, 0.0]], [0], [1])
        if i == 0:
            core.loaded(0)
        core.computed(0, [0])
        core.end_iteration()
    assert core.counter_values()["skipped_updates"] == 6
    assert core.counter_values()["late_searches"] == 1029
    assert len(core.store) == 0
    core.search_done(0)
    core.search_done(2)
    assert len(core.store) == 2
    with pytest.raises(CoreError, match="oldest"):
        core.search_done(6)

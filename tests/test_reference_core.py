"""The reference core obeys the rules of DESIGN.md, and its formulas obey theirs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from core_rules import RuleObserver
from core_walk import Walk, draw_config, draw_gate_row
from finemoe.errors import CoreError
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import ReferenceCore
from reference_devices import Command, Config
from reference_formulas import (
    best_map,
    delta_of,
    delta_set,
    delta_set_brute_force,
    inverse_norms,
    rank_by_tokens,
    redundancy,
    round_f16,
    running_sums,
    running_sums_step,
    semantic_scores,
    unit_embedding,
)
from reference_predictions import Row
from reference_store import ReferenceStore

SEEDS = st.integers(0, 2**32 - 1)


def walked(seed: int, iterations: int = 3) -> Walk:
    """A finished walk of a fresh reference core."""
    rng = np.random.default_rng(seed)
    config = draw_config(rng)
    walk = Walk(ReferenceCore(config), config, rng)
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
    again, rounded = ReferenceCore(walk.config), ReferenceCore(walk.config)
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
        ids = np.array(
            [e for e in core.slots[device] if e >= 0 and core.states[e].status == "resident"], dtype=int
        )
        ids = ids[[not core.states[e].pinned for e in ids]] if len(ids) else ids
        if not len(ids):
            assert core.victim(device) is None
            continue
        freq = np.array([core.states[e].freq for e in ids])
        stamp = np.array([core.states[e].stamp for e in ids])
        p = np.array([core.states[e].p for e in ids], dtype=np.float32)
        worth = np.maximum(p, np.float32(1e-6)).astype(np.float64) * freq
        ahead = (ids // config.experts - core.l_now - 1) % config.layers + 1
        uses = [[s for s, needed in core.future.items() if s > now and e in needed] for e in ids]
        idle = np.array([-min(u) if u else -math.inf for u in uses])
        columns = {
            "finemoe": (ids, -ahead, freq, worth),
            "lru": (ids, stamp),
            "lfu": (ids, stamp, freq),
            "belady": (ids, idle),
        }[config.eviction]
        assert core.victim(device) == ids[np.lexsort(columns)[0]]


def test_the_walk_reaches_every_kind_of_command_and_counter() -> None:
    seen: set[str] = set()
    for seed in range(150):
        walk = walked(seed)
        for event, _, commands in walk.log:
            seen.add(event)
            seen.update(str(c[0]) for c in commands)
            seen.update(f"Load {c[6]} {'rest' if c[4] else 'whole'}" for c in commands if c[0] == "Load")
        counters = walk.core.counter_values()
        seen.update(name for name, value in counters.items() if np.any(value))
    wanted = {"Search", "WaitSearch", "PreemptPrefetch", "Wait", "Load", "Abort"}
    wanted |= {f"Load {kind} {part}" for kind in ("demand", "prefetch") for part in ("whole", "rest")}
    wanted |= {"begin_iteration", "gate", "speculation", "search_done", "loaded", "paused", "load_failed"}
    wanted |= {"computed", "end_iteration", "seed_store", "foresight"}
    wanted |= set(ReferenceCore(Config(1, 1, 1, 1, 1, 1)).counter_values()) - {"skipped_updates"}
    assert wanted <= seen, sorted(wanted - seen)


@given(SEEDS, st.sampled_from(["slot", "offset", "kind", "evicts", "twice", "none"]))
@settings(deadline=None, max_examples=60)
def test_the_observer_notices_a_wrong_load(seed: int, change: str) -> None:
    walk = walked(seed, iterations=1)
    rules = RuleObserver(walk.config)
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


# -- formulas


@given(SEEDS, st.floats(0.0, 1.0), st.integers(1, 8))
@settings(deadline=None, max_examples=300)
def test_delta_set_is_the_smallest_of_all_subsets(seed: int, delta: float, top_k: int) -> None:
    rng = np.random.default_rng(seed)
    p = round_f16(draw_gate_row(rng, int(rng.integers(top_k, 9))))
    deltas = [delta, 0.0, 1.0, *np.cumsum(np.sort(p.astype(np.float64))[::-1]).tolist()]
    for d in deltas:
        assert delta_set(p, d, top_k) == delta_set_brute_force(p, d, top_k)


@given(SEEDS)
@settings(deadline=None)
def test_incremental_sums_equal_sums_from_scratch_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, layers, experts = (int(x) for x in rng.integers(1, 9, 3))
    maps = round_f16([[draw_gate_row(rng, experts) for _ in range(layers)] for _ in range(n)])
    query = round_f16([draw_gate_row(rng, experts) for _ in range(layers)])
    running = np.zeros(n, dtype=np.float32)
    for layer in range(layers):
        running = running_sums_step(running, maps[:, layer], query[layer])
        assert running.tobytes() == running_sums(maps, query[: layer + 1]).tobytes()
        for i in range(n):  # and the plainest loop there is
            total = np.float32(0.0)
            for m in range(layer + 1):
                dot = np.float32(0.0)
                for j in range(experts):
                    dot = dot + np.float32(maps[i, m, j]) * np.float32(query[m, j])
                total = total + dot
            assert total == running[i]


@given(SEEDS)
@settings(deadline=None)
def test_scores_are_cosines(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, experts, width, n = (int(x) for x in rng.integers(1, 9, 4))
    store = ReferenceStore(layers, experts, width, n)
    raw = rng.normal(size=(n, width))
    units = [unit_embedding(e) for e in raw.astype(np.float32)]
    store.seed(
        [[draw_gate_row(rng, experts) for _ in range(layers)] for _ in range(n)],
        [np.zeros(width) if u is None else u for u in units],
        np.arange(n),
    )
    query = rng.normal(size=width)
    unit = unit_embedding(query.astype(np.float32))
    assert unit is not None
    cosines = raw @ query / np.linalg.norm(raw, axis=1) / np.linalg.norm(query)
    assert np.allclose(semantic_scores(store.embeddings, unit), cosines, atol=5e-3)
    assert math.isclose(store.semantic(unit)[1], cosines.max(), abs_tol=5e-3)
    rows = round_f16([draw_gate_row(rng, experts) for _ in range(int(rng.integers(1, layers + 1)))])
    flat = store.maps[:, : len(rows)].reshape(n, -1).astype(np.float64)
    asked = rows.reshape(-1).astype(np.float64)
    norms = np.linalg.norm(flat, axis=1) * np.linalg.norm(asked)
    expected = np.divide(flat @ asked, norms, out=np.zeros(n), where=norms > 0)
    assert math.isclose(store.trajectory(rows)[1], expected.max(), abs_tol=1e-5)


def test_small_formulas() -> None:
    assert unit_embedding([0.0, 0.0]) is None
    assert unit_embedding([1e-9]) is None, "rounds to zero in half precision"
    assert unit_embedding([3.0, 4.0]) == pytest.approx([0.6, 0.8], abs=1e-3)
    assert delta_of(1.5) == 0.0
    assert delta_of(-1.0) == 1.0
    assert delta_set([0.5, 0.25, 0.25, 0.0], 0.6, 1) == [0, 1], "equal p: the lower j"
    assert delta_set([0.0, 0.5, 0.0, 0.0], 1.0, 3) == [0, 1, 2], "zeros only within the first K"
    assert inverse_norms(round_f16([[0.0], [0.5], [0.0]])).tolist() == [0.0, 2.0, 2.0]
    keys, written = np.array([1.0, 2.0, 2.0, 0.0], dtype=np.float32), np.array([9, 4, 7, 8])
    assert best_map(keys, written) == 2, "equal keys: the most recently written"
    assert rank_by_tokens(0.5, 2) == 0.75
    assert rank_by_tokens(0.0, 1000) == 0.0
    sem, traj = np.array([1.0], dtype=np.float32), np.array([0.5], dtype=np.float32)
    assert redundancy(sem, traj, 1, 4).tolist() == [0.25 + 0.375]
    assert redundancy(sem, traj, 9, 4).tolist() == [1.0], "the distance counts up to L"
    assert redundancy(None, traj, 1, 4).tolist() == [0.5]


def test_a_full_store_replaces_the_most_redundant_map() -> None:
    store = ReferenceStore(1, 2, 0, 2)
    store.seed([[[1.0, 0.0]], [[0.0, 1.0]]], np.zeros((2, 0)), [5, 2])
    assert store.update(round_f16([[0.125, 0.875]]), None, 1) == 1
    assert store.written.tolist() == [5, 6]
    assert store.update(round_f16([[0.0, 0.0]]), None, 1) == 1, "all keys 0: the most recently written"


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

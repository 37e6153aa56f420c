"""Golden numbers: misses of LRU, LFU and Belady on recorded routing, counted by the core and by plain NumPy.

Event-atomic, demand only: a layer's four experts are one requirement, hits are pinned before any miss picks a
victim, and every load completes at once. The first 12 of 64 requests run one after another from a cold cache.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from finemoe.policy.core import Core, make_config
from shared_data import shared
from world_case import plain_options

RECORDING = "routing/gpt-oss-20b_small64.npz"
LAYERS, EXPERTS, TOP_K = 24, 32, 4
TOTAL = LAYERS * EXPERTS
SHARES = (0.05, 0.125, 0.25, 0.5)  # 38, 96, 192 and 384 slots; a token cycle is 96
NEVER = np.iinfo(np.int64).max

# requests -> iterations, and (rule, frequency) -> misses at each share of SHARES
ITERATIONS = {12: 1867, 64: 9952}
GOLDEN = {
    12: {
        ("lru", "run"): (179_232, 107_358, 76_255, 20_982),
        ("lfu", "run"): (156_619, 126_267, 86_188, 34_347),
        ("lfu", "residency"): (179_232, 163_391, 108_495, 46_017),
        ("belady", "run"): (122_159, 71_583, 34_868, 8_611),
    },
    64: {
        ("lru", "run"): (955_392, 559_261, 391_310, 103_279),
        ("lfu", "run"): (829_588, 667_614, 451_140, 178_366),
        ("lfu", "residency"): (955_392, 863_920, 554_469, 238_330),
        ("belady", "run"): (646_889, 371_571, 177_755, 40_834),
    },
}


@cache
def steps(requests: int) -> npt.NDArray[np.int64]:
    """Required expert ids, ascending, [steps, K]; a step is one layer of one iteration."""
    with np.load(shared(RECORDING)) as recording:
        end = recording["offsets"][requests]
        chosen = np.sort(recording["expert_ids"][:end].astype(np.int64), axis=2)
    return (chosen + np.arange(LAYERS)[None, :, None] * EXPERTS).reshape(-1, TOP_K)


def core_misses(requests: int, rule: str, frequency: str, slots: int) -> tuple[int, int]:
    """Activated experts and demand loads of the core."""
    options = plain_options(
        layers=LAYERS,
        experts=EXPERTS,
        top_k=TOP_K,
        slots_per_device=slots,
        eviction=rule,
        frequency=frequency,
    )
    core = Core(make_config(options))
    required = steps(requests)
    if rule == "belady":
        core.foresight(0, required.tolist())
    row, counts = np.zeros((1, EXPERTS), np.float16), [1] * TOP_K
    experts = (required % EXPERTS).tolist()
    for begin in range(0, len(experts), LAYERS):
        core.begin_iteration([(0, "decode", 1, False)])
        for layer in range(LAYERS):
            core.gate(layer, row, experts[begin + layer], counts)
            while loads := core.take_device(0):
                for load in loads:
                    core.loaded(load[1])
            core.computed_chunk()
        core.end_iteration()
    activated, hits, late, _ = core.totals()
    demand_loads = core.counters()["demand_loads"]
    assert demand_loads == activated - hits
    assert late == 0
    return activated, demand_loads


@cache
def next_uses(requests: int) -> npt.NDArray[np.int64]:
    """For each entry of `steps`, the next step that requires the same expert; NEVER if none does."""
    required, following = steps(requests), np.full(TOTAL, NEVER)
    uses = np.empty_like(required)
    for step in range(len(required) - 1, -1, -1):
        uses[step] = following[required[step]]
        following[required[step]] = step
    return uses


def reference_misses(requests: int, rule: str, frequency: str, slots: int) -> int:
    """Misses by the rules of docs/core.md, with NumPy's argmin (the first of equals: the lower id)."""
    required = steps(requests)
    uses = next_uses(requests) if rule == "belady" else None
    resident = np.zeros(TOTAL, bool)
    visits = np.ones(TOTAL, np.int64)
    key = np.zeros(TOTAL, np.int64)  # the smallest one goes
    free, misses, stamp_range = slots, 0, len(required) + 1
    for step, ids in enumerate(required):
        visits[ids] += 1
        if uses is not None:
            key[ids] = -uses[step]
        elif rule == "lru":
            key[ids] = step
        else:
            key[ids] = visits[ids] * stamp_range + step
        missing = ids[~resident[ids]]
        misses += len(missing)
        resident[missing] = True
        evictions = max(0, len(missing) - free)
        free = max(0, free - len(missing))
        candidates = resident.copy()
        candidates[ids] = False  # hits and misses of this step are pinned
        for _ in range(evictions):
            victim = np.where(candidates, key, NEVER).argmin()
            candidates[victim] = resident[victim] = False
            if frequency == "residency":
                visits[victim] = 1
    return misses


@pytest.mark.parametrize("requests", [12, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("rule", "frequency"), [*GOLDEN[12]])
def test_core_and_plain_numpy_count_the_golden_misses(
    rule: str, frequency: str, share: float, requests: int
) -> None:
    slots = int(share * TOTAL)
    activated, misses = core_misses(requests, rule, frequency, slots)
    assert activated == ITERATIONS[requests] * LAYERS * TOP_K
    assert misses == GOLDEN[requests][rule, frequency][SHARES.index(share)]
    assert misses == reference_misses(requests, rule, frequency, slots)


@pytest.mark.parametrize("requests", [*GOLDEN])
def test_the_golden_misses_are_ordered_as_they_must_be(requests: int) -> None:
    golden, activated = GOLDEN[requests], ITERATIONS[requests] * LAYERS * TOP_K
    others = [counts for (rule, _), counts in golden.items() if rule != "belady"]
    for place, least in enumerate(golden["belady", "run"]):
        assert all(least < counts[place] for counts in others)
    # 38 slots are fewer than (L − 1)·K = 92: LRU can have no hit, and every new load of LFU with counts per
    # residency is the next victim. 96 slots are one token cycle.
    assert golden["lru", "run"][0] == golden["lfu", "residency"][0] == activated
    for counts in golden.values():
        assert list(counts) == sorted(counts, reverse=True)

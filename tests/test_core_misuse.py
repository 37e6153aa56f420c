"""The bindings refuse what they cannot use: an error, never a crash, whatever the caller hands in."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from finemoe.errors import CoreError
from finemoe.policy.core import DEVICE_SHIFT, Core, Feed, Searcher, make_config
from world_case import plain_options

L, J, H = 4, 8, 3


def small_config() -> Any:
    return make_config(
        plain_options(
            layers=L,
            experts=J,
            top_k=2,
            devices=2,
            slots_per_device=6,
            expert_bytes=64,
            predictor="map",
            semantic=True,
            trajectory=True,
            embedding_width=H,
            embedding_work=H,
            store_capacity=50,
        )
    )


def arrays(iterations: int = 2) -> dict[str, Any]:
    cells = iterations * L
    return {
        "gate": np.full((iterations, L, J), 1 / J, np.float16),
        "experts": np.tile(np.array([1, 5], np.uint16), cells),
        "token_counts": np.ones(2 * cells, np.int32),
        "offsets": np.arange(0, 2 * cells + 1, 2, dtype=np.int64),
        "embedding": np.ones((iterations, H), np.float16),
    }


@pytest.mark.parametrize(
    "change",
    [
        {"embedding": "abc"},
        {"embedding": 5},
        {"embedding": np.ones((2, H + 1), np.float16)},
        {"embedding": np.ones((2, H), np.float32)},
        {"gate": np.ones((2, L, J + 1), np.float16)},
        {"gate": np.ones((2, L, J), ">f2")},
        {"experts": np.full(16, 60000, np.uint16)},
        {"experts": np.ones(16, np.int64)},
        {"token_counts": np.zeros(16, np.int32)},
        {"token_counts": np.ones(32, np.int32)[::2]},
        {"offsets": np.arange(9, dtype=np.int64)},
        {"offsets": np.arange(16, -1, -2, dtype=np.int64)},
        {"offsets": None},
    ],
)
def test_routing_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    feed = Feed(L, J, H)
    with pytest.raises((CoreError, TypeError)):
        feed.add(0, **(arrays() | change))
    feed.add(0, **arrays())


def test_a_feed_keeps_its_own_copy() -> None:
    feed, core, given = Feed(L, J, H), Core(small_config()), arrays()
    feed.add(0, **given)
    given["experts"][:] = 60000
    given["offsets"][:] = 10**12
    feed.select([0], [1], [1], False)
    feed.remove(0)  # the step that was selected goes on
    assert feed.token_counts().tolist() == [[0, 1, 0, 0, 0, 1, 0, 0]] * L
    feed.begin_iteration(core)
    feed.gate(core, 0)
    with pytest.raises(CoreError, match="has no routing"):
        feed.select([0], [0], [1], False)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda feed, core: feed.foresee(core, 0, [0], [-1], 3),
        lambda feed, core: feed.foresee(core, 0, [0], [0], -1),
        lambda feed, core: feed.foresee(core, 0, [0], [0], 10**9),
        lambda feed, core: feed.foresee(core, 0, [0, 1], [0], 1),
        lambda feed, core: feed.select([0], [2], [1], False),
        lambda feed, core: feed.select([0], [-1], [1], False),
        lambda feed, core: feed.select([0], [0, 1], [1], False),
        lambda feed, core: feed.gate(core, L),
        lambda feed, core: feed.gate(core, -1),
        lambda feed, core: core.gate(0, np.ones((J, 1)), [0], [1]),
        lambda feed, core: core.gate(0, np.ones((1, J)), [0, 0], [1, 1]),
        lambda feed, core: core.gate(0, np.ones((1, J)), [J], [1]),
        lambda feed, core: core.gate(0, None, [0], [1]),
        lambda feed, core: core.gate(0, np.ones((1, J)), [0], [1], row_counts=np.ones((1, J), np.int32)),
        lambda feed, core: core.end_iteration(finished=[0]),
        lambda feed, core: core.preload([1, 0]),
        lambda feed, core: core.preload([-1]),
        lambda feed, core: core.preload([L * J]),
        lambda feed, core: core.preload(range(L * J)),
        lambda feed, core: core.begin_iteration([(0, "decode")]),
        lambda feed, core: core.begin_iteration([(0, "sleep", 1, False)]),
        lambda feed, core: core.begin_iteration([(0, "decode", 1, True)], np.ones((2, H))),
        lambda feed, core: core.computed(0, [0]),
        lambda feed, core: core.loaded(-1),
        lambda feed, core: core.loaded(10**6),
        lambda feed, core: core.take_device(2),
        lambda feed, core: core.seed_store(np.ones((1, L, J)), np.full((1, H), 2.0), [1]),
        lambda feed, core: core.seed_store(np.ones((2, L, J)), None, [1, 1]),
        lambda feed, core: core.seed_store(np.ones((1, L, J)), None, [2**62]),
    ],
)
def test_misuse_is_an_error_and_changes_nothing(misuse: Callable[[Feed, Core], object]) -> None:
    feed, core = Feed(L, J, H), Core(small_config())
    feed.add(0, **arrays())
    with pytest.raises((CoreError, TypeError)):
        misuse(feed, core)
    feed.select([0], [0], [1], False)
    feed.begin_iteration(core)
    feed.gate(core, 0)


@pytest.mark.parametrize("sizes", [(-1, 8, 3), (4, 0, 3), (4, 8, -1), (5000, 8, 3), (4, 70000, 3)])
def test_a_feed_of_impossible_size_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(CoreError, match="out of range"):
        Feed(*sizes)


@pytest.mark.parametrize(
    "change",
    [
        {"expert_bytes": 2**62},
        {"embedding_work": 2**62},
        {"store_capacity": 2**31 - 1},
        {"layers": 4096, "experts": 65536},
        {"devices": 58, "layers": 8},
        {"layer_quota": -1},
        {"selector": "some"},
        {"priority": "mine"},
        {"targets": "later", "predictor": "map"},
        {"popular_start": True, "predictor": "map"},
    ],
)
def test_a_core_of_impossible_size_is_refused(change: dict[str, int]) -> None:
    sizes = {"layers": L, "experts": J, "top_k": 2, "devices": 1, "slots_per_device": 4, "expert_bytes": 1}
    with pytest.raises(CoreError):
        make_config(plain_options(**(sizes | change)))


def test_57_devices_have_their_bits() -> None:
    sizes = {"layers": 8, "experts": J, "top_k": 2, "devices": 57, "slots_per_device": 4, "expert_bytes": 1}
    core = Core(make_config(plain_options(**sizes)))
    core.begin_iteration([(0, "decode", 1, False)])
    mask = 0
    for layer in range(8):
        mask = core.gate(layer, np.ones((1, J)), [0], [1])
        device = layer * J % 57
        assert mask >> DEVICE_SHIFT == 1 << device
        core.take_device(device)
        core.loaded(layer * J)
        core.computed_chunk()
    assert mask >> 62 == 1


def test_threads_may_share_a_searcher() -> None:
    searcher = Searcher(small_config())

    def work(_: int) -> int:
        for _ in range(50):
            rows = np.full((L, J), 1 / J, np.float16)
            searcher.fill(rows[None], np.ones((1, H), np.float16))
            searcher.search_iteration(rows, np.ones(H, np.float16))
        return len(searcher.contents()[2])

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(work, range(3))) == {50}

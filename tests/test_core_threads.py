"""The core called from several Python threads: no deadlock with the GIL, and a log that replays.

tests/cpp/core_stress.cpp does the same in C++, with every kind of system.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from finemoe.policy.core import (
    CHUNK_OPEN,
    CHUNK_READY,
    DEVICE_SHIFT,
    Core,
    Feed,
    Options,
    core_options,
    make_config,
)
from finemoe.policy.systems import find_system
from finemoe.serving.decisions import decision_table
from finemoe.serving.replay import replay

LAYERS, EXPERTS, TOP_K, DEVICES, WIDTH, ITERATIONS = 4, 8, 2, 2, 6, 40
EXPERT_BYTES = 64


def options_of(system: str) -> Options:
    return core_options(
        find_system(system),
        layers=LAYERS,
        experts=EXPERTS,
        top_k=TOP_K,
        devices=DEVICES,
        slots_per_device=4,
        expert_bytes=EXPERT_BYTES,
        prefetch_distance=2,
        store_capacity=8,
        embedding_width=WIDTH,
        embedding_work=WIDTH,
        preempt_scope="all",
    )


class World:
    """One thread per device and one for searches; who makes an event hands out what its mask announces."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.stop = False
        self.failures: list[BaseException] = []
        self.signals = [threading.Event() for _ in range(DEVICES)]
        runs = [lambda g=g: self.copy(g) for g in range(DEVICES)]
        self.threads = [threading.Thread(target=self.guarded, args=(run,)) for run in (*runs, self.search)]

    def guarded(self, run: Callable[[], None]) -> None:
        try:
            while not self.stop:
                run()
        except BaseException as failure:
            self.failures.append(failure)
            raise

    def deliver(self, mask: int) -> None:
        for device, signal in enumerate(self.signals):
            if mask >> (DEVICE_SHIFT + device) & 1:
                signal.set()

    def copy(self, device: int) -> None:
        signal = self.signals[device]
        if not signal.wait(0.01):
            return
        signal.clear()
        for command in self.core.take_device(device):
            if command[0] == "PreemptPrefetch":
                continue  # the load it meant is over by now
            expert, offset = command[1], command[4]
            if command[6] == "prefetch" and signal.wait(0.0005):
                signal.clear()
                if any(later[0] == "PreemptPrefetch" for later in self.core.take_device(device)):
                    self.deliver(self.core.paused(expert, max(offset, EXPERT_BYTES // 2)))
                    continue
            self.deliver(self.core.loaded(expert))

    def search(self) -> None:
        for command in self.core.take_searches():
            self.core.run_searches(command[1])
            self.deliver(self.core.search_done(command[1]))
        time.sleep(0.0002)

    def __enter__(self) -> World:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop = True
        for thread in self.threads:
            thread.join()


def routing(seed: int) -> Feed:
    """One request of ITERATIONS iterations, with f16 gate rows and embeddings."""
    random = np.random.default_rng(seed)
    gate = random.dirichlet(np.full(EXPERTS, 0.3), (ITERATIONS, LAYERS)).astype(np.float16)
    experts = np.sort(np.argsort(-gate, axis=-1, kind="stable")[..., :TOP_K], axis=-1)
    feed = Feed(LAYERS, EXPERTS, WIDTH)
    feed.add(
        0,
        gate,
        experts.reshape(-1).astype(np.uint16),
        np.ones(experts.size, np.int32),
        np.arange(0, experts.size + 1, TOP_K, dtype=np.int64),
        random.standard_normal((ITERATIONS, WIDTH)).astype(np.float16),
    )
    return feed


@pytest.mark.parametrize("system", ["finemoe", "lru", "deepspeed"])
def test_threads_end_and_their_log_replays(system: str, tmp_path: Path) -> None:
    options = options_of(system)
    core = Core(make_config(options), -1)
    feed = routing(7)
    with World(core) as world:
        for iteration in range(ITERATIONS):
            feed.select([0], [iteration], [1], iteration == 0)
            world.deliver(feed.begin_iteration(core))
            for layer in range(LAYERS):
                mask = feed.gate(core, layer)
                world.deliver(mask)
                while mask & CHUNK_OPEN and not world.failures:
                    ready = core.chunk_ready()
                    if ready:
                        mask = core.computed_chunk() if mask & CHUNK_READY else core.computed(layer, ready)
                        world.deliver(mask)
                    else:
                        time.sleep(0.0001)
            world.deliver(core.end_iteration())
    assert not world.failures
    counters = core.counters()
    assert counters["demand_loads"] > 0
    assert (counters["prefetch_loads"] > 0) == (system == "finemoe")
    pq.write_table(decision_table(core.take_log(), options), tmp_path / "decisions.parquet")
    report = replay(tmp_path)
    assert report.identical
    assert report.iterations == ITERATIONS

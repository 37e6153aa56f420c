"""What the transfer engine measures: times, bandwidth limits, memory; and sources of every kind."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from finemoe._core import HostSource, PinnedSlabs, Source, cuda_problem
from finemoe.errors import InputError
from transfer_case import SLAB_BYTES, TOTAL, ForwardPass, Weights, running


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


def pinned(weights: Weights, limit: int | None) -> tuple[PinnedSlabs, Source]:
    slabs = PinnedSlabs(TOTAL, SLAB_BYTES, limit)
    source = weights.source()
    for expert in range(TOTAL):
        source.read(expert, slabs.slabs[expert])
    return slabs, HostSource(slabs.address, TOTAL, SLAB_BYTES, slabs, slabs.stride)


@pytest.mark.parametrize("kind", ["file", "unchecked", "direct", "host", "pinned"])
@pytest.mark.parametrize("chunk_bytes", [SLAB_BYTES, 4096, 7])
def test_every_source_brings_the_right_bytes(weights: Weights, kind: str, chunk_bytes: int) -> None:
    if kind == "direct":
        try:
            source: Source = weights.source(direct=True)
        except InputError as error:
            pytest.skip(str(error))
    elif kind == "pinned":
        source = pinned(weights, None)[1]  # the slabs live as long as the source
    else:
        source = weights.host_source() if kind == "host" else weights.source(checked=kind == "file")
    with running(ForwardPass(weights, source, slots=5, chunk_bytes=chunk_bytes)) as forward:
        for _ in range(10):
            forward.iterate()
    assert forward.compared >= 10 * 4 * 2


def test_pinned_memory_keeps_to_its_limit_and_says_what_it_could_not_pin(weights: Weights) -> None:
    slabs, _ = pinned(weights, 5 * 12288)  # a slab takes three pages
    assert slabs.stride == 12288
    assert slabs.slabs.shape == (TOTAL, 12288)
    assert slabs.pinned_bytes == (0 if cuda_problem() else 5 * 12288)
    assert "pinned" in slabs.warning
    if not cuda_problem():
        assert PinnedSlabs(TOTAL, SLAB_BYTES).warning == ""
    with pytest.raises(InputError, match="cannot be held"):
        PinnedSlabs(0, SLAB_BYTES)
    with pytest.raises(InputError, match="cannot be had"):
        PinnedSlabs(1 << 20, 1 << 28)  # more than there are addresses


@pytest.mark.parametrize("chunk_bytes", [SLAB_BYTES, 2048])
def test_a_bandwidth_limit_holds_within_5_percent(weights: Weights, chunk_bytes: int) -> None:
    limit = 100_000.0
    source = weights.host_source()
    with running(
        ForwardPass(weights, source, "deepspeed", bandwidth=limit, chunk_bytes=chunk_bytes)
    ) as forward:
        forward.iterate()  # four layers, each of 0.6 s without a pause
        device = forward.engine.statistics()["devices"][0]
    assert device["bytes"] >= 26 * SLAB_BYTES
    assert device["busy_s"] == pytest.approx(device["bytes"] / limit, rel=0.05)
    assert forward.stall_s == pytest.approx(device["bytes"] / limit, rel=0.05)
    assert 0.5 * device["busy_s"] < device["limited_s"] <= device["busy_s"]


def test_devices_have_a_limit_each(weights: Weights) -> None:
    limit = 50_000.0
    with running(
        ForwardPass(weights, weights.host_source(), "deepspeed", bandwidth=limit, devices=2, slots=3)
    ) as forward:
        forward.iterate()
        moved = [device["bytes"] for device in forward.engine.statistics()["devices"]]
    assert forward.stall_s == pytest.approx(sum(moved) / 2 / limit, rel=0.05)


def test_searches_are_counted(weights: Weights) -> None:
    with running(ForwardPass(weights, weights.source())) as forward:
        for _ in range(20):
            forward.iterate()
        forward.engine.drain()
        statistics = forward.engine.statistics()
    assert statistics["searches"] > 20  # one update per iteration, and what was searched for
    assert 0.0 < statistics["search_s"] < 10.0


def test_memory_is_bounded(weights: Weights) -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    with running(ForwardPass(weights, weights.source(), devices=2, log=False)) as forward:
        for _ in range(300):
            forward.iterate()
        before = resident_bytes()
        for _ in range(700):
            forward.iterate()
        assert resident_bytes() - before < 2 * 1024 * 1024


def test_events_are_timed_from_the_engines_start(weights: Weights) -> None:
    with running(ForwardPass(weights, weights.source())) as forward:
        forward.iterate()
    now = forward.engine.now()  # after the workers' last events
    times = forward.core.take_log()["time_s"]
    assert np.all(times >= 0.0)
    assert np.all(times <= now)

"""Preemption timelines worked by hand: when a prefetch pauses and resumes, and what failures cost."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import msgspec
import numpy as np
import pytest
import simpy
from finemoe.calibration.profile import load_profile
from finemoe.errors import CoreError
from finemoe.policy.core import CHUNK_READY, Core, make_config
from finemoe.serving.decisions import KINDS
from finemoe.sim.events import ENGINE, Timer
from finemoe.sim.link import Copies, Landings, Link, hand_over
from world_case import plain_options

# 0.5 s latency, then a chunk of 256 bytes a second. All times are exact in binary.
EXPERT_BYTES = 1024
PROFILE = msgspec.structs.replace(load_profile("rtx3090"), link_latency_s=0.5, link_bandwidth=256.0)


class FlakyCore(Core):
    """A core that hears of a failure where the link has loaded an expert, `failures` times."""

    failures = 0

    def loaded(self, expert: int, time_s: float = 0.0) -> int:
        if self.failures == 0:
            return super().loaded(expert, time_s)
        self.failures -= 1
        return self.load_failed(expert, "read error", time_s)

    def loaded_all(self, experts: Sequence[int], time_s: float = 0.0) -> int:
        return [self.loaded(expert, time_s) for expert in experts][-1]


Script = Generator[simpy.Event, None, None]


class Bench:
    """A core of 4 layers (l has experts 4·l … 4·l + 3) and K = 1, and its links, driven by a script."""

    def __init__(
        self, slots: int = 4, devices: int = 1, preempt_scope: str = "device", chunk_bytes: int = 256
    ) -> None:
        self.env = simpy.Environment()
        options = plain_options(
            layers=4,
            experts=4,
            top_k=1,
            devices=devices,
            slots_per_device=slots,
            expert_bytes=EXPERT_BYTES,
            predictor="speculate",
            preempt_scope=preempt_scope,
        )
        self.core = FlakyCore(make_config(options), log_iterations=-1)
        copies = Copies()
        profile = msgspec.structs.replace(PROFILE, link_chunk_bytes=chunk_bytes)
        landings = Landings(self.env, self.core, self.deliver)
        self.links = [
            Link(self.env, self.core, profile, copies, landings, self.deliver) for _ in range(devices)
        ]
        self.ready: simpy.Event | None = None

    def deliver(self, mask: int) -> None:
        hand_over(self.core, self.links)
        if mask & CHUNK_READY and self.ready is not None:
            ready, self.ready = self.ready, None
            ready.succeed()

    def gate(self, expert: int, at_s: float) -> Script:
        """At that time the expert's layer requires it; wait until it is resident, compute it in no time."""
        yield Timer(self.env, ENGINE).start(at_s - self.env.now)
        mask = self.core.gate(expert // 4, np.zeros((1, 4), np.float16), [expert % 4], [1], self.env.now)
        if not mask & CHUNK_READY:
            self.ready = simpy.Event(self.env)
        self.deliver(mask)
        if self.ready is not None:
            yield self.ready
        self.deliver(self.core.computed_chunk(self.env.now))

    def opening(self, prefetched: int, failures: int = 0) -> Script:
        """Layer 0 demands expert 0, then `prefetched` is predicted; the next `failures` copies fail."""
        yield from self.gate(0, at_s=0.0)
        self.core.failures = failures
        row = np.zeros((1, 4), np.float16)
        row[0, prefetched % 4] = 1.0
        self.deliver(self.core.speculation(0, prefetched // 4, row, self.env.now))

    def run(self, *scripts: Script) -> list[str]:
        """Play the scripts one after another; what the links were told and said, in order."""

        def play() -> Script:
            for script in scripts:
                yield from script

        self.deliver(self.core.begin_iteration([(0, "decode", 1, False)]))
        self.env.process(play())
        self.env.run()
        log = self.core.take_log()
        names = ("time_s", "kind", "detail", "expert", "device", "offset", "bytes")
        lines = []
        for time_s, number, detail, expert, device, offset, size in zip(
            *(log[name].tolist() for name in names), strict=True
        ):
            kind = KINDS[number]
            if kind == "Load":
                what = f"{('demand', 'prefetch')[detail]} of {expert}, {size} bytes from {offset}"
            elif kind == "PreemptPrefetch":
                what = f"device {device} is to pause"
            elif kind == "paused":
                what = f"{expert} paused at {size}"
            elif kind in ("loaded", "load_failed"):
                what = f"{expert} {kind}"
            else:
                continue
            lines.append(f"{time_s:g} s: {what}")
        return lines


# Expert 0 is demanded at 0 s and copied by 0.5 + 1024 / 256 = 4.5 s. The prefetch of expert 13 then begins:
# its latency ends at 5 s, its chunks of 256 bytes at 6, 7, 8 and 9 s.
OPENING = [
    "0 s: demand of 0, 1024 bytes from 0",
    "4.5 s: 0 loaded",
    "4.5 s: prefetch of 13, 1024 bytes from 0",
]


@pytest.mark.parametrize(
    ("at_s", "chunk_bytes", "expected"),
    [
        pytest.param(
            6.25,
            256,
            [
                "6.25 s: device 0 is to pause",
                "7 s: 13 paused at 512",  # the end of the second chunk
                "7 s: demand of 5, 1024 bytes from 0",
                "11.5 s: 5 loaded",
                "11.5 s: prefetch of 13, 512 bytes from 512",
                "14 s: 13 loaded",  # 0.5 s latency, two chunks
            ],
            id="within a chunk",
        ),
        pytest.param(
            4.75,
            256,
            [
                "4.75 s: device 0 is to pause",
                "6 s: 13 paused at 256",  # the copier has its first chunk already
                "6 s: demand of 5, 1024 bytes from 0",
                "10.5 s: 5 loaded",
                "10.5 s: prefetch of 13, 768 bytes from 256",
                "14 s: 13 loaded",
            ],
            id="within the latency",
        ),
        pytest.param(
            8.0,
            256,
            [
                "8 s: device 0 is to pause",
                "8 s: 13 paused at 768",
                "8 s: demand of 5, 1024 bytes from 0",
                "12.5 s: 5 loaded",
                "12.5 s: prefetch of 13, 256 bytes from 768",
                "14 s: 13 loaded",
            ],
            id="exactly between two chunks",
        ),
        pytest.param(
            8.25,
            256,
            [
                "8.25 s: device 0 is to pause",
                "9 s: 13 loaded",  # nothing would be left to resume
                "9 s: demand of 5, 1024 bytes from 0",
                "13.5 s: 5 loaded",
            ],
            id="within the last chunk",
        ),
        pytest.param(
            9.0,
            256,
            ["9 s: 13 loaded", "9 s: demand of 5, 1024 bytes from 0", "13.5 s: 5 loaded"],
            id="at its very end",
        ),
        pytest.param(
            6.75,
            384,
            [
                "6.75 s: device 0 is to pause",
                "8 s: 13 paused at 768",  # chunks end at 6.5 and 8 s, the short last one at 9 s
                "8 s: demand of 5, 1024 bytes from 0",
                "12.5 s: 5 loaded",
                "12.5 s: prefetch of 13, 256 bytes from 768",
                "14 s: 13 loaded",
            ],
            id="chunks that do not divide the expert",
        ),
        pytest.param(
            4.75,
            4096,
            [
                "4.75 s: device 0 is to pause",
                "9 s: 13 loaded",
                "9 s: demand of 5, 1024 bytes from 0",
                "13.5 s: 5 loaded",
            ],
            id="a chunk larger than the expert",
        ),
    ],
)
def test_a_prefetch_pauses_at_a_chunks_end_and_resumes_at_its_offset(
    at_s: float, chunk_bytes: int, expected: list[str]
) -> None:
    bench = Bench(chunk_bytes=chunk_bytes)
    assert bench.run(bench.opening(13), bench.gate(5, at_s)) == OPENING + expected
    link, counters = bench.links[0], bench.core.counters()
    assert link.bytes_moved == 3 * EXPERT_BYTES
    assert link.busy_s == bench.env.now  # it never idles in these stories
    assert (counters["demand_loads"], counters["prefetch_loads"]) == (2, 1)
    assert (counters["demand_bytes"], counters["prefetch_bytes"]) == (2 * EXPERT_BYTES, EXPERT_BYTES)
    assert counters["preemptions"] == any("is to pause" in line for line in expected)


def test_a_resumed_prefetch_pauses_again() -> None:
    bench = Bench()
    assert bench.run(bench.opening(13), bench.gate(5, 6.25), bench.gate(10, 12.5)) == [
        *OPENING,
        "6.25 s: device 0 is to pause",
        "7 s: 13 paused at 512",
        "7 s: demand of 5, 1024 bytes from 0",
        "11.5 s: 5 loaded",
        "11.5 s: prefetch of 13, 512 bytes from 512",
        "12.5 s: device 0 is to pause",  # half a chunk after the latency
        "13 s: 13 paused at 768",
        "13 s: demand of 10, 1024 bytes from 0",
        "17.5 s: 10 loaded",
        "17.5 s: prefetch of 13, 256 bytes from 768",
        "19 s: 13 loaded",
    ]
    assert bench.links[0].bytes_moved == 4 * EXPERT_BYTES


def test_a_prefetch_required_in_flight_finishes_without_a_pause() -> None:
    bench = Bench()
    assert bench.run(bench.opening(5), bench.gate(5, 6.25)) == [
        *OPENING[:2],
        "4.5 s: prefetch of 5, 1024 bytes from 0",
        "9 s: 5 loaded",
    ]
    assert bench.core.totals()[:3] == (2, 0, 1)  # activated, hits, late
    assert bench.core.counters()["useful_bytes"] == EXPERT_BYTES


def test_a_demand_takes_the_slot_of_a_paused_prefetch_where_no_other_is_free() -> None:
    bench = Bench(slots=1)
    assert bench.run(bench.opening(13), bench.gate(5, 6.25)) == [
        *OPENING,
        "6.25 s: device 0 is to pause",
        "7 s: 13 paused at 512",
        "7 s: demand of 5, 1024 bytes from 0",
        "11.5 s: 5 loaded",
    ]
    assert bench.core.counters()["wasted_bytes"] == 512
    assert bench.core.residents(0) == [5]


def test_scope_all_keeps_every_link_free_for_demands() -> None:
    # Odd experts are device 1's. Device 0 has nothing in flight, so its demand of expert 6 starts at once.
    lines = {}
    for scope in ("device", "all"):
        bench = Bench(devices=2, preempt_scope=scope)
        lines[scope] = bench.run(bench.opening(13), bench.gate(6, 6.25))
    assert lines["device"] == [
        *OPENING,
        "6.25 s: demand of 6, 1024 bytes from 0",
        "9 s: 13 loaded",
        "10.75 s: 6 loaded",
    ]
    assert lines["all"] == [
        *OPENING,
        "6.25 s: device 1 is to pause",
        "6.25 s: demand of 6, 1024 bytes from 0",
        "7 s: 13 paused at 512",
        "10.75 s: 6 loaded",
        "10.75 s: prefetch of 13, 512 bytes from 512",
        "13.25 s: 13 loaded",
    ]


def test_a_failed_demand_is_loaded_again_from_the_start() -> None:
    bench = Bench()
    bench.core.failures = 2
    assert bench.run(bench.gate(0, 0.0)) == [
        "0 s: demand of 0, 1024 bytes from 0",
        "4.5 s: 0 load_failed",
        "4.5 s: demand of 0, 1024 bytes from 0",
        "9 s: 0 load_failed",
        "9 s: demand of 0, 1024 bytes from 0",
        "13.5 s: 0 loaded",
    ]
    assert bench.core.counters()["demand_bytes"] == EXPERT_BYTES


def test_the_third_failure_in_a_row_aborts() -> None:
    bench = Bench()
    bench.core.failures = 3
    lines = bench.run(bench.gate(0, 0.0))
    assert lines[-1] == "13.5 s: 0 load_failed"
    assert bench.core.take_forward() == [("Abort", 0)]
    assert bench.core.abort_reason() == "read error"
    assert bench.core.take_device(0) == []
    with pytest.raises(CoreError, match="the core stopped after an expert could not be loaded"):
        bench.core.computed_chunk()


def test_a_failed_prefetch_is_counted_and_gives_its_slot_back() -> None:
    bench = Bench()
    assert bench.run(bench.opening(13, failures=1), bench.gate(5, 9.0)) == [
        *OPENING,
        "9 s: 13 load_failed",
        "9 s: demand of 5, 1024 bytes from 0",
        "13.5 s: 5 loaded",
    ]
    assert bench.core.counters()["failed_prefetches"] == 1
    assert bench.core.residents(0) == [0, 5]


def test_a_late_prefetch_that_fails_is_demanded() -> None:
    bench = Bench()
    assert bench.run(bench.opening(5, failures=1), bench.gate(5, 6.25)) == [
        *OPENING[:2],
        "4.5 s: prefetch of 5, 1024 bytes from 0",
        "9 s: 5 load_failed",
        "9 s: demand of 5, 1024 bytes from 0",
        "13.5 s: 5 loaded",
    ]


def test_a_paused_prefetch_waits_until_a_failed_demand_is_loaded() -> None:
    bench = Bench()
    assert bench.run(bench.opening(13, failures=1), bench.gate(5, 6.25)) == [
        *OPENING,
        "6.25 s: device 0 is to pause",
        "7 s: 13 paused at 512",
        "7 s: demand of 5, 1024 bytes from 0",
        "11.5 s: 5 load_failed",
        "11.5 s: demand of 5, 1024 bytes from 0",
        "16 s: 5 loaded",
        "16 s: prefetch of 13, 512 bytes from 512",
        "18.5 s: 13 loaded",
    ]

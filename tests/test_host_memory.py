"""Host memory in front of an SSD, and shared by several links: timelines worked by hand."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from finemoe.policy.core import CHUNK_OPEN, CHUNK_READY
from finemoe.sim.events import ENGINE, Timer
from finemoe.sim.host_memory import HostBandwidth, HostLink, HostMemory
from finemoe.sim.link import Copies, Landings, Link
from test_world_preemption import EXPERT_BYTES, PROFILE, Bench, Script

# A read of an expert's 1024 bytes: 1 s latency, then 512 bytes a second, in chunks of 256 (0.5 s): 3 s.
# A copy of it: 0.5 s latency, then 256 bytes a second, in chunks of 256 (1 s): 4.5 s.
SSD = msgspec.structs.replace(PROFILE, ssd_latency_s=1.0, ssd_bandwidth=512.0, link_chunk_bytes=256)


class SsdBench(Bench):
    """`Bench` with host memory of so many experts in front of an SSD. Expert e is on device e mod devices."""

    def __init__(self, host_slots: int, *, slots: int = 4, devices: int = 1) -> None:
        super().__init__(slots=slots, devices=devices)
        profile = msgspec.structs.replace(SSD, devices=devices, host_bandwidth=None)
        self.host = HostMemory(self.env, host_slots, EXPERT_BYTES, profile)
        share, copies = HostBandwidth(profile), Copies()
        landings = Landings(self.env, self.core, self.deliver)
        self.links: list[Link] = [
            HostLink(self.env, self.core, profile, copies, landings, self.deliver, share, self.host)
            for _ in range(devices)
        ]

    def require(self, members: Sequence[int], *predicted: int) -> Script:
        """Layer 0 requires several experts now, and others are predicted; computed by chunks in no time."""
        row = np.zeros((1, 4), np.float16)
        mask = self.core.gate(0, row, members, [1] * len(members), self.env.now)
        self.deliver(mask)
        predict(self, *predicted)
        while mask & CHUNK_OPEN:
            if not mask & CHUNK_READY:
                self.ready = self.env.event()
                yield self.ready
            mask = self.core.computed_chunk(self.env.now)
            self.deliver(mask)

    def iteration(self, experts: Sequence[int]) -> Script:
        """Each layer requires its expert once the one before is computed; then another iteration begins."""
        for expert in experts:
            yield from self.gate(expert, self.env.now)
        self.deliver(self.core.end_iteration(self.env.now))
        self.deliver(self.core.begin_iteration([(0, "decode", 1, False)], time_s=self.env.now))


def predict(bench: Bench, *experts: int) -> None:
    """Predict experts of later layers after layer 0's gate, one after the other."""
    for expert in experts:
        row = np.zeros((1, 4), np.float16)
        row[0, expert % 4] = 1.0
        bench.deliver(bench.core.speculation(0, expert // 4, row, bench.env.now))


def at(bench: Bench, at_s: float, *experts: int) -> Script:
    """Wait, then predict."""
    yield Timer(bench.env, ENGINE).start(at_s - bench.env.now)
    predict(bench, *experts)


# Expert 0 is read from 0 to 3 s and copied until 7.5 s. The read of 13 then begins: its latency ends at
# 8.5 s, its chunks at 9, 9.5, 10 and 10.5 s. Its copy would have its latency until 11 s, chunks until 12, 13,
# 14 and 15 s.
OPENING = [
    "0 s: demand of 0, 1024 bytes from 0",
    "7.5 s: 0 loaded",
    "7.5 s: prefetch of 13, 1024 bytes from 0",
]


def test_what_host_memory_lacks_is_read_first_and_the_link_is_not_busy_meanwhile() -> None:
    bench = SsdBench(host_slots=4)
    assert bench.run(bench.gate(0, 0.0)) == OPENING[:2]
    assert bench.links[0].busy_s == 4.5
    assert (bench.host.busy_s, bench.host.bytes_read) == (3.0, EXPERT_BYTES)
    assert (bench.host.hits, bench.host.misses) == (0, 1)


@pytest.mark.parametrize(
    ("at_s", "expected", "read"),
    [
        pytest.param(
            9.25,
            [
                "9.25 s: device 0 is to pause",
                "9.5 s: 13 paused at 0",  # with its chunk; half of it is in host memory
                "9.5 s: demand of 5, 1024 bytes from 0",
                "17 s: 5 loaded",
                "17 s: prefetch of 13, 1024 bytes from 0",
                "23.5 s: 13 loaded",  # 1 s latency, two chunks, 4.5 s of copying
            ],
            3 * EXPERT_BYTES,
            id="within a chunk of the read",
        ),
        pytest.param(
            7.75,
            [
                "7.75 s: device 0 is to pause",
                "9 s: 13 paused at 0",  # the first chunk is on its way
                "9 s: demand of 5, 1024 bytes from 0",
                "16.5 s: 5 loaded",
                "16.5 s: prefetch of 13, 1024 bytes from 0",
                "23.5 s: 13 loaded",  # 1 s, three chunks, 4.5 s
            ],
            3 * EXPERT_BYTES,
            id="within the read's latency",
        ),
        pytest.param(
            10.25,
            [
                "10.25 s: device 0 is to pause",
                "10.5 s: 13 paused at 0",  # it is whole in host memory, and its copy does not begin
                "10.5 s: demand of 5, 1024 bytes from 0",
                "18 s: 5 loaded",
                "18 s: prefetch of 13, 1024 bytes from 0",
                "22.5 s: 13 loaded",
            ],
            3 * EXPERT_BYTES,
            id="within the read's last chunk",
        ),
        pytest.param(
            11.25,
            [
                "11.25 s: device 0 is to pause",
                "12 s: 13 paused at 256",  # as without an SSD
                "12 s: demand of 5, 1024 bytes from 0",
                "19.5 s: 5 loaded",
                "19.5 s: prefetch of 13, 768 bytes from 256",
                "23 s: 13 loaded",  # from host memory: 0.5 s, three chunks
            ],
            3 * EXPERT_BYTES,
            id="within the copy",
        ),
    ],
)
def test_a_prefetch_pauses_wherever_it_is(at_s: float, expected: list[str], read: int) -> None:
    bench = SsdBench(host_slots=4)
    assert bench.run(bench.opening(13), bench.gate(5, at_s)) == OPENING + expected
    assert bench.host.bytes_read == read
    assert bench.links[0].bytes_moved == 3 * EXPERT_BYTES


def test_what_a_stopped_read_brought_goes_with_its_slot() -> None:
    bench = SsdBench(host_slots=1)
    assert bench.run(bench.opening(13), bench.gate(5, 9.25)) == [
        *OPENING,
        "9.25 s: device 0 is to pause",
        "9.5 s: 13 paused at 0",
        "9.5 s: demand of 5, 1024 bytes from 0",  # takes the only slot
        "17 s: 5 loaded",
        "17 s: prefetch of 13, 1024 bytes from 0",
        "24.5 s: 13 loaded",  # read from its beginning
    ]
    assert bench.host.bytes_read == 3 * EXPERT_BYTES + 512
    assert bench.host.busy_s == 3 * 3.0 + 2.0


def test_a_prefetch_required_while_it_is_read_goes_on() -> None:
    bench = SsdBench(host_slots=4)
    assert bench.run(bench.opening(5), bench.gate(5, 9.25)) == [
        *OPENING[:2],
        "7.5 s: prefetch of 5, 1024 bytes from 0",
        "15 s: 5 loaded",
    ]
    assert bench.core.totals()[:3] == (2, 0, 1)  # activated, hits, late


def test_devices_read_one_after_another_and_copy_side_by_side() -> None:
    bench = SsdBench(host_slots=2, devices=2)
    assert bench.run(bench.require([0, 1])) == [
        "0 s: demand of 0, 1024 bytes from 0",
        "0 s: demand of 1, 1024 bytes from 0",
        "7.5 s: 0 loaded",  # read until 3 s
        "10.5 s: 1 loaded",  # read from 3 to 6 s
    ]
    assert bench.host.busy_s == 6.0
    assert [link.busy_s for link in bench.links] == [4.5, 4.5]


# Three devices. Expert 0 (device 0) is there at 7.5 s; 13 (device 1) is read until 10.5 s, 9 (device 0)
# waits.
WAITING = [
    *OPENING,
    "7.5 s: prefetch of 9, 1024 bytes from 0",
]


def test_a_demand_is_read_before_a_prefetch_that_came_earlier() -> None:
    bench = SsdBench(host_slots=4, devices=3)
    story = (bench.gate(0, 0.0), at(bench, 7.5, 13, 9), bench.gate(5, 8.5))
    assert bench.run(*story) == [
        *WAITING,
        "8.5 s: demand of 5, 1024 bytes from 0",  # device 2; read from 10.5 to 13.5 s
        "15 s: 13 loaded",  # copied from 10.5 s
        "18 s: 5 loaded",
        "21 s: 9 loaded",  # read from 13.5 to 16.5 s
    ]


def test_a_prefetch_that_waits_for_the_ssd_pauses_at_once() -> None:
    bench = SsdBench(host_slots=4, devices=3)
    story = (bench.gate(0, 0.0), at(bench, 7.5, 13, 9), bench.gate(6, 8.5))
    assert bench.run(*story) == [
        *WAITING,
        "8.5 s: device 0 is to pause",
        "8.5 s: 9 paused at 0",
        "8.5 s: demand of 6, 1024 bytes from 0",  # read from 10.5 to 13.5 s
        "15 s: 13 loaded",
        "18 s: 6 loaded",
        "18 s: prefetch of 9, 1024 bytes from 0",
        "25.5 s: 9 loaded",
    ]


def test_all_commands_of_a_moment_are_known_before_a_read_begins() -> None:
    # One slot on each of two devices: the first chunk is 0 and 1. When it is computed, device 0 may prefetch
    # 8 and device 1 needs 3, in one event: the demand is read first, though it comes last.
    bench = SsdBench(host_slots=4, slots=1, devices=2)
    assert bench.run(bench.require([0, 1, 3], 8)) == [
        "0 s: demand of 0, 1024 bytes from 0",
        "0 s: demand of 1, 1024 bytes from 0",
        "7.5 s: 0 loaded",
        "10.5 s: 1 loaded",
        "10.5 s: prefetch of 8, 1024 bytes from 0",
        "10.5 s: demand of 3, 1024 bytes from 0",  # read until 13.5 s
        "18 s: 3 loaded",
        "21 s: 8 loaded",
    ]


@pytest.mark.parametrize(
    ("host_slots", "iterations", "hits", "end_s"),
    [
        # A cycle of four in three slots: least recently used is always what comes next.
        (3, [[0, 4, 8, 12], [0, 4, 8, 12]], 0, 8 * 7.5),
        (4, [[0, 4, 8, 12], [0, 4, 8, 12]], 4, 4 * 7.5 + 4 * 4.5),
        # 5 takes 4's slot and not that of 0, which was first in but used again; then 4 takes 5's.
        (4, [[0, 4, 8, 12], [0, 5, 8, 12], [0, 4, 8, 12]], 6, 6 * 7.5 + 6 * 4.5),
    ],
)
def test_the_least_recently_used_expert_goes(
    host_slots: int, iterations: list[list[int]], hits: int, end_s: float
) -> None:
    bench = SsdBench(host_slots, slots=1)  # one slot on the device: each layer loads its expert
    bench.run(*(bench.iteration(experts) for experts in iterations))
    loads = sum(map(len, iterations))
    assert (bench.host.hits, bench.host.misses) == (hits, loads - hits)
    assert bench.env.now == end_s
    assert bench.host.bytes_read == (loads - hits) * EXPERT_BYTES


class SharedBench(Bench):
    """`Bench` of two devices whose links, 256 bytes a second each, share so much."""

    def __init__(self, host_bandwidth: float | None, *, write_back: bool = False) -> None:
        super().__init__(devices=2)
        profile = msgspec.structs.replace(SSD, devices=2, host_bandwidth=host_bandwidth)
        share, copies = HostBandwidth(profile, write_back=write_back), Copies()
        landings = Landings(self.env, self.core, self.deliver)
        self.links: list[Link] = [
            HostLink(
                self.env,
                self.core,
                profile,
                copies,
                landings,
                self.deliver,
                share,
                None,
                write_back=write_back,
            )
            for _ in range(2)
        ]

    def second(self, expert: int, at_s: float) -> Script:
        """Layer 0 requires 0 at 0 s; `expert` is predicted later, while 0 is copied."""
        self.deliver(self.core.gate(0, np.zeros((1, 4), np.float16), [0], [1], self.env.now))
        yield from at(self, at_s, expert)


def test_two_copies_share_host_memory() -> None:
    # 0 alone: latency until 0.5 s, 384 bytes until 2 s. Then both at 128 bytes/s: the other 640 until 7 s. Of
    # 13, whose latency ends at 2.5 s, 576 bytes are copied by then; the other 448 take 1.75 s at 256 bytes/s.
    bench = SharedBench(256.0)
    assert bench.run(bench.second(13, 2.0)) == [
        "0 s: demand of 0, 1024 bytes from 0",
        "2 s: prefetch of 13, 1024 bytes from 0",
        "7 s: 0 loaded",
        "8.75 s: 13 loaded",
    ]
    assert [link.busy_s for link in bench.links] == [7.0, 6.75]
    assert [link.bytes_moved for link in bench.links] == [EXPERT_BYTES, EXPERT_BYTES]


@pytest.mark.parametrize("host_bandwidth", [None, 512.0, 1e9])
def test_enough_bandwidth_is_none_shared(host_bandwidth: float | None) -> None:
    bench = SharedBench(host_bandwidth)
    assert bench.run(bench.second(13, 2.0))[2:] == ["4.5 s: 0 loaded", "6.5 s: 13 loaded"]


def test_writing_back_takes_its_part_of_the_shared_bandwidth() -> None:
    # Twice the latency, half the rate: 0 has its latency until 1 s and 128 bytes until 2 s, 64 bytes/s from
    # then on beside 13: its other 896 until 16 s. 13: latency until 3 s, 832 bytes until 16 s, 192 at 128.
    bench = SharedBench(256.0, write_back=True)
    assert bench.run(bench.second(13, 2.0))[2:] == ["16 s: 0 loaded", "17.5 s: 13 loaded"]


def test_a_slower_copy_pauses_at_a_chunks_end_too() -> None:
    # 0 is computed at 4.5 s; 13 (device 1) and 8 (device 0) are predicted and begin; both have their latency
    # until 5 s and then 128 bytes/s: chunks of 256 end at 7, 9, 11, 13 s.
    bench = SharedBench(256.0)
    assert bench.run(bench.opening(13), at(bench, 4.5, 8), bench.gate(5, 8.0)) == [
        "0 s: demand of 0, 1024 bytes from 0",
        "4.5 s: 0 loaded",
        "4.5 s: prefetch of 13, 1024 bytes from 0",
        "4.5 s: prefetch of 8, 1024 bytes from 0",
        "8 s: device 1 is to pause",
        "9 s: 13 paused at 512",
        "9 s: demand of 5, 1024 bytes from 0",
        # 8 goes on beside 5: its other 512 bytes until 13 s. 5: latency until 9.5 s, 448 bytes until 13 s,
        # and the other 576 at 256 bytes/s until 15.25 s. The resumed 13: 0.5 s, then 512 bytes in 2 s.
        "13 s: 8 loaded",
        "15.25 s: 5 loaded",
        "15.25 s: prefetch of 13, 512 bytes from 512",
        "17.75 s: 13 loaded",
    ]


def test_a_copy_asked_to_pause_keeps_sharing_until_it_stops() -> None:
    # Alone, 13's chunks end at 6, 7, 8, 9 s. 6 begins at 5.5 s, when 128 bytes of 13 are copied; the other
    # 128 of its first chunk take 1 s at half the rate.
    bench = SharedBench(256.0)
    assert bench.run(bench.opening(13), at(bench, 5.5, 6), bench.gate(5, 5.5)) == [
        "0 s: demand of 0, 1024 bytes from 0",
        "4.5 s: 0 loaded",
        "4.5 s: prefetch of 13, 1024 bytes from 0",
        "5.5 s: prefetch of 6, 1024 bytes from 0",
        "5.5 s: device 1 is to pause",
        "6.5 s: 13 paused at 256",
        "6.5 s: demand of 5, 1024 bytes from 0",
        # 6: latency until 6 s, 64 bytes until 6.5 s; it and 5 at 128 bytes/s: its other 960 until 14 s.
        # 5: latency until 7 s, 896 bytes until 14 s, 128 more at 256 bytes/s until 14.5 s.
        "14 s: 6 loaded",
        "14.5 s: 5 loaded",
        "14.5 s: prefetch of 13, 768 bytes from 256",
        "18 s: 13 loaded",
    ]

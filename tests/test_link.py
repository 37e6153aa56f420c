"""A link under Poisson load waits as an M/D/1 queue does, with the real core behind it."""

from __future__ import annotations

from collections.abc import Generator

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import simpy
from finemoe.calibration.profile import load_profile
from finemoe.policy.core import Core, make_config
from finemoe.serving.decisions import KINDS
from finemoe.sim.events import ARRIVAL, ENGINE, Timer
from finemoe.sim.link import Copies, Landings, Link, hand_over
from world_case import plain_options

LATENCY_S, BANDWIDTH, EXPERT_BYTES = 0.5, 256.0, 1024
PROFILE = msgspec.structs.replace(load_profile("rtx3090"), link_latency_s=LATENCY_S, link_bandwidth=BANDWIDTH)
SERVICE_S = LATENCY_S + EXPERT_BYTES / BANDWIDTH
LAYERS = 4096  # one expert each: each arrival queues the next layer's, and p/(l − l_now) serves them in order
SETTLING = 600  # arrivals left out at the start of each run, while the queue fills


def poisson_waits(utilisation: float, seed: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Arrivals and waits of LAYERS − 1 prefetches, queued at Poisson moments, as the core's log has them."""
    env = simpy.Environment()
    core = Core(
        make_config(
            plain_options(
                layers=LAYERS,
                experts=1,
                top_k=1,
                slots_per_device=LAYERS,
                expert_bytes=EXPERT_BYTES,
                predictor="speculate",
            )
        ),
        log_iterations=-1,
    )

    def deliver(_: int) -> None:
        hand_over(core, [link])

    link = Link(env, core, PROFILE, Copies(), Landings(env, core, deliver), deliver)
    gaps = np.random.default_rng(seed).exponential(SERVICE_S / utilisation, LAYERS - 1)

    def arrivals() -> Generator[simpy.Event, None, None]:
        row = np.ones((1, 1), np.float16)
        core.begin_iteration([(0, "decode", 1, False)])
        core.gate(0, row, [0], [1])
        hand_over(core, [link])
        yield Timer(env, ENGINE).start(SERVICE_S)
        core.computed_chunk(env.now)
        for layer, gap_s in enumerate(gaps.tolist(), start=1):
            yield Timer(env, ARRIVAL).start(gap_s)
            core.speculation(0, layer, row, env.now)
            hand_over(core, [link])

    env.process(arrivals())
    env.run()
    assert link.bytes_moved == LAYERS * EXPERT_BYTES
    assert link.busy_s == pytest.approx(LAYERS * SERVICE_S)
    log = core.take_log()
    kind, time_s = log["kind"], log["time_s"]
    arrived = time_s[kind == KINDS.index("speculation")]
    loads = kind == KINDS.index("Load")
    assert log["expert"][loads].tolist() == list(range(LAYERS))  # first come, first served
    return arrived, time_s[loads][1:] - arrived


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_poisson_load_waits_as_in_an_m_d_1_queue(utilisation: float) -> None:
    waits = []
    for seed in range(40):
        arrived, waited = poisson_waits(utilisation, seed)
        # Lindley: arrival i starts at the latest A_k + (i − k)·s over k ≤ i.
        turns = np.arange(len(arrived)) * SERVICE_S
        starts = np.maximum.accumulate(arrived - turns) + turns
        np.testing.assert_allclose(waited, starts - arrived, rtol=0.0, atol=1e-6)
        waits.append(waited[SETTLING:])
    expected_s = utilisation * SERVICE_S / (2.0 * (1.0 - utilisation))
    assert np.concatenate(waits).mean() == pytest.approx(expected_s, rel=0.03)  # 140,000 waits

"""Limits whose outcome is known: a link that costs nothing, a cache that holds all or next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import pytest
from finemoe.calibration.profile import HardwareProfile
from finemoe.policy.models import ModelSpec
from finemoe.policy.systems import SYSTEMS
from finemoe.serving.outcome import CellOutcome
from finemoe.sim.cell import CellInputs
from finemoe.traces.requests import Request
from world_case import MadeRouting, cell, serve, small_machine, small_model

MODEL = small_model(layers=4, experts=8, top_k=2)
REQUESTS = [Request(i, i * 1e-3, 5 + i, 4 + i % 3) for i in range(6)]
OFFLOADING = [name for name, row in SYSTEMS.items() if row.preload != "all"]
MAP_SYSTEMS = [name for name, row in SYSTEMS.items() if row.predictor == "map"]
each_system = pytest.mark.parametrize("system", [*SYSTEMS])
each_offloading = pytest.mark.parametrize("system", OFFLOADING)


def a_cell(
    system: str,
    *,
    slots: int,
    model: ModelSpec = MODEL,
    machine: HardwareProfile | None = None,
    requests: Sequence[Request] = REQUESTS,
    **settings: int,
) -> CellInputs:
    routing = MadeRouting(model, embedding_width=4)
    return cell(system, model, machine or small_machine(), routing, requests, slots=slots, settings=settings)


def kinds(outcome: CellOutcome) -> list[str]:
    """Loads by kind, everything else by name, in order."""
    assert outcome.decisions is not None
    rows = outcome.decisions.select(["kind", "sub_kind"]).to_pylist()
    return [row["sub_kind"] if row["kind"] == "Load" else row["kind"] for row in rows]


@pytest.mark.parametrize("devices", [1, 2])
@each_offloading
def test_a_link_that_costs_nothing_is_no_offloading(system: str, devices: int) -> None:
    # A launch costs nothing either, as a layer that goes through in parts has more of them.
    machine = small_machine(
        devices,
        link_bandwidth=inf,
        link_latency_s=0.0,
        kernel_launch_s=0.0,
        search_latency_s=0.0,
        search_rate=inf,
    )
    free = serve(a_cell(system, slots=16, machine=machine))
    bound = serve(a_cell("no-offload", slots=8, machine=machine))
    assert free.counters["bytes_moved"] > bound.counters["bytes_moved"] == 0
    assert not free.iterations.column("stall_s").any()
    assert not free.iterations.column("search_wait_s").any()
    # Speculated gates are computed; what passes `static` by goes in chunks, which devices share unevenly.
    if SYSTEMS[system].predictor == "speculate" or (system == "static" and devices > 1):
        assert free.run_s > bound.run_s
        return
    for name in ("admitted_s", "first_token_s", "finished_s"):
        np.testing.assert_allclose(free.requests.column(name), bound.requests.column(name), rtol=1e-12)


@each_offloading
def test_a_slower_link_is_never_better(system: str) -> None:
    last_s = 0.0
    for bandwidth in (inf, 1e11, 1e10, 1e9):
        outcome = serve(a_cell(system, slots=8, machine=small_machine(link_bandwidth=bandwidth)))
        assert outcome.run_s >= last_s
        last_s = outcome.run_s


@each_offloading
def test_a_cache_of_the_whole_model_loads_each_expert_once(system: str) -> None:
    # The first prompt is long enough for every expert of every layer; after it nothing is missing.
    requests = [Request(0, 0.0, 200, 4), *(Request(i, 0.0, 20, 5) for i in range(1, 4))]
    machine = small_machine(search_latency_s=0.0, search_rate=inf)
    slots = MODEL.routed_experts()
    outcome = serve(a_cell(system, slots=slots, machine=machine, requests=requests, max_num_seqs=1))
    steps, counters = outcome.iterations.table(), outcome.counters
    preloaded = SYSTEMS[system].preload == "popular"
    assert counters["demand_loads"] + counters["prefetch_loads"] == (0 if preloaded else slots)
    assert counters["evictions"] == 0
    assert steps["activated"][0] == MODEL.routed_experts()
    assert not steps["demand_bytes"][1:].any()
    assert not steps["stall_s"][1:].any()
    assert (steps["hits"][1:] == steps["activated"][1:]).all()
    if SYSTEMS[system].predictor == "speculate":
        return
    # From then on it is as fast as a system that never loaded anything.
    bound = serve(a_cell("no-offload", slots=1, requests=requests, max_num_seqs=1)).iterations.table()
    took, at_best = (table["end_s"] - table["start_s"] for table in (steps, bound))
    np.testing.assert_allclose(took[1:], at_best[1:], rtol=1e-9)
    assert took[0] > at_best[0] or preloaded


def test_all_resident_from_the_start_is_no_load_at_all() -> None:
    outcome = serve(a_cell("no-offload", slots=1))
    assert {"demand", "prefetch", "Search", "PreemptPrefetch"}.isdisjoint(kinds(outcome))
    assert outcome.counters["bytes_moved"] == 0
    steps = outcome.iterations.table()
    assert (steps["hits"] == steps["activated"]).all()
    small = serve(a_cell("no-offload", slots=1, machine=small_machine(host_memory_bytes=2 * 10**6)))
    assert small.notes == outcome.notes  # there is an SSD, and nothing to say of it
    assert small.counters["ssd_bytes"] == 0
    assert small.run_s == outcome.run_s


@pytest.mark.parametrize("system", MAP_SYSTEMS)
@pytest.mark.parametrize("capacity", [1, 8])
def test_an_empty_store_means_demand_loads_only(system: str, capacity: int) -> None:
    machine = small_machine(search_latency_s=0.0, search_rate=inf)
    order = kinds(serve(a_cell(system, slots=16, machine=machine, store_capacity=capacity)))
    end = order.index("end_iteration")
    assert "demand" in order[:end]
    assert {"Search", "prefetch"}.isdisjoint(order[:end])
    assert order[end + 1] == "Search"  # the first map is stored
    assert "prefetch" in order[end:]


@pytest.mark.parametrize("system", MAP_SYSTEMS)
def test_a_single_token_is_served_without_a_prefetch(system: str) -> None:
    outcome = serve(a_cell(system, slots=16, requests=[Request(0, 0.0, 9, 1)]))
    assert outcome.counters["prefetch_loads"] == outcome.counters["searches"] == 0
    assert outcome.counters["demand_loads"] == outcome.iterations.column("activated").sum()


@pytest.mark.parametrize("devices", [1, 3])
@each_offloading
def test_one_slot_per_device_serves_expert_by_expert(system: str, devices: int) -> None:
    machine = small_machine(devices)
    outcome = serve(a_cell(system, slots=devices, machine=machine))
    assert sorted(outcome.requests.column("output_tokens")) == sorted(r.output_tokens for r in REQUESTS)
    assert outcome.decisions is not None
    rows = outcome.decisions.to_pylist()
    required: list[int] = []
    computed: list[int] = []
    waits = 0
    for row in rows:
        if row["kind"] == "gate":
            assert computed == required
            first = row["layer"] * MODEL.experts
            whole = SYSTEMS[system].load_shape == "layer"
            required = [first + j for j in (range(MODEL.experts) if whole else row["experts"])]
            computed, waits = [], 0
            owned = [sum(e % devices == g for e in required) for g in range(devices)]
        elif row["kind"] == "Wait":
            waits += 1
            assert len({e % devices for e in row["experts"]}) == len(row["experts"])  # one slot each
        elif row["kind"] == "computed":
            computed = sorted(computed + row["experts"])
            if computed == required:
                assert waits == max(owned)
    assert computed == required
    for g in range(devices):
        assert {row["slot"] for row in rows if row["kind"] == "Load" and row["device"] == g} == {0}


@each_system
def test_a_model_that_activates_all_its_experts_is_served(system: str) -> None:
    model = small_model(layers=3, experts=4, top_k=4)
    outcome = serve(a_cell(system, slots=6, model=model))
    steps = outcome.iterations.table()
    assert (steps["activated"] == 12).all()
    assert len(outcome.requests) == len(REQUESTS)


@each_system
def test_a_model_of_one_layer_is_served(system: str) -> None:
    model = small_model(layers=1, experts=8, top_k=2)
    outcome = serve(a_cell(system, slots=4, model=model, prefetch_distance=3))
    assert len(outcome.requests) == len(REQUESTS)
    assert outcome.decisions is not None
    searches = outcome.decisions.filter(
        [row["sub_kind"] == "trajectory" for row in outcome.decisions.select(["sub_kind"]).to_pylist()]
    )
    assert len(searches) == 0  # no layer is ahead of the only one


@pytest.mark.timeout(20)
@each_offloading
def test_a_chunk_of_one_resident_and_one_missing_expert_is_waited_for(system: str) -> None:
    # Three experts a layer, two slots: from the second iteration on the first chunk has one that is there.
    model = small_model(layers=1, experts=3, top_k=3)
    outcome = serve(a_cell(system, slots=2, model=model, requests=[Request(0, 0.0, 1, 4)]))
    steps = outcome.iterations.table()
    assert (steps["stall_s"] > 0.0).all()
    assert (steps["hits"][1:] > 0).all()


@pytest.mark.parametrize("slots", [2, 8])
def test_activations_are_exchanged_once_per_layer_in_however_many_parts_it_goes_through(slots: int) -> None:
    near, far = (
        serve(a_cell("lru", slots=slots, machine=small_machine(2, peer_latency_s=latency_s)))
        for latency_s in (0.0, 1.0)
    )
    more_s = far.iterations.column("compute_s")[0] - near.iterations.column("compute_s")[0]
    assert more_s == pytest.approx(2.0 * MODEL.layers)  # there and back


@pytest.mark.parametrize("devices", [1, 2])
@each_offloading
def test_an_ssd_that_costs_nothing_is_none(system: str, devices: int) -> None:
    machine = small_machine(devices, ssd_latency_s=0.0, ssd_bandwidth=inf, host_memory_bytes=devices * 10**6)
    free, none = (
        serve(a_cell(system, slots=8, machine=machine)) for machine in (machine, small_machine(devices))
    )
    assert free.counters["ssd_bytes"] > 0
    assert free.busy_s["ssd"] == 0.0
    assert "ssd_bytes" not in none.counters
    for name in ("admitted_s", "first_token_s", "finished_s"):
        np.testing.assert_allclose(free.requests.column(name), none.requests.column(name), rtol=1e-12)


def test_a_load_through_host_memory_of_one_expert_takes_a_read_and_a_copy() -> None:
    # Every load is a read of 0.02 + 0.5 ms and a copy of 0.01 + 0.1 ms, as nothing is used twice in a row.
    machine = small_machine(ssd_latency_s=2e-5, ssd_bandwidth=2e9, host_memory_bytes=10**6)
    outcome = serve(a_cell("lru", slots=1, machine=machine, requests=[Request(0, 0.0, 5, 4)]))
    loads = outcome.counters["demand_loads"]
    assert (outcome.counters["host_hits"], outcome.counters["host_misses"]) == (0, loads)
    assert outcome.busy_s["ssd"] == pytest.approx(loads * 5.2e-4)
    assert outcome.busy_s["link"] == pytest.approx(loads * 1.1e-4)
    assert outcome.iterations.column("stall_s").sum() == pytest.approx(loads * 6.3e-4)


@each_offloading
def test_host_memory_of_every_expert_needs_no_ssd(system: str) -> None:
    experts = MODEL.routed_experts()
    short, enough = (
        serve(a_cell(system, slots=8, machine=small_machine(host_memory_bytes=count * 10**6)))
        for count in (experts - 1, experts)
    )
    assert short.counters["ssd_bytes"] > 0
    assert any(
        note.startswith("host memory of 31000000 bytes (0.03 GB) holds 31 of the 32") for note in short.notes
    )
    assert any(note.startswith("SSD: ") for note in short.notes)
    assert "ssd" not in enough.busy_s
    assert not any("SSD" in note for note in enough.notes)


@pytest.mark.parametrize("devices", [2, 3])
def test_shared_host_memory_is_as_fast_as_it_is_for_all_links_together(devices: int) -> None:
    # Every layer needs all eight experts, so all links copy all the time: their number does not matter.
    host = small_machine(devices, host_bandwidth=1e9, link_latency_s=0.0, peer_latency_s=0.0)
    outcome = serve(a_cell("deepspeed", slots=devices, machine=host, requests=[Request(0, 0.0, 9, 2)]))
    stall_s = outcome.iterations.column("stall_s").sum()
    assert stall_s == pytest.approx(outcome.counters["bytes_moved"] / 1e9)

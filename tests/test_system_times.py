"""What systems wait for, in simulated time worked by hand (docs/systems say what and why).

A layer takes 2 ms until its gate is known, an expert 1 ms, the head 1 ms, a load 4.5 ms, a search 0.5 ms and
1 ms per 8 values, as in docs/worked-example.md. Two layers of four experts, one chosen per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from finemoe.serving.outcome import CellOutcome
from finemoe.traces.requests import Request
from finemoe.traces.routing import RequestRouting
from world_case import (
    ListedRouting,
    MadeRouting,
    cell,
    decisions_of,
    routing_of,
    serve,
    small_machine,
    small_model,
)

MODEL = msgspec.structs.replace(
    small_model(2, 4, 1),
    hidden_size=2,
    expert_parameters=500_000,
    moe_layer_parameters=1_000_000,
    head_parameters=500_000,
    kv_bytes_per_token=2,
)
MACHINE = small_machine(
    kernel_launch_s=0.0,
    peak_flops=1e18,
    memory_bandwidth=1e9,
    link_latency_s=0.0005,
    link_bandwidth=0.25e9,
    link_chunk_bytes=250_000,
    search_latency_s=0.0005,
    search_rate=8000.0,
)


def request_of(iterations: Sequence[tuple[int, int]], guesses: Sequence[int] = ()) -> RequestRouting:
    """One token per iteration that goes to these experts of the two layers; `guesses` are of the second."""
    rows = np.eye(4, dtype=np.float16)
    gate = np.stack([rows[list(chosen)] for chosen in iterations])
    routing = routing_of(gate, [np.eye(4, dtype=np.int64)[j] for j in iterations[0]], 1, None)
    if not guesses:
        return routing
    ahead = np.stack([np.stack([rows[j], np.zeros(4, np.float16)]) for j in guesses])
    return replace(routing, speculation={1: ahead})


def served(system: str, *routings: RequestRouting, slots: int = 4) -> CellOutcome:
    """All requests are there at 0 and are served one after another."""
    source = ListedRouting(MadeRouting(MODEL).meta, routings)
    requests = [
        Request(index, 0.0, int(routing.token_counts[: routing.offsets[1]].sum()), len(routing.gate))
        for index, routing in enumerate(routings)
    ]
    settings = {"max_num_seqs": 1}
    return serve(cell(system, MODEL, MACHINE, source, requests, slots=slots, settings=settings))


def times_ms(outcome: CellOutcome) -> list[list[float]]:
    """Of each iteration: stall, search wait, computation, all."""
    return [
        [round(1e3 * float(s), 2) for s in (row["stall_s"], row["search_wait_s"], row["compute_s"], taken_s)]
        for row in outcome.iterations.table()
        if (taken_s := row["end_s"] - row["start_s"])
    ]


def test_moe_infinity_waits_for_its_searches() -> None:
    """Request 0 ends at 16 ms, and its matrix is stored.

    Request 1: the gate of layer 0 comes at 18 ms, expert 0 is resident, but the search takes 0.5 + 4/8 ms. It
    predicts expert 5, which is there; expert 6 is missed. `hit-count` computes expert 0 meanwhile.
    """
    routings = (request_of([(0, 1)]), request_of([(0, 2)]))
    first = [9.0, 0.0, 7.0, 16.0]
    assert times_ms(served("moe-infinity", *routings)) == [first, [4.5, 1.0, 7.0, 12.5]]
    assert times_ms(served("hit-count", *routings)) == [first, [4.5, 0.0, 7.0, 11.5]]


def test_moe_infinitys_demand_loads_go_on_while_it_searches() -> None:
    """Layer 0 misses expert 1 at 18 ms: 1 of the load's 4.5 ms passes in the search."""
    outcome = served("moe-infinity", request_of([(0, 1)]), request_of([(1, 1)]))
    assert times_ms(outcome)[1] == [3.5, 1.0, 7.0, 11.5]


@pytest.mark.parametrize(("system", "load_ms"), [("mixtral-offloading", 4.5), ("mixtral-offloading+wb", 9.0)])
def test_mixtral_offloading_waits_for_what_it_staged(system: str, load_ms: float) -> None:
    """Expert 5 is guessed rightly, then 6 wrongly for 7.

    Iteration 0: expert 0 is missed at 2 ms; then expert 5 is staged, 1 ms of it while expert 0 is computed.
    Iteration 1: a hit at once; 1 ms of expert 6's load passes in computation, then expert 7 is missed.
    A copy back to the host doubles each load, its latency too.
    """
    outcome = served(system, request_of([(0, 1), (0, 3)], guesses=(1, 2)))
    each = [load_ms, load_ms - 1.0, 7.0, 7.0 + 2 * load_ms - 1.0]
    assert times_ms(outcome) == [each, each]
    steps = outcome.iterations.table()
    assert steps["hits"].tolist() == [1, 1]
    assert steps["misses"].tolist() == [1, 1]
    evicted = [row["evicts"] for row in decisions_of(outcome).to_pylist() if row["kind"] == "Load"]
    assert evicted == [-1, -1, -1, 5]  # a quota of one: layer 1 gives its own


def test_mixtral_offloading_says_when_no_layer_has_a_slot_of_its_own() -> None:
    """(2 − 1) / 2 < 1."""
    routing = request_of([(0, 1)], guesses=(1,))
    (note,) = [text for text in served("mixtral-offloading", routing, slots=2).notes if "layer cache" in text]
    assert "2 expert slots" in note
    assert "3slots" in note
    notes = served("mixtral-offloading", routing, slots=3).notes
    assert not any("layer cache" in text for text in notes)


def test_promoe_computes_what_is_resident_first() -> None:
    """Request 0: expert 0 is missed at 2 ms, expert 5 prefetched from 6.5 to 11 and waited for from 9.5.

    Request 1 has two tokens: expert 0 is computed while expert 1 is loaded; `lru` waits for both.
    """
    second = routing_of(
        np.eye(4, dtype=np.float16)[[[0, 1]]], [np.array([1, 1, 0, 0]), np.array([0, 2, 0, 0])], 1, None
    )
    second = replace(second, speculation={1: np.eye(4, dtype=np.float16)[[[1, 1]]]})
    routings = (request_of([(0, 1)], guesses=(1,)), second)
    assert times_ms(served("promoe", *routings)) == [[6.0, 0.0, 7.0, 13.0], [3.5, 0.0, 8.0, 11.5]]
    assert times_ms(served("lru", *routings)) == [[9.0, 0.0, 7.0, 16.0], [4.5, 0.0, 8.0, 12.5]]

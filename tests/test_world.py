"""What holds in the simulated world for every system, on small random models, machines and requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from finemoe.policy.systems import SYSTEMS
from finemoe.sim.world import CellInputs, plan_cell
from finemoe.traces.requests import Request
from finemoe.traces.routing import RequestRouting
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from world_case import (
    ListedRouting,
    MadeRouting,
    Shape,
    cell,
    decisions_of,
    serve,
    shapes,
    small_machine,
    small_model,
)

all_systems = pytest.mark.parametrize("system", [*SYSTEMS])
some = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@all_systems
@some
@given(shape=shapes())
def test_every_request_is_served_in_as_many_iterations_as_it_has_output_tokens(
    system: str, shape: Shape
) -> None:
    outcome = serve(shape.cell(system))
    rows = outcome.requests.table()
    assert sorted(rows["request"]) == [request.index for request in shape.requests]
    for row in rows:
        request = shape.requests[row["request"]]
        assert (row["prompt_tokens"], row["output_tokens"]) == (request.prompt_tokens, request.output_tokens)
        assert request.arrival_s <= row["admitted_s"] or shape.offline
        assert row["admitted_s"] < row["first_token_s"] <= row["finished_s"] <= outcome.simulated_s
        assert (row["first_token_s"] == row["finished_s"]) == (request.output_tokens == 1)
    decisions = decisions_of(outcome)
    begun = decisions.filter(pa.compute.equal(decisions["kind"].cast("string"), "begin_iteration"))
    batches = begun["requests"].to_pylist()
    for request in shape.requests:
        taking_part = [place for place, batch in enumerate(batches) if request.index in batch]
        assert len(taking_part) == request.output_tokens
    steps = outcome.iterations.table()
    assert steps["batch"].tolist() == [len(batch) for batch in batches]
    assert steps["batch"].max() <= (1 if shape.offline else shape.max_num_seqs)
    running: set[int] = set()
    left = {request.index: request.output_tokens for request in shape.requests}
    for batch in batches:
        running |= set(batch)
        assert len(running) <= (1 if shape.offline else shape.max_num_seqs)
        for index in batch:
            left[index] -= 1
            if not left[index]:
                running.remove(index)
    prefill = steps["phase"] == "prefill"
    assert steps["tokens"].tolist() == [sum(tokens) for tokens in begun["tokens"].to_pylist()]
    assert steps["tokens"][prefill].sum() == sum(request.prompt_tokens for request in shape.requests)
    assert steps["tokens"][~prefill].tolist() == steps["batch"][~prefill].tolist()


@all_systems
@some
@given(shape=shapes())
def test_time_bytes_and_memory_add_up(system: str, shape: Shape) -> None:
    inputs = shape.cell(system)
    plan, outcome = plan_cell(inputs), serve(inputs)
    steps, counters = outcome.iterations.table(), outcome.counters
    # Time: iterations follow one another, and consist of nothing but computation and waiting.
    assert (steps["end_s"][:-1] <= steps["start_s"][1:]).all()
    assert (np.diff(decisions_of(outcome)["time_s"].to_numpy()) >= 0.0).all()
    assert steps["end_s"][-1] == outcome.simulated_s
    parts = steps["compute_s"] + steps["stall_s"] + steps["search_wait_s"]
    np.testing.assert_allclose(parts, steps["end_s"] - steps["start_s"], rtol=1e-9, atol=1e-12)
    assert outcome.busy_s["compute"] == pytest.approx(steps["compute_s"].sum())
    assert outcome.busy_s["link"] <= outcome.simulated_s * shape.devices * (1 + 1e-9)
    assert outcome.busy_s.get("ssd", 0.0) <= outcome.simulated_s * (1 + 1e-9)
    # Experts: each activated one is a hit, late or a miss; the layers agree with the iterations.
    assert (steps["activated"] == steps["hits"] + steps["late"] + steps["misses"]).all()
    for name in ("activated", "hits", "late"):
        for place, phase in enumerate(("prefill", "decode")):
            assert outcome.per_layer[name][place].sum() == steps[name][steps["phase"] == phase].sum()
    # Bytes: whole experts, prefetches that were dropped half-way apart.
    expert_bytes = plan.expert_bytes
    moved = counters["demand_bytes"] + counters["prefetch_bytes"]
    assert counters["bytes_moved"] == moved == bytes_of(decisions_of(outcome))
    assert steps["demand_bytes"].sum() == counters["demand_bytes"]
    loads = (counters["demand_loads"] + counters["prefetch_loads"]) * expert_bytes
    assert moved >= loads
    if not counters["preemptions"]:
        assert moved == loads
    assert counters["useful_bytes"] + counters["wasted_bytes"] <= counters["prefetch_bytes"]
    # Host memory: every load asks it once, and what is on the SSD is read at most once for each.
    if shape.host_slots is not None and shape.host_slots < shape.layers * shape.experts:
        begun = decisions_of(outcome)["kind"].to_pylist().count("Load")
        assert counters["host_hits"] + counters["host_misses"] == begun
        assert counters["ssd_bytes"] <= counters["host_misses"] * expert_bytes
    else:
        assert "ssd" not in outcome.busy_s
    # Memory: by purpose within what the devices have.
    shares = plan.devices
    assert outcome.memory_bytes["expert_slots"] == plan.slots * expert_bytes
    assert 0 < outcome.memory_bytes["kv_cache"] <= plan.kv_budget_bytes
    assert sum(outcome.memory_bytes.values()) <= sum(share.capacity_bytes for share in shares)
    for share in shares:
        used = share.reserve_bytes + share.dense_bytes + share.expert_slot_bytes + share.kv_bytes
        assert used <= share.capacity_bytes


@all_systems
@some
@given(shape=shapes())
def test_the_same_inputs_give_the_same_run(system: str, shape: Shape) -> None:
    one, other = serve(shape.cell(system)), serve(shape.cell(system))
    assert decisions_of(one).equals(decisions_of(other), check_metadata=True)
    assert one.requests.table().tobytes() == other.requests.table().tobytes()
    assert one.iterations.table().tobytes() == other.iterations.table().tobytes()
    assert (one.counters, one.memory_bytes, one.busy_s) == (other.counters, other.memory_bytes, other.busy_s)


@pytest.mark.parametrize("system", [name for name, row in SYSTEMS.items() if row.predictor != "oracle"])
@some
@given(shape=shapes(), data=st.data())
def test_no_system_but_the_oracle_knows_the_future(system: str, shape: Shape, data: st.DataObject) -> None:
    """Routing that differs from some iteration of a request on changes nothing before that iteration."""
    inputs = shape.cell(system)
    request = data.draw(st.sampled_from(shape.requests))
    first = data.draw(st.integers(0, request.output_tokens - 1))
    one, other = serve(inputs), serve(with_another_future(inputs, request.index, first))
    before, after = decisions_of(one), decisions_of(other)
    rows, changed = before.to_pylist(), after.to_pylist()
    place = next((i for i, (a, b) in enumerate(zip(rows, changed, strict=False)) if a != b), None)
    assert place is not None, "the changed routing left no trace at all"
    # What differs first is what the world says, not what the core answers: the embedding or a gate of it.
    assert rows[place]["kind"] in ("begin_iteration", "gate")
    begun = [row for row in rows[: place + 1] if row["kind"] == "begin_iteration"]
    assert request.index in begun[-1]["requests"]
    assert sum(request.index in row["requests"] for row in begun) == first + 1


def test_the_oracle_knows_the_future_of_running_requests() -> None:
    model = small_model(2, 4, 1)
    requests = [Request(0, 0.0, 3, 4)]
    inputs = cell("oracle", model, small_machine(), MadeRouting(model), requests, slots=4, settings={})
    one, other = serve(inputs), serve(with_another_future(inputs, 0, 3))
    told, changed = (
        [row for row in decisions_of(outcome).to_pylist() if row["kind"] == "foresight"]
        for outcome in (one, other)
    )
    assert told[0] == changed[0]  # the prefill
    assert told[1] != changed[1]  # the decode iterations, before the prefill has begun
    assert told[1]["iteration"] == -1


def bytes_of(decisions: pa.Table) -> int:
    """What the links moved, by the events: the bytes of each load that ended, and of each up to its pause."""
    moved = 0
    loads: dict[int, dict[str, int]] = {}
    for row in decisions.to_pylist():
        if row["kind"] == "Load":
            loads[row["expert"]] = row
        elif row["kind"] == "loaded":
            moved += loads.pop(row["expert"])["bytes"]
        elif row["kind"] == "paused":
            moved += row["bytes"] - loads.pop(row["expert"])["offset"]
    return moved


def with_another_future(inputs: CellInputs, request: int, first: int) -> CellInputs:
    """The same cell, but iteration `first` of a request and those after it are routed otherwise."""
    routings = []
    for served in inputs.requests:
        distances = inputs.routing.meta.speculation
        lengths = served.prompt_tokens, served.output_tokens
        routing = inputs.routing.routing_for(served.index, *lengths, distances)
        if served.index == request:
            model = inputs.model
            other = MadeRouting(model, embedding_width=inputs.routing.meta.embedding_width, seed=12345)
            routing = spliced(routing, other.routing_for(request, *lengths, distances), first)
        routings.append(routing)
    return replace(inputs, routing=ListedRouting(inputs.routing.meta, routings, inputs.routing))


def spliced(head: RequestRouting, tail: RequestRouting, first: int) -> RequestRouting:
    """Iterations before `first` of one, the others of the other."""
    cells = first * head.gate.shape[1]
    a, b = head.offsets[cells], tail.offsets[cells]
    return RequestRouting(
        gate=np.concatenate((head.gate[:first], tail.gate[first:])),
        experts=np.concatenate((head.experts[:a], tail.experts[b:])),
        token_counts=np.concatenate((head.token_counts[:a], tail.token_counts[b:])),
        offsets=np.concatenate((head.offsets[:cells], tail.offsets[cells:] - b + a)),
        embedding=None
        if head.embedding is None or tail.embedding is None
        else np.concatenate((head.embedding[:first], tail.embedding[first:])),
        speculation={
            distance: np.concatenate((rows[:first], tail.speculation[distance][first:]))
            for distance, rows in head.speculation.items()
        },
    )

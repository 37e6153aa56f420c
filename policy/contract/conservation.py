"""What no run may break, whatever its system: requests, tokens, time, links, bytes and memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from ...serving.outcome import CellOutcome
from ...serving.timeseries import time_series
from ...sim.cell import CellInputs, plan_cell

RELATIVE = 1e-9


def check_conservation(outcome: CellOutcome, inputs: CellInputs) -> None:
    """Raise AssertionError for whatever a finished run lost, made up or used twice.

    Links, slots and memory event by event need the whole decision log (`decisions = "all"`).
    """
    _check_requests(outcome, inputs)
    _check_time(outcome, inputs)
    _check_series(outcome, inputs)
    _check_totals(outcome, inputs)
    if outcome.decisions is not None and inputs.settings.decisions == "all":
        events = outcome.decisions.select(_EVENT_COLUMNS).to_pylist()
        _check_batches(events, outcome, inputs)
        _check_host_memory(events, outcome, inputs)
        _check_links(events, outcome, inputs)
        _check_memory(events, outcome, inputs)


_EVENT_COLUMNS = [
    "time_s",
    "kind",
    "expert",
    "device",
    "slot",
    "evicts",
    "offset",
    "bytes",
    "experts",
    "requests",
]
Event = dict[str, Any]


def _check_requests(outcome: CellOutcome, inputs: CellInputs) -> None:
    """Every request came out once, with its tokens, in order of its own times."""
    rows, steps = outcome.requests.table(), outcome.iterations.table()
    requests = {request.index: request for request in inputs.requests}
    assert sorted(rows["request"].tolist()) == sorted(requests)
    for row in rows:
        request = requests[int(row["request"])]
        assert row["prompt_tokens"] == request.prompt_tokens
        assert row["output_tokens"] == request.output_tokens
        assert inputs.settings.offline or row["arrival_s"] == request.arrival_s
        assert row["arrival_s"] <= row["admitted_s"] < row["first_token_s"] <= row["finished_s"]
    prefill = steps["phase"] == "prefill"
    assert steps["tokens"][prefill].sum() == rows["prompt_tokens"].sum()
    assert steps["batch"][prefill].sum() == len(rows)
    assert (steps["tokens"] == steps["batch"])[~prefill].all()
    assert steps["batch"].sum() == rows["output_tokens"].sum()
    activated = steps["hits"] + steps["late"] + steps["misses"]
    assert (activated == steps["activated"]).all()


def _check_time(outcome: CellOutcome, inputs: CellInputs) -> None:
    """Time goes forward, an iteration is computation and waiting, no link is busier than time allows."""
    steps = outcome.iterations.table()
    taken_s = steps["end_s"] - steps["start_s"]
    assert (taken_s > 0.0).all()
    assert (steps["start_s"][1:] >= steps["end_s"][:-1]).all()
    assert steps["end_s"][-1] == outcome.run_s
    parts = ("compute_s", "stall_s", "search_wait_s")
    assert all((steps[name] >= 0.0).all() for name in parts)
    # Besides, a moment is known to a rounding of itself.
    rounding_s = 64 * np.finfo(np.float64).eps * outcome.run_s
    np.testing.assert_allclose(sum(steps[name] for name in parts), taken_s, rtol=RELATIVE, atol=rounding_s)
    devices = inputs.profile.devices
    knots_s = np.ravel((steps["start_s"], steps["end_s"]), order="F")
    busy_s = np.ravel((steps["link_busy_start_s"], steps["link_busy_end_s"]), order="F")
    grown_s = np.diff(busy_s)
    assert (grown_s >= -rounding_s).all()
    assert (grown_s <= devices * np.diff(knots_s) + devices * rounding_s).all()
    if inputs.settings.warmup == 0:
        np.testing.assert_allclose(outcome.busy_s["link"], busy_s[-1] - busy_s[0], rtol=RELATIVE, atol=0)
        np.testing.assert_allclose(outcome.busy_s["compute"], steps["compute_s"].sum(), rtol=RELATIVE)
    moved = outcome.counters["demand_bytes"] + outcome.counters["prefetch_bytes"]
    assert outcome.counters["bytes_moved"] == moved


def _check_totals(outcome: CellOutcome, inputs: CellInputs) -> None:
    """Layers agree with iterations, bytes with whole experts, memory with what the devices have."""
    steps, counters, plan = outcome.iterations.table(), outcome.counters, plan_cell(inputs)
    for name in ("activated", "hits", "late"):
        for place, phase in enumerate(("prefill", "decode")):
            counted = outcome.per_layer[name][place].sum()
            of_phase = steps[name][steps["phase"] == phase].sum()
            assert counted == of_phase if inputs.settings.warmup == 0 else counted <= of_phase
    whole = (counters["demand_loads"] + counters["prefetch_loads"]) * plan.expert_bytes
    assert counters["bytes_moved"] >= whole
    assert counters["preemptions"] or inputs.settings.warmup or counters["bytes_moved"] == whole
    used_bytes = counters["useful_bytes"] + counters["wasted_bytes"]
    assert inputs.settings.warmup or used_bytes <= counters["prefetch_bytes"]
    memory = outcome.memory_bytes
    assert memory["expert_slots"] == plan.slots * plan.expert_bytes
    assert 0 < memory["kv_cache"] <= plan.kv_budget_bytes
    assert sum(memory.values()) <= sum(share.capacity_bytes for share in plan.devices)
    for share in plan.devices:
        used = share.reserve_bytes + share.dense_bytes + share.expert_slot_bytes + share.kv_bytes
        assert used <= share.capacity_bytes


def _check_batches(events: list[Event], outcome: CellOutcome, inputs: CellInputs) -> None:
    """Each request takes part in as many iterations as it has output tokens, with few enough others."""
    batches = [event["requests"] for event in events if event["kind"] == "begin_iteration"]
    assert outcome.iterations.table()["batch"].tolist() == [len(batch) for batch in batches]
    most = 1 if inputs.settings.offline else inputs.settings.max_num_seqs
    left = {request.index: request.output_tokens for request in inputs.requests}
    running: set[int] = set()
    for batch in batches:
        running |= set(batch)
        assert len(running) <= most
        for index in batch:
            left[index] -= 1
        running = {index for index in running if left[index]}
    assert not any(left.values())


def _check_host_memory(events: list[Event], outcome: CellOutcome, inputs: CellInputs) -> None:
    """Every load asks host memory once; what it does not hold is read at most once for each."""
    counters = outcome.counters
    if "host_misses" not in counters or inputs.settings.warmup:
        return
    loads = sum(event["kind"] == "Load" for event in events)
    assert counters["host_hits"] + counters["host_misses"] == loads
    assert counters["ssd_bytes"] <= counters["host_misses"] * plan_cell(inputs).expert_bytes
    assert outcome.busy_s["ssd"] <= outcome.run_s * (1 + RELATIVE)


def _check_series(outcome: CellOutcome, inputs: CellInputs) -> None:
    """The bins of the time series add up to the run."""
    rows, steps = outcome.requests.table(), outcome.iterations.table()
    series = time_series(
        outcome.requests,
        outcome.iterations,
        simulated_s=outcome.run_s,
        devices=inputs.profile.devices,
        hit_rate_defined=True,
    )
    columns = {name: series.column(name).to_numpy() for name in series.column_names if name != "hit_rate"}
    width_s = columns["width_s"]
    assert series.column("output_tokens").to_numpy().sum() == rows["output_tokens"].sum()

    def adds_up(name: str, total: float, scale: float = 1.0) -> None:
        found = float((columns[name] * width_s).sum() * scale)
        np.testing.assert_allclose(found, total, rtol=1e-9, atol=1e-9 * outcome.run_s, err_msg=name)

    adds_up("queue", float((rows["admitted_s"] - rows["arrival_s"]).sum()))
    adds_up("batch", float((rows["finished_s"] - rows["admitted_s"]).sum()))
    adds_up("compute_busy", float(steps["compute_s"].sum()))
    adds_up("stall", float(steps["stall_s"].sum()))
    adds_up("search_wait", float(steps["search_wait_s"].sum()))
    adds_up("link_busy", float(steps["link_busy_end_s"][-1]), inputs.profile.devices)
    np.testing.assert_allclose(columns["activated"].sum(), steps["activated"].sum(), rtol=1e-9)
    known = series.filter(series.column("hit_rate").is_valid())
    hits = (known.column("hit_rate").to_numpy() * known.column("activated").to_numpy()).sum()
    np.testing.assert_allclose(hits, steps["hits"].sum(), rtol=1e-9, atol=1e-9)
    for name in ("link_busy", "compute_busy", "stall", "search_wait"):
        assert ((columns[name] >= 0.0) & (columns[name] <= 1.0)).all()
    idle = columns["compute_busy"] + columns["stall"] + columns["search_wait"]
    assert (idle <= 1.0 + 1e-6).all()


def _check_links(events: list[Event], outcome: CellOutcome, inputs: CellInputs) -> None:
    """A device copies one expert at a time; the copies are the links' busy time and bytes."""
    loading: dict[int, Event] = {}  # by device
    copied, busy_s = 0, 0.0
    last_s = 0.0
    for event in events:
        kind, now = event["kind"], event["time_s"]
        assert now >= last_s
        last_s = now
        device = event["expert"] % inputs.profile.devices
        if kind == "Load":
            assert event["device"] == device
            assert device not in loading, "two loads in flight on one device"
            loading[device] = event
        elif kind in ("loaded", "paused", "load_failed"):
            load = loading.pop(device)
            assert load["expert"] == event["expert"]
            busy_s += now - load["time_s"]
            if kind == "loaded":
                copied += load["bytes"]
            elif kind == "paused":
                copied += event["bytes"] - load["offset"]
    assert copied >= outcome.counters["bytes_moved"]
    if inputs.settings.warmup == 0:  # of which the counters know nothing
        assert copied == outcome.counters["bytes_moved"]
    busy_s += sum(outcome.run_s - load["time_s"] for load in loading.values())
    assert busy_s <= inputs.profile.devices * outcome.run_s * (1 + RELATIVE)
    logged_s = float(outcome.iterations.table()["link_busy_end_s"][-1])
    if "ssd" in outcome.busy_s:  # a load may have waited for the SSD before its copy began
        assert logged_s <= busy_s * (1 + RELATIVE)
        assert outcome.busy_s["ssd"] <= outcome.run_s * (1 + RELATIVE)
    else:
        np.testing.assert_allclose(logged_s, busy_s, rtol=RELATIVE, atol=RELATIVE * outcome.run_s)


def _check_memory(events: list[Event], outcome: CellOutcome, inputs: CellInputs) -> None:
    """At every event each device holds what it has room for, and a slot holds one expert."""
    plan = plan_cell(inputs)
    devices = inputs.profile.devices
    slots: dict[int, dict[int, int]] = defaultdict(dict)  # device → slot → expert
    partial: set[int] = set()
    kv_times, kv_tokens = _kv_tokens(outcome)
    for event in events:
        kind, expert = event["kind"], event["expert"]
        device = expert % devices
        if kind == "preload":
            for one in event["experts"]:
                slots[one % devices][len(slots[one % devices])] = one
        elif kind == "Load":
            held = slots[device]
            if event["evicts"] >= 0:
                assert held[event["slot"]] == event["evicts"]
                del held[event["slot"]]
            for slot, other in [*held.items()]:
                if other == expert or (slot == event["slot"] and other in partial):
                    del held[slot]  # it moves, or a partial one is dropped for it
            assert event["slot"] not in held, "two experts in one slot"
            held[event["slot"]] = expert
            partial.discard(expert)
        elif kind == "paused":
            partial.add(expert)
        elif kind == "load_failed":
            slots[device] = {slot: other for slot, other in slots[device].items() if other != expert}
        running = int(kv_tokens[np.searchsorted(kv_times, event["time_s"], side="right")])
        for place, share in enumerate(plan.devices):
            kv = running * plan.kv_bytes_per_token if place == 0 and not plan.replicated else 0
            used = share.reserve_bytes + share.dense_bytes + len(slots[place]) * plan.expert_bytes + kv
            assert used <= share.capacity_bytes
            assert len(slots[place]) * plan.expert_bytes <= share.expert_slot_bytes
    assert kv_tokens.max() * plan.kv_bytes_per_token == outcome.memory_bytes["kv_cache"]
    assert outcome.memory_bytes["kv_cache"] <= plan.kv_budget_bytes


def _kv_tokens(outcome: CellOutcome) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Moments at which KV cache is reserved or freed, and the tokens reserved before and after each."""
    rows = outcome.requests.table()
    tokens = rows["prompt_tokens"] + rows["output_tokens"]
    times_s = np.concatenate([rows["admitted_s"], rows["finished_s"]])
    changes = np.concatenate([tokens, -tokens])
    order = np.lexsort((changes, times_s))  # at one moment, what ends makes room first
    return times_s[order], np.concatenate([[0], np.cumsum(changes[order])])

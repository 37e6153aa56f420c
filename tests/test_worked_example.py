"""docs/worked-example.md is what the simulator does: inputs, tables and equations are read from the page.

The simulated world gives events and commands; the plain-Python core, fed the same events, must give the same
commands, and gives what the page says of scores, δ sets, priorities and victims.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import page_traces
import pytest
from finemoe.serving.outcome import CellOutcome
from finemoe.sim.cell import CellInputs, cell_options, plan_cell
from finemoe.traces.requests import Request
from reference_core import ReferenceCore
from reference_formulas import delta_of, delta_set, finemoe_key, inverse_norms, running_sums, semantic_scores
from reference_predictions import Row, Work
from reference_state import Command, Config
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

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "worked-example.md").read_text(encoding="utf-8")
Table = list[list[str]]

LOG = ("ms", "event or command", "why")
SEARCHES = ("search", "score of each map", "map", "δ", "its p of the target layer", "experts of the δ set")
QUEUE = ("ms", "queued", "p", "l − l_now", "priority")
VICTIMS = ("ms", "resident", "p", "freq", "p · freq", "layers ahead", "")
REDUNDANCY = ("map", "semantic", "trajectory", "RDY")
ITERATIONS = ("iteration", "activated", "hits", "late", "misses", "stall ms", "compute ms", "whole ms")
COUNTERS = ("counter", "value")


def table(header: tuple[str, ...]) -> Table:
    """The rows of all the page's tables with that header, in order."""
    return page_traces.table(PAGE, header)


@cache
def inputs() -> CellInputs:
    """The page's first code block."""
    block = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    page = tomllib.loads(block[1])
    model = msgspec.structs.replace(small_model(2, 4, 1), kv_bytes_per_token=2, **page["model"])
    # What the page leaves out costs nothing: launches, operations, KV (2 ns a token).
    machine = small_machine(kernel_launch_s=0.0, peak_flops=1e18, **page["machine"])
    iterations = page["iteration"]
    routing = routing_of(
        np.array([iteration["gate"] for iteration in iterations], np.float16),
        [np.array(counts) for counts in iterations[0]["prompt_tokens_of_experts"]],
        model.top_k,
        np.array([iteration["embedding"] for iteration in iterations], np.float16),
    )
    source = ListedRouting(MadeRouting(model, embedding_width=2).meta, [routing])
    prompt_tokens = sum(iterations[0]["prompt_tokens_of_experts"][0])
    requests = [Request(0, 0.0, prompt_tokens, len(iterations))]
    return cell(
        "finemoe", model, machine, source, requests, slots=page["cache"]["slots"], settings=page["settings"]
    )


@cache
def world() -> CellOutcome:
    """What the page tells of."""
    return serve(inputs())


def decisions() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = decisions_of(world()).to_pylist()
    return rows


class Notes(ReferenceCore):
    """The plain-Python core, taking down what the page's tables show."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.ms = ""
        self.searches: Table = []
        self.queue: Table = []
        self.victims: Table = []

    def _take_search(self, work: Work, targets: list[int]) -> None:
        if work.kind == "semantic":
            assert work.embeddings[0] is not None
            scores = semantic_scores(self.store.embeddings, work.embeddings[0])
        else:
            rows = work.rows[0]
            stored = np.array([inverse_norms(m)[len(rows) - 1] for m in self.store.maps])
            scores = running_sums(self.store.maps, rows) * stored * inverse_norms(rows)[-1]
        best, (target,) = int(scores.argmax()), targets
        p, delta = self.store.maps[best, target], delta_of(float(scores[best]))
        chosen = [target * self.config.experts + j for j in delta_set(p, delta, self.config.top_k)]
        self.searches.append(
            [f"#{work.ticket}", listed(scores), str(best), number(delta), listed(p), listed(chosen)]
        )
        super()._take_search(work, targets)

    def queue_choice(self, device: int) -> int | None:
        for e in sorted(self.queues[device]):
            p, ahead = self.states[e].p, self.layer_of(e) - self.l_now
            self.queue.append([self.ms, str(e), number(p), str(ahead), number(p / ahead)])
        return super().queue_choice(device)

    def evict(self, expert: int) -> None:
        config = self.config
        for e in sorted(self.slots[0]):
            state = self.states[e]
            if state.status == "resident" and not state.pinned:
                key = finemoe_key(state.p, state.freq, self.layer_of(e), self.l_now, config.layers, e)
                verdict = "evicted" if e == expert else ""
                self.victims.append(
                    [
                        self.ms,
                        str(e),
                        number(state.p),
                        number(state.freq),
                        number(key[0]),
                        str(-key[2]),
                        verdict,
                    ]
                )
        super().evict(expert)


@cache
def played() -> tuple[Notes, list[list[str]]]:
    """The log's events in the plain-Python core, and its commands, one list per event."""
    options = cell_options(inputs(), plan_cell(inputs()))
    config = Config(**{field.name: options[field.name] for field in fields(Config)})  # type: ignore[arg-type]
    core, commands = Notes(config), []
    for row in decisions():
        if not row["kind"][0].isupper():
            core.ms = milliseconds(row["time_s"])
            commands.append([command_text(command) for command in play(core, row)])
    return core, commands


def play(core: ReferenceCore, row: dict[str, Any]) -> list[Command]:
    match row["kind"]:
        case "begin_iteration":
            phase = ("prefill", "decode")[row["phases"][0] & 1]
            embedding = np.array(row["values"], np.float32)
            return core.begin_iteration([Row(row["requests"][0], phase, row["tokens"][0], embedding)])
        case "gate":
            probabilities = np.array(row["values"], np.float32)[None]
            return core.gate(row["layer"], probabilities, row["experts"], row["token_counts"])
        case "search_done":
            return core.search_done(row["ticket"])
        case "loaded":
            return core.loaded(row["expert"])
        case "paused":
            return core.paused(row["expert"], row["bytes"])
        case "computed":
            return core.computed(row["layer"], row["experts"])
        case "end_iteration":
            return core.end_iteration()
    raise AssertionError(f"no {row['kind']} in the example")


def event_text(row: dict[str, Any]) -> str:
    """An event as the page writes it."""
    match row["kind"]:
        case "gate":
            ids = [row["layer"] * 4 + j for j in row["experts"]]
            return f"gate of layer {row['layer']} requires {listed(ids)}"
        case "search_done":
            return f"search_done #{row['ticket']}"
        case "paused":
            return f"paused {row['expert']} at {row['bytes']:,} bytes"
        case "loaded":
            return f"loaded {row['expert']}"
        case "computed":
            return f"computed {listed(row['experts'])}"
    return str(row["kind"])


def command_text(command: Command) -> str:
    """A command as the page writes it; it is a tuple as in docs/core.md."""
    match command:
        case ("Load", expert, _, slot, _, _, kind, evicts):
            return f"Load {kind} {expert} into slot {slot}" + (f", evicts {evicts}" if evicts >= 0 else "")
        case ("Wait", experts):
            return f"Wait for {listed(experts)}"
        case ("Search", ticket, "update", _, _, work, _):
            return f"Search #{ticket} update, {work} values"
        case ("Search", ticket, kind, _, target, work, _):
            return f"Search #{ticket} {kind} for layer {target}, {work} values"
    return str(command[0])


def logged_text(row: dict[str, Any]) -> str:
    """A row of the decision log as the page writes it."""
    fields_of = {
        "Load": ("kind", "expert", "device", "slot", "offset", "bytes", "sub_kind", "evicts"),
        "Wait": ("kind", "experts"),
        "Search": ("kind", "ticket", "sub_kind", "layer", "target", "work", "blocking"),
        "PreemptPrefetch": ("kind", "device"),
    }
    if row["kind"] not in fields_of:
        return event_text(row)
    return command_text(tuple(row[name] for name in fields_of[row["kind"]]))


def number(value: float) -> str:
    return f"{value:.4g}"


def listed(values: Any) -> str:
    return ", ".join(number(float(value)) for value in values)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def test_events_and_commands_are_the_pages() -> None:
    rows = [[milliseconds(row["time_s"]), logged_text(row)] for row in decisions()]
    assert [cells[:2] for cells in table(LOG)] == rows


def test_the_plain_python_core_gives_the_same_commands() -> None:
    expected: list[list[str]] = []
    for row in decisions():
        if row["kind"][0].isupper():
            expected[-1].append(logged_text(row))
        else:
            expected.append([])
    assert played()[1] == expected


def test_scores_priorities_and_victims_are_the_pages() -> None:
    core = played()[0]
    assert table(SEARCHES) == core.searches
    assert table(QUEUE) == core.queue
    assert table(VICTIMS) == core.victims


def test_the_replaced_map_is_the_pages() -> None:
    core = played()[0]
    (update,) = core.pending  # issued at the very end
    rows, embedding = update.rows[0], update.embeddings[0]
    assert embedding is not None
    semantic = semantic_scores(core.store.embeddings, embedding)
    stored = np.array([inverse_norms(m)[-1] for m in core.store.maps])
    trajectory = running_sums(core.store.maps, rows) * stored * inverse_norms(rows)[-1]
    redundancy = core.store.redundancies(rows, embedding, core.config.prefetch_distance)
    assert table(REDUNDANCY) == [
        [str(place), *(number(float(column[place])) for column in (semantic, trajectory, redundancy))]
        for place in range(2)
    ]
    core.search_done(update.ticket)
    assert core.store.written.tolist() == [2, 1]  # the newest map is in place 0
    assert (core.store.maps[0] == rows).all()


def test_the_outcome_is_the_pages() -> None:
    outcome = world()
    assert table(ITERATIONS) == [
        [
            str(place),
            *(str(row[name]) for name in ("activated", "hits", "late", "misses")),
            *(milliseconds(s) for s in (row["stall_s"], row["compute_s"], row["end_s"] - row["start_s"])),
        ]
        for place, row in enumerate(outcome.iterations.table())
    ]
    counters = dict(table(COUNTERS))
    assert counters == {name: f"{outcome.counters[name]:,}" for name in counters}
    assert len(counters) >= 8


def test_a_copy_slows_the_computation_that_begins_beside_it() -> None:
    """The page's example on a machine that computes half as fast while it copies.

    Iteration 0 copies only while it waits. In iteration 1 the prefetch of expert 5 is in flight when the
    computation of expert 2 begins (2 ms, at 32.75) and when layer 1 does (4 ms), and no copy for the rest.
    """
    slow = msgspec.structs.replace(inputs().profile, copy_slowdown=2.0)
    steps = serve(replace(inputs(), profile=slow)).iterations.table()
    assert steps["compute_s"][:2].tolist() == pytest.approx([9e-3, (2 + 2 + 4 + 1 + 1) * 1e-3], abs=1e-6)


def equations() -> list[str]:
    """Every `a = b = …` of the page's text and tables."""
    text = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    return [code for code in re.findall(r"`([^`]+)`", text) if " = " in code]


@pytest.mark.parametrize("equation", equations())
def test_every_equation_holds(equation: str) -> None:
    spelled = equation.replace("·", "*").replace("−", "-").replace("√", "sqrt").replace("²", "**2")
    assert re.fullmatch(r"(?:[0-9.+\-*/() =]|sqrt)+", spelled), "only numbers, please"
    values = [eval(side, {"sqrt": math.sqrt, "__builtins__": {}}) for side in spelled.split("=")]
    assert all(value == pytest.approx(values[0], abs=6e-4) for value in values)

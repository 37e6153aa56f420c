"""Traces that pages of docs/systems write out: sizes in a TOML block, then a table of events and commands.

A row's events are separated by semicolons, as its commands are; see `Player` for what an event may be.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from core_walk import Core
from finemoe.policy.core import core_options, popular_experts
from finemoe.policy.systems import find_system
from reference_core import ReferenceCore
from reference_predictions import Row
from reference_state import Command, Config

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "systems"
HEADER = ("event", "hits, late, misses", "commands", "why")
SIZES = {
    "devices": 1,
    "expert_bytes": 100,
    "prefetch_distance": 1,
    "store_capacity": 2,
    "embedding_width": 0,
    "embedding_work": 0,
}


@dataclass(frozen=True)
class Trace:
    """One table of a page with the block of sizes before it; `inputs` is what the core is not told of there."""

    page: str
    system: str
    sizes: dict[str, Any]
    inputs: dict[str, Any]
    rows: list[list[str]]

    def __str__(self) -> str:
        return f"{self.page}: {self.system}"

    def config(self) -> Config:
        """The system's own, as the simulator would configure it."""
        options = core_options(find_system(self.system), **(SIZES | self.sizes))
        return Config(**{field.name: options[field.name] for field in fields(Config)})  # type: ignore[arg-type]


def traces() -> list[Trace]:
    """All traces of all pages, one per system that the block names."""
    return [trace for path in sorted(PAGES.glob("*.md")) for trace in _traces_of(path)]


def _traces_of(path: Path) -> list[Trace]:
    found, block = [], ""
    parts = re.split(r"```toml\n(.*?)```", path.read_text("utf-8"), flags=re.DOTALL)
    for number, part in enumerate(parts):
        if number % 2:
            block = part
            continue
        rows = table(part, HEADER)
        if not rows:
            continue
        given = tomllib.loads(block)
        names = given.pop("system")
        inputs = {name: given.pop(name) for name in ("store", "popularity") if name in given}
        found += [Trace(path.stem, name, given, inputs, rows) for name in names]
    return found


def table(text: str, header: Sequence[str]) -> list[list[str]]:
    """The rows of all tables with that header, in order."""
    rows, inside = [], False
    for line in text.splitlines():
        cells = [part.strip() for part in line.strip("|").split("|")] if line.startswith("|") else []
        if tuple(cells) == tuple(header):
            inside = True
        elif not cells:
            inside = False
        elif inside and not set("".join(cells)) <= set("-: "):
            rows.append(cells)
    return rows


def equations(text: str) -> list[str]:
    """Every `a = b = …` in the text and its tables."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [code for code in re.findall(r"`([^`]+)`", text) if re.fullmatch(r"[-0-9.+·−√²*/() =]+ = .*", code)]


def sides(equation: str) -> list[float]:
    """What the sides of an equation come to."""
    spelled = equation.replace("·", "*").replace("−", "-").replace("√", "sqrt").replace("²", "**2")
    assert re.fullmatch(r"(?:[0-9.+\-*/() =e]|sqrt)+", spelled), "only numbers, please"
    return [eval(side, {"sqrt": math.sqrt, "__builtins__": {}}) for side in spelled.split("=")]


class Player:
    """Plays a trace's events into a core and says what came of each row."""

    def __init__(self, trace: Trace, core: Core) -> None:
        self.core = core
        self.config = trace.config()
        self.inputs = trace.inputs
        self.requests = [0]
        self.layer = -1
        if "store" in trace.inputs:
            store = trace.inputs["store"]
            embeddings = np.array([entry.get("embedding", []) for entry in store])
            core.seed_store([entry["map"] for entry in store], embeddings, range(1, len(store) + 1))

    def row(self, events: str) -> tuple[str, str]:
        """Hits, late and misses of the row's gate, and the commands, both as a page writes them."""
        before = self._totals()
        commands = [command_text(c) for event in events.split("; ") for c in self.event(event)]
        counts = [now - then for now, then in zip(self._totals(), before, strict=True)]
        return ", ".join(map(str, counts)) if sum(counts) else "", "; ".join(commands)

    def event(self, text: str) -> list[Command]:
        """One event: what it may be, and how it is written."""
        plain, core = re.sub(r"\([^)]*\)", "", text), self.core
        inside = re.search(r"\(([^)]*)\)", text)
        values = [float(value) for value in inside[1].split(",")] if inside else []
        whole = [int(n) for n in re.findall(r"\d+", plain)]
        match plain.partition(" ")[0].strip(":,"):
            case "preload":
                if "popularity" in self.inputs:
                    assert whole == self._popular()
                return core.preload(whole)  # type: ignore[attr-defined,no-any-return]
            case "foresight":
                steps = plain.partition(":")[2].split(",")
                return core.foresight(whole[0], [[int(e) for e in step.split("+")] for step in steps])
            case "begin":  # begin 0: prefill of 4 tokens (embedding)
                self.layer = -1
                self.requests = whole[:1]
                phase, tokens = ("prefill", whole[1]) if "prefill" in plain else ("decode", 1)
                embedding = np.array(values, np.float32) if values else None
                return core.begin_iteration([Row(self.requests[0], phase, tokens, embedding)])
            case "gate":  # gate: 0 ×3, 2 (p of each expert)
                return self._gate(plain, values)
            case "speculation":  # speculation on layer 2 (p of each expert)
                return core.speculation(self.layer, whole[0], [values])
            case "search_done":
                return core.search_done(whole[0])
            case "loaded":
                return core.loaded(whole[0])
            case "paused":
                return core.paused(*whole)
            case "computed":
                return core.computed(self.layer, whole)
            case "end":  # end; end, 0 finished
                return core.end_iteration(whole)
        raise AssertionError(f"no event: {text}")

    def _gate(self, plain: str, values: list[float]) -> list[Command]:
        self.layer += 1
        config, counts = self.config, np.zeros(self.config.experts, np.int32)
        for part in plain.partition(":")[2].split(","):
            expert, _, tokens = part.partition("×")
            counts[int(expert) - self.layer * config.experts] = int(tokens or 1)
        rows = [values or [1.0 / config.experts] * config.experts]
        experts = np.flatnonzero(counts)
        row_counts = counts[None] if config.counts_rows else None
        return self.core.gate(self.layer, rows, experts.tolist(), counts[experts].tolist(), row_counts)

    def _popular(self) -> list[int]:
        counts = np.array(self.inputs["popularity"], np.int64)
        config = self.config
        return popular_experts(counts, devices=1, slots_per_device=config.slots(0), top_k=config.top_k)

    def _totals(self) -> list[int]:
        values = self.core.counter_values()
        return [int(np.sum(values[name])) for name in ("hits", "late", "misses")]


def command_text(command: Command) -> str:
    """A command as the pages write it; it is a tuple as in docs/core.md."""
    match command:
        case ("Load", expert, _, slot, offset, _, kind, evicts):
            start = f" from byte {offset}" if offset else ""
            return f"Load {kind} {expert} into slot {slot}{start}" + (f" evicts {evicts}" if evicts >= 0 else "")
        case ("Wait", experts):
            return f"Wait {', '.join(map(str, experts))}"
        case ("Search", ticket, "update", _, _, work, _):
            return f"Search #{ticket} update of {work} values"
        case ("Search", ticket, kind, _, target, work, _):
            return f"Search #{ticket} {kind} for layer {target} of {work} values"
        case ("WaitSearch", ticket):
            return f"WaitSearch #{ticket}"
    return str(command[0])


#: What a row may ask of the plain-Python core in place of an event.
QUESTIONS: dict[str, Callable[[ReferenceCore, int], float]] = {
    "p": lambda core, e: core.states[e].p,
    "freq": lambda core, e: core.states[e].freq,
    "stamp": lambda core, e: core.states[e].stamp,
    "key": lambda core, e: core.eviction_key(e)[0],
    "next use": lambda core, e: core.next_use(e),
    "privileged": lambda core, e: core.states[e].privileged,
    "spare": lambda core, e: core.states[e].spare,
    "unused": lambda core, e: core.states[e].unused,
    "priority": lambda core, e: core._priority(e)[0],
}


def question_of(event: str) -> tuple[str, list[int]] | None:
    """`key of 0, 3`: what is asked, and of which experts; None for an event."""
    match = re.fullmatch(rf"({'|'.join(QUESTIONS)}) of ([0-9, ]+)", event)
    return None if match is None else (match[1], [int(e) for e in match[2].split(",")])

"""Replay route CSVs at the size of the cache that was recorded, against the hits that were recorded.

The size is not in the files. It is found: the sizes in bytes at which the engine's own rule, played here in
plain Python, gives exactly the recorded number of hits. Then the policy core plays the same routing at that
size, demand only, every load done at once.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from finemoe.policy.core import MORE_CHUNKS, Core, Feed, core_options, make_config
from finemoe.policy.systems import SYSTEMS
from finemoe.traces.route_csv import PREFILL, RouteTrace, read_route_csv
from finemoe.traces.route_import import import_route_csv
from finemoe.traces.routing import RequestRouting
from finemoe.traces.routing_file import RoutingFile

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("qwen", "gemma", "gptoss")
MIB = 2**20
ROUND_BYTES = 100 * MIB  # people give cache sizes in round figures


@dataclass(frozen=True)
class Event:
    """One gate: a layer of the prompt, or of one decoded token. Experts are ids layer·J + j.

    uses: as the file lists them, token by token; recorded: those that the engine had in its cache.
    """

    prefill: bool
    uses: tuple[int, ...]
    recorded: frozenset[int]

    @property
    def lookups(self) -> frozenset[int]:
        """What the gate requires: each expert once."""
        return frozenset(self.uses)


Hits = list[frozenset[int]]  # per event


def events_of(trace: RouteTrace) -> list[Event]:
    """The gates of a trace with one turn, in the order in which they were played."""
    ids = trace.expert + trace.layer[:, None] * trace.experts
    prefill = trace.phase == PREFILL
    begins = np.flatnonzero(~prefill | (np.diff(trace.layer, prepend=-1) != 0))
    events = []
    for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
        hits = ids[begin:end][trace.residency[begin:end] > 0].tolist()
        events.append(Event(bool(prefill[begin]), tuple(ids[begin:end].ravel().tolist()), frozenset(hits)))
    return events


def in_bytes(
    events: Sequence[Event], sizes: Sequence[int], capacity: int, *, by_id: bool = False, pin: bool = True
) -> tuple[Hits, list[int]]:
    """LRU over all layers, in bytes (`sizes`: of each expert id): hits of each event, experts held after it.

    An event's experts are touched in the file's order, or by ascending id. `pin`: none of them is evicted
    meanwhile, so that all are looked up against one state of the cache.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    used, hits, held = 0, [], []
    for event in events:
        required, missed = event.lookups, set()
        for expert in sorted(required) if by_id else event.uses:
            if expert in cache:
                cache.move_to_end(expert)
                continue
            missed.add(expert)
            while used + sizes[expert] > capacity:
                victim = next(e for e in cache if not (pin and e in required))
                del cache[victim]
                used -= sizes[victim]
            cache[expert] = None
            used += sizes[expert]
        hits.append(required - missed)
        held.append(len(cache))
    return hits, held


def recorded_bytes(events: Sequence[Event], sizes: Sequence[int]) -> tuple[int, int]:
    """The smallest and the largest cache that hits as often as the engine did (more cache, more hits)."""
    goal = sum(len(event.recorded) for event in events)

    def first(least: int) -> int:
        """The smallest size with at least `least` hits."""
        low, high = max(sizes) * max(len(event.lookups) for event in events), sum(sizes)
        while low < high:
            middle = (low + high) // 2
            if sum(map(len, in_bytes(events, sizes, middle)[0])) >= least:
                high = middle
            else:
                low = middle + 1
        return low

    return first(goal), first(goal + 1) - 1


def make_core(
    system: str, layers: int, experts: int, top_k: int, slots: int, frequency: Literal["run", "residency"]
) -> Core:
    """A core of one device with experts of one byte."""
    options = core_options(
        SYSTEMS[system],
        layers=layers,
        experts=experts,
        top_k=top_k,
        devices=1,
        slots_per_device=slots,
        expert_bytes=1,
        prefetch_distance=1,
        store_capacity=1,
        embedding_width=0,
        embedding_work=0,
        frequency=frequency,
    )
    return Core(make_config(options))


def carry_out(core: Core, mask: int = MORE_CHUNKS) -> Iterator[int]:
    """Do a gate's loads at once, chunk by chunk, and yield them."""
    while mask & MORE_CHUNKS:
        while loads := core.take_device(0):
            for load in loads:
                core.loaded(load[1])
                yield load[1]
        mask = core.computed_chunk()


def in_core(
    events: Sequence[Event],
    routing: RequestRouting,
    system: str,
    slots: int,
    top_k: int,
    frequency: Literal["run", "residency"] = "run",
) -> Hits:
    """The policy core, fed as the simulator feeds it: a gate's experts are one lookup."""
    _, layers, experts = routing.gate.shape
    core = make_core(system, layers, experts, top_k, slots, frequency)
    feed = Feed(layers, experts, 0)
    feed.add(0, routing.gate, routing.experts, routing.token_counts, routing.offsets, None)
    hits, tokens = [], routing.tokens(top_k).tolist()
    for place, event in enumerate(events):
        iteration, layer = divmod(place, layers)
        if layer == 0:
            feed.select([0], [iteration], tokens[iteration : iteration + 1], iteration == 0)
            feed.begin_iteration(core)
        feed.gate(core, layer)
        missed = frozenset(carry_out(core))
        if layer == layers - 1:
            core.end_iteration()
        hits.append(event.lookups - missed)
    if sum(map(len, hits)) != core.totals()[1]:
        raise SystemExit("the file's gates are not in the order prefill, then token by token, layer by layer")
    return hits


def one_by_one(events: Sequence[Event], experts: int, system: str, slots: int) -> Hits:
    """The policy core, each expert a gate of its own, in the file's order (of a prompt: that of last use)."""
    core = make_core(system, 1, experts, 1, slots, "run")
    row, hits = np.zeros((1, experts), np.float16), []
    for event in events:
        missed: set[int] = set()
        for expert in reversed(dict.fromkeys(reversed(event.uses))):
            core.begin_iteration([(0, "decode", 1, False)])
            core.gate(0, row, [expert], [1])
            missed.update(carry_out(core))
            core.end_iteration()
        hits.append(event.lookups - missed)
    return hits


def replays(trace: RouteTrace, routing: RequestRouting, capacity: int) -> dict[str, Hits]:
    """Every replay of the table at `capacity` bytes."""
    events, top_k = events_of(trace), trace.top_k
    sizes = np.repeat(trace.expert_bytes, trace.experts).tolist()
    engine, held = in_bytes(events, sizes, capacity)
    slots = capacity * trace.layers // int(trace.expert_bytes.sum())
    fewest = capacity // max(sizes)
    average = round(float(np.mean(held[-sum(not event.prefill for event in events) :])))
    return {
        "recorded": [event.recorded for event in events],
        "LRU in bytes, a gate's experts in order of weight": engine,
        "the same, one by one": in_bytes(events, sizes, capacity, pin=False)[0],
        "LRU in bytes, a gate's experts by id": in_bytes(events, sizes, capacity, by_id=True)[0],
        f"LRU, {slots:,} slots, in order of weight": in_bytes(events, [1] * len(sizes), slots)[0],
        f"core, lru, {slots:,} slots": in_core(events, routing, "lru", slots, top_k),
        f"core, lru, {slots:,} slots, one by one": one_by_one(events, len(sizes), "lru", slots),
        f"core, lru, {average:,} slots (held on average)": in_core(events, routing, "lru", average, top_k),
        f"core, lru, {fewest:,} slots (of the largest)": in_core(events, routing, "lru", fewest, top_k),
        f"core, lfu, {slots:,} slots": in_core(events, routing, "lfu", slots, top_k),
        f"core, lfu, {slots:,} slots, one by one": one_by_one(events, len(sizes), "lfu", slots),
        "core, lfu, frequency = residency": in_core(events, routing, "lfu", slots, top_k, "residency"),
    }


def rates(events: Sequence[Event], hits: Hits) -> tuple[float, float, float, int]:
    """Hit rate of prefill, decode and both, and decode lookups whose outcome is the recorded one."""
    shares = []
    for phases in ((True,), (False,), (True, False)):
        picked = [(e, h) for e, h in zip(events, hits, strict=True) if e.prefill in phases]
        shares.append(sum(len(h) for _, h in picked) / sum(len(e.lookups) for e, _ in picked))
    decode = [(e, h) for e, h in zip(events, hits, strict=True) if not e.prefill]
    alike = sum(len(e.lookups) - len(e.recorded ^ h) for e, h in decode)
    return shares[0], shares[1], shares[2], alike


def report(name: str, path: Path, folder: Path) -> None:
    """Print the table of one file."""
    trace = read_route_csv(path)
    import_route_csv(path, folder / "routing.parquet")
    routing = RoutingFile(folder / "routing.parquet").recorded(0)
    events, mean = events_of(trace), trace.expert_bytes.mean()
    low, high = recorded_bytes(events, np.repeat(trace.expert_bytes, trace.experts).tolist())
    capacity = max(low, high // ROUND_BYTES * ROUND_BYTES)
    lookups = sum(len(event.lookups) for event in events if not event.prefill)
    print(
        f"\n{name}: {trace.model}, {trace.layers} layers x {trace.experts} experts, top-{trace.top_k}; ",
        end="",
    )
    print(f"{trace.expert_bytes.min():,} to {trace.expert_bytes.max():,} bytes per expert, mean {mean:,.0f}.")
    print(f"Caches of {low:,} to {high:,} bytes ({low / MIB:.2f} to {high / MIB:.2f} MiB) hit as often")
    print(f"as the record; taken: {capacity / MIB:,.0f} MiB.\n")
    print("| replay | prefill | decode | all | decode lookups as recorded |\n|---|---|---|---|---|")
    for label, hits in replays(trace, routing, capacity).items():
        prefill, decoded, both, alike = rates(events, hits)
        share = f"{alike:,} of {lookups:,} ({alike / lookups:.2%})"
        print(f"| {label} | {prefill:.4f} | {decoded:.4f} | {both:.4f} | {share} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    shared = Path(os.environ.get("FINEMOE_SHARED_DATA") or ROOT.parent / "shared" / "data")
    parser.add_argument("--data", type=Path, default=shared / "routing", help="folder of the route CSVs")
    folder = parser.parse_args().data
    for name in NAMES:
        with tempfile.TemporaryDirectory() as scratch:
            report(name, folder / f"{name}.route.csv", Path(scratch))


if __name__ == "__main__":
    main()

"""Route CSVs replayed at the recorded cache size: the recorded hits, ours, and what parts them.

benchmarks/route_replay.py prints the whole comparison; docs/measurements/route-replay.md explains it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from finemoe.sim.run import simulate
from finemoe.traces.route_csv import read_route_csv
from finemoe.traces.route_import import import_route_csv
from finemoe.traces.routing_file import RoutingFile
from route_models import route_model
from shared_data import shared

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import route_replay  # noqa: E402
from route_replay import Event, Hits, in_bytes  # noqa: E402

MIB = 2**20

# Recorded decode and overall hit rate, and the range of cache bytes that repeats the record.
RECORDED = {
    "qwen": (0.8029, 0.7488, 4_194_275_328, 4_194_459_647),
    "gemma": (0.8191, 0.7678, 4_193_778_688, 4_194_646_015),
    "gptoss": (0.4484, 0.3241, 3_132_950_400, 3_146_169_599),
}
# Decode hit rate, and decode lookups with the recorded outcome.
OURS = {
    "qwen": {
        "core, lru, 1,468 slots": (0.8051, 36_781),
        "core, lru, 1,468 slots, one by one": (0.8049, 36_791),
        "core, lru, 1,458 slots (held on average)": (0.8027, 36_844),
        "core, lru, 1,370 slots (of the largest)": (0.7829, 36_126),
        "core, lfu, 1,468 slots": (0.8099, 32_340),
        "core, lfu, frequency = residency": (0.7445, 29_706),
    },
    "gemma": {
        "core, lru, 1,064 slots": (0.8191, 23_017),
        "core, lru, 1,064 slots, one by one": (0.8191, 23_021),
        "core, lru, 967 slots (of the largest)": (0.7936, 22_452),
        "core, lfu, 1,064 slots": (0.8342, 20_752),
        "core, lfu, frequency = residency": (0.8086, 19_697),
    },
    "gptoss": {
        "core, lru, 237 slots": (0.4481, 4_605),
        "core, lru, 237 slots, one by one": (0.4484, 4_608),
        "core, lfu, 237 slots": (0.4353, 3_706),
        "core, lfu, frequency = residency": (0.3262, 3_371),
    },
}


def lfu(events: Sequence[Event], experts: int, slots: int, *, keep: bool) -> Hits:
    """LFU by the rules of docs/core.md, in NumPy; `keep`: counts outlive an eviction."""
    visits, stamp = np.ones(experts, np.int64), np.zeros(experts, np.int64)
    resident, hits = np.zeros(experts, bool), []
    for now, event in enumerate(events):
        required = np.array(sorted(event.lookups))
        visits[required] += 1
        stamp[required] = now
        missing = required[~resident[required]]
        hits.append(event.lookups.difference(missing.tolist()))
        key = np.where(resident, visits * len(events) + stamp, np.iinfo(np.int64).max)
        key[required] = np.iinfo(np.int64).max
        resident[missing] = True
        for _ in range(int(resident.sum()) - slots):
            victim = key.argmin()  # the first of equals: the lower id
            key[victim] = np.iinfo(np.int64).max
            resident[victim] = False
            if not keep:
                visits[victim] = 1
    return hits


@pytest.mark.parametrize("name", RECORDED)
def test_hit_rates_beside_the_recorded_ones(name: str, tmp_path: Path) -> None:
    source = shared(f"routing/{name}.route.csv")
    trace = read_route_csv(source)
    import_route_csv(source, tmp_path / "out.parquet")
    routing = RoutingFile(tmp_path / "out.parquet").recorded(0)
    events = route_replay.events_of(trace)
    sizes = [int(size) for size in trace.expert_bytes for _ in range(trace.experts)]
    recorded = [event.recorded for event in events]
    decode, both, low, high = RECORDED[name]
    capacity = high // (100 * MIB) * 100 * MIB
    assert low <= capacity

    # The engine's rule repeats every recorded lookup, at these sizes and at no other.
    for size in (low, capacity, high):
        assert in_bytes(events, sizes, size)[0] == recorded
    for size in (low - 1, high + 1):
        assert in_bytes(events, sizes, size)[0] != recorded

    tables = route_replay.replays(trace, routing, capacity)
    assert [round(rate, 4) for rate in route_replay.rates(events, tables["recorded"])[:3]] == [
        0,
        decode,
        both,
    ]
    for label, (rate, alike) in OURS[name].items():
        found = route_replay.rates(events, tables[label])
        assert (round(found[1], 4), found[3]) == (rate, alike), label

    # The core decides what its rules, played in plain Python, decide: hit by hit.
    slots, units = int(capacity / trace.expert_bytes.mean()), [1] * len(sizes)
    assert tables[f"core, lru, {slots:,} slots"] == in_bytes(events, units, slots, by_id=True)[0]
    assert tables[f"core, lru, {slots:,} slots, one by one"] == in_bytes(events, units, slots, pin=False)[0]
    assert tables[f"core, lfu, {slots:,} slots"] == lfu(events, len(sizes), slots, keep=True)
    assert tables["core, lfu, frequency = residency"] == lfu(events, len(sizes), slots, keep=False)


def test_the_simulator_counts_the_same_hits(tmp_path: Path) -> None:
    """From the CSV through import, `--routing` and the simulated machine: what the core alone counts."""
    for name, prompt, output, cache in (("qwen", 28, 129, "1468slots"), ("gptoss", 85, 65, "237slots")):
        import_route_csv(shared(f"routing/{name}.route.csv"), tmp_path / "routing.parquet")
        trace = f"arrived_at,num_prefill_tokens,num_decode_tokens\n0,{prompt},{output}\n"
        (tmp_path / "trace.csv").write_text(trace)
        results = simulate(
            tmp_path / "trace.csv",
            output=tmp_path / name,
            routing=str(tmp_path / "routing.parquet"),
            model=str(route_model(name, tmp_path / "config.json")),
            expert_dtype="int4",
            expert_cache=cache,
            policy="lru",
            hardware="a100-80gb",
        )
        (found,) = results.runs
        assert found.hit_rate_decode is not None
        label = f"core, lru, {int(cache.removesuffix('slots')):,} slots"
        assert (found.hit_rate_prefill, round(found.hit_rate_decode, 4)) == (0, OURS[name][label][0])


def test_the_page_holds_the_output_of_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shared("routing/qwen.route.csv").parent
    monkeypatch.setattr("sys.argv", ["route_replay.py", "--data", str(folder)])
    route_replay.main()
    page = (ROOT / "docs" / "measurements" / "route-replay.md").read_text("utf-8")
    for line in capsys.readouterr().out.splitlines():
        assert line in page

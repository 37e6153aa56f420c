"""Memory stays bounded over many iterations: without a log, core and feed keep nothing of what is past."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import finemoe
import pytest
from finemoe.policy.core import Core, Feed, core_options, make_config
from finemoe.policy.systems import SYSTEMS, find_system
from world_case import MadeRouting, small_model

MODEL = small_model(layers=6, experts=16, top_k=2)
WIDTH, OUTPUT_TOKENS, AHEAD = 32, 50, 4
WARM, REQUESTS = 100, 300
LEAST_LEAK_BYTES = 64  # per iteration; a row of one layer has that many


def serve(core: Core, feed: Feed, routing: MadeRouting, request: int, step: int, *, told: bool) -> None:
    """One request; loads and searches end at once."""
    made = routing.routing_for(request % 8, 5, OUTPUT_TOKENS, routing.meta.speculation)
    feed.add(
        request,
        made.gate,
        made.experts,
        made.token_counts,
        made.offsets,
        made.embedding,
        made.speculation,
    )
    for iteration in range(OUTPUT_TOKENS):
        if told:
            feed.foresee(core, step + iteration * MODEL.layers, [request], [iteration], AHEAD)
        feed.select([request], [iteration], [1 if iteration else 5], iteration == 0)
        feed.begin_iteration(core)
        for layer in range(MODEL.layers):
            settle(core)
            feed.gate(core, layer)
            settle(core)
            core.computed_chunk()
        core.end_iteration()
    settle(core)
    feed.remove(request)


def settle(core: Core) -> None:
    """End everything that is under way."""
    busy = True
    while busy:
        busy = False
        for _, ticket, *_ in core.take_searches():
            core.search_done(ticket)
        for load in core.take_device(0):
            core.loaded(load[1])
            busy = True


def growth_of(system: str) -> int:
    """Bytes that this process, made for it, grows by from request WARM to the last."""
    row = find_system(system)
    options = core_options(
        row,
        layers=MODEL.layers,
        experts=MODEL.experts,
        top_k=MODEL.top_k,
        devices=1,
        slots_per_device=MODEL.routed_experts() if row.preload == "all" else 24,
        expert_bytes=1,
        prefetch_distance=2,
        store_capacity=20,
        embedding_width=WIDTH,
        embedding_work=WIDTH,
    )
    core = Core(make_config(options))
    feed, routing = Feed(MODEL.layers, MODEL.experts, WIDTH), MadeRouting(MODEL, embedding_width=WIDTH)
    before = 0
    for request in range(REQUESTS):
        if request == WARM:
            before = resident_bytes()
        step = request * OUTPUT_TOKENS * MODEL.layers
        serve(core, feed, routing, request, step, told=row.predictor == "oracle")
    return resident_bytes() - before


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("system", [*SYSTEMS])
def test_nothing_is_kept_of_past_iterations(system: str) -> None:
    command = f"import json, test_world_memory; print(json.dumps(test_world_memory.growth_of({system!r})))"
    found = [str(Path(__file__).parent), *sys.path, str(Path(finemoe.__file__).parents[1])]
    result = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
        capture_output=True,
        text=True,
        check=True,
    )
    iterations = (REQUESTS - WARM) * OUTPUT_TOKENS
    assert json.loads(result.stdout) < iterations * LEAST_LEAK_BYTES

"""Memory over many iterations: without a log, core, feed and policy keep nothing of what is past."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from ..core import Core, Feed, core_options, make_core
from ..system import System
from .routing import MadeRouting
from .worlds import small_model

#: where a process can read its own size
LINUX = sys.platform == "linux"
_MODEL = small_model(layers=6, experts=16, top_k=2)
_WIDTH, _OUTPUT_TOKENS, _AHEAD = 32, 50, 4
_WARM, _REQUESTS = 80, 200  # 10,000 iterations in all
_LEAST_LEAK_BYTES = 64  # per iteration; a row of one layer has that many


def _serve(core: Core, feed: Feed, routing: MadeRouting, request: int, step: int, *, told: bool) -> None:
    """One request; loads and searches end at once."""
    made = routing.routing_for(request % 8, 5, _OUTPUT_TOKENS, routing.meta.speculation)
    feed.add(
        request,
        made.gate,
        made.experts,
        made.token_counts,
        made.offsets,
        made.embedding,
        made.speculation,
    )
    for iteration in range(_OUTPUT_TOKENS):
        if told:
            feed.foresee(core, step + iteration * _MODEL.layers, [request], [iteration], _AHEAD)
        feed.select([request], [iteration], [1 if iteration else 5], iteration == 0)
        feed.begin_iteration(core)
        for layer in range(_MODEL.layers):
            _settle(core)
            feed.gate(core, layer)
            _settle(core)
            core.computed_chunk()
        core.end_iteration(finished=[request] if iteration == _OUTPUT_TOKENS - 1 else [])
    _settle(core)
    feed.remove(request)


def _settle(core: Core) -> None:
    """End everything that is under way."""
    core.take_forward()
    busy = True
    while busy:
        busy = False
        for _, ticket, *_ in core.take_searches():
            core.search_done(ticket)
        for load in core.take_device(0):
            core.loaded(load[1])
            busy = True


def check_growth(system: System) -> None:
    """Raise AssertionError where a system's memory grows with its iterations; on Linux only.

    A process of its own is measured: nothing else grows in it.
    """
    command = (
        "import sys; from finemoe.policy.contract.growth import growth_of; print(growth_of(sys.argv[1]))"
    )
    package = str(Path(__file__).absolute().parents[3])
    result = subprocess.run(
        [sys.executable, "-c", command, msgspec.json.encode(system).decode()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), package])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    iterations = (_REQUESTS - _WARM) * _OUTPUT_TOKENS
    grown = int(result.stdout)
    assert grown < iterations * _LEAST_LEAK_BYTES, f"{grown} bytes more after {iterations} iterations"


def growth_of(system_json: str) -> int:
    """Bytes that this process, made for it, grows by over the later part of many iterations."""
    row = msgspec.json.decode(system_json, type=System)
    options = core_options(
        row,
        layers=_MODEL.layers,
        experts=_MODEL.experts,
        top_k=_MODEL.top_k,
        devices=1,
        slots_per_device=_MODEL.routed_experts() if row.preload == "all" else 24,
        expert_bytes=1,
        prefetch_distance=2,
        store_capacity=20,
        embedding_width=_WIDTH,
        embedding_work=_WIDTH,
    )
    core = make_core(options)
    feed, routing = Feed(_MODEL.layers, _MODEL.experts, _WIDTH), MadeRouting(_MODEL, embedding_width=_WIDTH)
    before = 0
    for request in range(_REQUESTS):
        if request == _WARM:
            before = _resident_bytes()
        step = request * _OUTPUT_TOKENS * _MODEL.layers
        _serve(core, feed, routing, request, step, told=row.predictor == "oracle")
    return _resident_bytes() - before


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

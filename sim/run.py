"""`simulate`: a grid of policies × expert caches × machines × rates over one request trace."""

from __future__ import annotations

import time
from pathlib import Path

from ..errors import SettingError
from ..serving.grid import Cell, CellSink, Interrupted, OnProgress, Served, run_grid
from ..serving.results import Results
from ..serving.settings_file import resolve
from .cell import CellInputs
from .plan import Plan, SimulatedCell, make_plan
from .world import run_cell

__all__ = ["Interrupted", "OnProgress", "run_plan", "simulate"]


def simulate(
    trace: str | Path | None = None,
    *,
    config: str | Path | None = None,
    output: str | Path | None = None,
    on_progress: OnProgress | None = None,
    **options: object,
) -> Results:
    """Simulate serving `trace` for each policy, expert cache, machine and rate; write a results directory.

    `options` are the settings of `RunSettings`, named as the flags of `finemoe-sim` with underscores, e.g.
    ``simulate("azure.parquet", policy="lru,finemoe", expert_cache=["24GB", "0.25"], rate=[0.5, 1],
    slo="ttft_p90<2s")``; they win over the TOML file `config`. `output` is the results directory, by default
    a new one in `finemoe-results`. Raises InputError for bad input, CapacityError when no cell fits its
    machine's memory, and Interrupted (a KeyboardInterrupt) on Ctrl-C, with the finished cells.
    """
    if output is not None and not isinstance(output, str | Path):
        raise SettingError(f"--output is {output!r}. Give the path of a directory.")
    settings = resolve({"trace": trace, **options}, config)
    if settings.backend != "sim":
        raise SettingError(f"backend is {settings.backend}: finemoe.serve runs a real model.")
    return run_plan(make_plan(settings), None if output is None else Path(output), on_progress)


def run_plan(plan: Plan, output: Path | None = None, on_progress: OnProgress | None = None) -> Results:
    """Run every cell that fits and write the results directory; see `simulate`."""

    def serve(cell: Cell, sink: CellSink) -> Served:
        assert isinstance(cell, SimulatedCell)
        return _serve(plan, cell, sink)

    return run_grid(plan, serve, output, on_progress)


def _serve(plan: Plan, cell: SimulatedCell, sink: CellSink) -> Served:
    settings, meta = plan.settings, plan.routing.meta
    inputs = CellInputs(
        model=plan.model,
        expert_dtype=settings.expert_dtype,
        profile=cell.profile,
        system=cell.system,
        expert_cache_bytes=cell.expert_cache_bytes,
        requests=cell.requests,
        training=plan.training,
        routing=plan.routing.afresh(),  # its remarks are the cell's
        settings=settings,
        longest_tokens=cell.requests.longest_tokens,
    )
    begin = time.perf_counter()
    outcome = run_cell(inputs, sink.progress, sink.decisions)
    wall_s = time.perf_counter() - begin
    # What the world, the memory split and the routing have to say.
    notes = [*outcome.notes, *(cell.memory.warnings if cell.memory else ()), *inputs.routing.remarks()]
    if meta.prefill == "none":
        notes.append("TTFT: undefined (the routing has no prefill iterations)")
    if meta.prefill == "derived":
        notes.append("TTFT: DERIVED (prefill routing aggregated from the first decode iterations)")
    return Served(outcome, cell.profile.devices, wall_s, tuple(notes), ttft_defined=meta.prefill != "none")

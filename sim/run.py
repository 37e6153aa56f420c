"""`simulate`: a grid of policies × expert caches × machines × rates over one request trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from .. import __version__
from ..errors import CapacityError, SettingError
from ..serving.metrics import CellSummary, summarize
from ..serving.results import Results, ResultsWriter
from ..serving.slo import parse_slo
from ..serving.timeseries import time_series
from .cell import CellInputs, CellOutcome, Progress
from .plan import Cell, Plan, make_plan
from .settings import resolve, to_toml
from .world import run_cell

RESULTS_ROOT = Path("finemoe-results")

#: Called now and then during each cell.
OnProgress = Callable[[Cell, Progress], None]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a grid. `results`: the finished cells, which are on disk as well; None without any."""

    def __init__(self, results: Results | None) -> None:
        super().__init__("interrupted")
        self.results = results


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
    return run_plan(make_plan(settings), None if output is None else Path(output), on_progress)


def run_plan(plan: Plan, output: Path | None = None, on_progress: OnProgress | None = None) -> Results:
    """Run every cell that fits and write the results directory; see `simulate`."""
    names = tuple(cell.name for cell in plan.cells)
    writer = (
        ResultsWriter.fresh(RESULTS_ROOT, names, plan.evidence)
        if output is None
        else ResultsWriter.replacing(output, names, plan.evidence)
    )
    toml = to_toml(plan.settings)
    runs = [_waiting(cell) for cell in plan.cells]
    try:
        writer.write_summary(_results(plan, runs), toml)
        for place, cell in enumerate(plan.cells):
            if cell.memory is None:
                continue
            try:
                summary, outcome = _run(plan, cell, writer, on_progress)
                series = time_series(
                    outcome.requests,
                    outcome.iterations,
                    simulated_s=outcome.simulated_s,
                    devices=cell.profile.devices,
                    hit_rate_defined=cell.system.hit_rate_defined,
                )
            except CapacityError as error:
                runs[place] = _not_run(cell, f"DOES NOT FIT: {error}")
                writer.drop_cell(cell.name)
                continue
            writer.write_cell(cell.name, outcome.requests, outcome.iterations, series)
            runs[place] = summary  # only now: what is called finished is on disk
            writer.write_summary(_results(plan, runs), toml)
        if not any(run.ran for run in runs):
            raise CapacityError(runs[0].status.removeprefix("DOES NOT FIT: "))
        writer.write_summary(_results(plan, runs), toml)
        directory = writer.commit()
    except KeyboardInterrupt:
        if not any(run.ran for run in runs):
            writer.discard()
            raise Interrupted(None) from None
        directory = writer.keep_partial(_results(plan, runs), toml)
        raise Interrupted(_results(plan, runs, directory)) from None
    except BaseException as error:
        # What cannot be written is dropped, to give its space back; after any other failure the finished
        # cells stay in DIR.partial.
        if isinstance(error, SettingError) or not any(run.ran for run in runs):
            writer.discard()
        else:
            error.add_note(f"finished runs are kept in {writer.staging}")
        raise
    return _results(plan, runs, directory)


def _run(
    plan: Plan, cell: Cell, writer: ResultsWriter, on_progress: OnProgress | None
) -> tuple[CellSummary, CellOutcome]:
    """Run a cell. Its decisions are written as soon as they are complete: that frees their memory, and
    leaves little to write when the simulation ends."""
    settings = plan.settings
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

    def report(progress: Progress) -> None:
        if on_progress is not None:
            on_progress(cell, progress)

    begin = time.perf_counter()
    outcome = run_cell(inputs, report, lambda decisions: writer.write_decisions(cell.name, decisions))
    wall_s = time.perf_counter() - begin
    summary = summarize(
        key=cell.key,
        expert_cache_bytes=cell.expert_cache_bytes,
        requests=outcome.requests,
        iterations=outcome.iterations,
        counters=outcome.counters,
        per_layer=outcome.per_layer,
        memory_bytes=outcome.memory_bytes,
        busy_s=outcome.busy_s,
        devices=cell.profile.devices,
        simulated_s=outcome.simulated_s,
        counted_s=outcome.counted_s,
        wall_s=wall_s,
        max_num_seqs=settings.max_num_seqs,
        hit_rate_defined=cell.system.hit_rate_defined,
        offline=settings.offline,
        ttft_defined=plan.routing.meta.prefill != "none",
        slo=() if settings.slo is None else parse_slo(settings.slo),
        notes=_notes(plan, cell, outcome, inputs.routing.remarks()),
    )
    return summary, outcome


def _notes(plan: Plan, cell: Cell, outcome: CellOutcome, remarks: tuple[str, ...]) -> tuple[str, ...]:
    """What the world, the memory split and the routing have to say of a run, each once."""
    notes = [*outcome.notes, *(cell.memory.warnings if cell.memory else ()), *remarks]
    if plan.routing.meta.prefill == "none":
        notes.append("TTFT: undefined (the routing has no prefill iterations)")
    if plan.routing.meta.prefill == "derived":
        notes.append("TTFT: DERIVED (prefill routing aggregated from the first decode iterations)")
    return tuple(dict.fromkeys(notes))


def _waiting(cell: Cell) -> CellSummary:
    fits = cell.memory is not None
    return _not_run(cell, "NOT RUN: interrupted" if fits else cell.problem)


def _not_run(cell: Cell, status: str) -> CellSummary:
    return CellSummary(
        policy=cell.system.name,
        expert_cache=cell.expert_cache,
        expert_cache_bytes=cell.expert_cache_bytes,
        hardware=cell.profile.name,
        rate_per_s=cell.rate_per_s,
        status=status,
    )


def _results(plan: Plan, runs: list[CellSummary], directory: Path | None = None) -> Results:
    return Results(
        runs=tuple(runs),
        config=msgspec.to_builtins(plan.settings),
        trace=plan.trace,
        evidence=plan.evidence,
        version=__version__,
        partial=any(run.status.startswith("NOT RUN") for run in runs),
        directory=directory,
    )

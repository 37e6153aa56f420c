"""The tables under a grid's: each cell against the SLO, and what a sweep of rates shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..serving.cells import cell_parts, rate_text
from ..serving.sweep import saturation
from .formats import console, grid_table, number, percent

if TYPE_CHECKING:
    from ..serving.metrics import CellSummary
    from ..serving.results import Results
    from ..serving.slo import ConditionResult
    from ..serving.sweep import Saturation


def print_slo(results: Results) -> None:
    """Each cell against the SLO, where one was asked for, then each sweep of rates, where there is one."""
    judged = [run for run in results.runs if run.slo is not None]
    if judged:
        _print_conditions(results.runs, judged[0])
    sweeps = [sweep for sweep in saturation(results.runs) if sweep.rates_per_s]
    if sweeps:
        _print_sweeps(sweeps, slo=bool(judged))


def _print_conditions(runs: tuple[CellSummary, ...], example: CellSummary) -> None:
    keys = [run.key for run in runs]
    table = grid_table(keys)
    assert example.slo is not None
    for condition in example.slo.conditions:
        table.add_column(condition.condition.replace("<", "\n< "), justify="right", no_wrap=True)
    for name in ("requests\nwithin", "goodput\nrequests/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("SLO", no_wrap=True)
    for parts, run in zip(cell_parts(keys), runs, strict=True):
        if run.slo is None:
            continue
        table.add_row(
            *parts,
            *(_measured(condition) for condition in run.slo.conditions),
            percent(run.slo.attainment),
            number(run.slo.goodput_requests_per_s),
            {True: "met", False: "missed", None: "undefined"}[run.slo.met],
        )
    print()
    console().print(table)


def _measured(condition: ConditionResult) -> str:
    text = number(condition.measured_s)
    return f"missed: {text}" if condition.met is False else text


def _print_sweeps(sweeps: list[Saturation], *, slo: bool) -> None:
    table = grid_table([])
    hardware = len({sweep.hardware for sweep in sweeps}) > 1
    if hardware:
        table.add_column("hardware", no_wrap=True)
    table.add_column("highest rate\nnot OVERLOADED", justify="right", no_wrap=True)
    if slo:
        table.add_column("highest rate\nthat meets the SLO", justify="right", no_wrap=True)
    table.add_column("of", overflow="fold")
    for sweep in sweeps:
        rates = [sweep.highest_rate_not_overloaded]
        if slo:
            rates.append(sweep.highest_rate_meeting_slo)
        table.add_row(
            sweep.policy,
            sweep.expert_cache,
            *((sweep.hardware,) if hardware else ()),
            *("none" if rate is None else f"{rate_text(rate)}/s" for rate in rates),
            ", ".join(map(rate_text, sweep.rates_per_s)),
        )
    print()
    console().print(table)

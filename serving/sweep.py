"""What a sweep of arrival rates shows: up to where each cell keeps up, and up to where it keeps the SLO."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from .metrics import CellSummary


class Saturation(msgspec.Struct, frozen=True, kw_only=True):
    """One policy, expert cache and machine over the swept rates, in requests per second.

    Null: no swept rate does, or there is no SLO. A rate that was not swept says nothing.
    """

    policy: str
    expert_cache: str
    hardware: str
    rates_per_s: tuple[float, ...]  # those that ran, ascending
    highest_rate_not_overloaded: float | None
    highest_rate_meeting_slo: float | None


def saturation(runs: Iterable[CellSummary]) -> tuple[Saturation, ...]:
    """The sweeps of a grid in order of its cells; empty where it has not several rates."""
    sweeps: dict[tuple[str, str, str], list[CellSummary]] = {}
    for run in runs:
        sweeps.setdefault((run.policy, run.expert_cache, run.hardware), []).append(run)
    return tuple(
        Saturation(
            policy=policy,
            expert_cache=expert_cache,
            hardware=hardware,
            rates_per_s=_rates(cells, lambda run: True),
            highest_rate_not_overloaded=_highest(cells, lambda run: run.load.overload_factor is None),
            highest_rate_meeting_slo=_highest(cells, lambda run: run.slo is not None and run.slo.met is True),
        )
        for (policy, expert_cache, hardware), cells in sweeps.items()
        if len({run.rate_per_s for run in cells}) > 1
    )


def _rates(cells: list[CellSummary], holds: Callable[[CellSummary], bool]) -> tuple[float, ...]:
    return tuple(sorted(run.rate_per_s for run in cells if run.ran and run.rate_per_s and holds(run)))


def _highest(cells: list[CellSummary], holds: Callable[[CellSummary], bool]) -> float | None:
    return max(_rates(cells, holds), default=None)

"""Service level objectives: limits on latency, what share of the requests keeps them, and goodput.

    slo = parse_slo("ttft_p90<2s,tpot_p90<0.2s")

A condition is met when the measured figure of the run lies under its limit. A request is within the SLO when
its own TTFT, TPOT, … lie under all the limits, whatever statistic they are set for; a request of one token
has no TPOT and cannot miss it. Goodput counts these requests per second (DistServe, OSDI '24).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import SettingError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

METRICS = ("ttft", "ttft_service", "tpot", "e2e", "queue")
STATISTICS = ("mean", "p50", "p90", "p99")
_UNIT_S = {"s": 1.0, "ms": 1e-3}
_NAME = re.compile(r"[A-Za-z0-9_]*")
_NUMBER = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")
_UNIT = re.compile(r"[A-Za-zµ]*")
_FORM = 'Write METRIC_STATISTIC<LIMIT with commas between them, such as "ttft_p90<2s,tpot_p90<200ms"'


class Condition(msgspec.Struct, frozen=True):
    """One limit: `statistic` of `metric` has to lie under `limit_s` seconds."""

    metric: str
    statistic: str
    limit_s: float
    text: str  # as it was written, without spaces


class ConditionResult(msgspec.Struct, frozen=True):
    """A condition against a run. `met` is null where the run has no such figure."""

    condition: str
    measured_s: float | None
    met: bool | None


class SloResult(msgspec.Struct, frozen=True):
    """An SLO against a run.

    `met`: every condition is; null where none is missed and one has no figure. `attainment`: share of the
    counted requests within the SLO; null, as goodput is, where a metric of it is undefined or nothing was
    counted. Goodput is per second from the first arrival to the end of the last request.
    """

    conditions: tuple[ConditionResult, ...]
    met: bool | None
    attainment: float | None
    goodput_requests_per_s: float | None


def parse_slo(text: str) -> tuple[Condition, ...]:
    """The conditions of an SLO; SettingError with position and remedy for anything else."""
    conditions: list[Condition] = []
    place = 0
    while True:
        begin = _after_spaces(text, place)
        condition, place = _condition(text, begin)
        if any((one.metric, one.statistic) == (condition.metric, condition.statistic) for one in conditions):
            raise _wrong(
                text,
                begin,
                f"{condition.metric}_{condition.statistic} has a limit already",
                "Leave one of them out",
            )
        conditions.append(condition)
        if place == len(text):
            return tuple(conditions)
        if text[place] != ",":
            raise _wrong(text, place, f"a comma or the end was expected, not {text[place]!r}", _FORM)
        place += 1


def _condition(text: str, place: int) -> tuple[Condition, int]:
    """The condition that begins at `place`, and where it ends, spaces after it included."""
    begin = place
    name, place = _token(_NAME, text, place)
    metric, _, statistic = name.rpartition("_")
    if not name:
        found = "nothing" if place == len(text) else repr(text[place])
        raise _wrong(text, begin, f"a metric was expected, not {found}", _FORM)
    if metric not in METRICS:
        metric, statistic = (name, "") if name in METRICS else (metric or name, statistic)
    if metric not in METRICS:
        raise _unknown(text, begin, "metric", metric, METRICS)
    if statistic not in STATISTICS:
        raise _unknown(text, begin + len(metric) + bool(statistic), "statistic", statistic, STATISTICS)
    place = _after_spaces(text, place)
    if text[place : place + 1] != "<":
        found = repr(text[place]) if place < len(text) else "the end"
        raise _wrong(text, place, f"< was expected, not {found}", _FORM)
    place = _after_spaces(text, place + 1)
    at = place
    number, place = _token(_NUMBER, text, place)
    if not number:
        found = repr(text[at]) if at < len(text) else "the end"
        raise _wrong(text, at, f"a number was expected, not {found}", "Give a limit such as 2s or 200ms")
    place = _after_spaces(text, place)
    unit, after = _token(_UNIT, text, place)
    if unit not in _UNIT_S:
        raise _wrong(text, place, f"{unit!r} is no unit of time", "Give s or ms")
    limit_s = float(number) * _UNIT_S[unit]
    if limit_s <= 0:
        raise _wrong(text, at, "nothing lies under a limit of 0", "Give a limit above 0")
    return Condition(metric, statistic, limit_s, f"{name}<{number}{unit}"), _after_spaces(text, after)


def _token(pattern: re.Pattern[str], text: str, place: int) -> tuple[str, int]:
    found = pattern.match(text, place)
    return (found[0], found.end()) if found else ("", place)


def _after_spaces(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t":
        place += 1
    return place


def _unknown(text: str, place: int, kind: str, name: str, known: tuple[str, ...]) -> SettingError:
    problem = f"{name!r} is no {kind}" if name else f"a {kind} is missing"
    choice = f"{did_you_mean(name, known)} Choose {', '.join(known[:-1])} or {known[-1]}"
    return _wrong(text, place, problem, choice.lstrip())


def _wrong(text: str, place: int, problem: str, remedy: str) -> SettingError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return SettingError(
        f"--slo {shown!r}, character {place + 1}: {problem}. {remedy[0].upper()}{remedy[1:]}."
    )


def judge(
    conditions: tuple[Condition, ...],
    figures: Mapping[str, Any],
    samples: Mapping[str, NDArray[np.float64] | None],
    requests: int,
    served_s: float,
) -> SloResult:
    """An SLO against a run of `requests` counted requests that took `served_s` seconds.

    `figures[metric]` is the run's Distribution of it; `samples[metric]` has a value per request in seconds,
    NaN where a request has none; None where the metric is undefined in this run.
    """
    results = []
    within: NDArray[np.bool_] | None = None
    defined = requests > 0
    for condition in conditions:
        measured_s: float | None = getattr(figures[condition.metric], condition.statistic)
        met = None if measured_s is None else measured_s < condition.limit_s
        results.append(ConditionResult(condition.text, measured_s, met))
        values = samples[condition.metric]
        if values is None:
            defined = False
            continue
        kept = ~(values >= condition.limit_s)  # NaN cannot miss
        within = kept if within is None else within & kept
    verdicts = [result.met for result in results]
    met = False if False in verdicts else None if None in verdicts else True
    if not defined or within is None:
        return SloResult(tuple(results), met, None, None)
    count = int(within.sum())
    goodput = count / served_s if served_s > 0 else None
    return SloResult(tuple(results), met, count / requests, goodput)

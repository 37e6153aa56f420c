"""SLOs: what is accepted, what is said of the rest, and attainment and goodput against a direct count."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from finemoe.errors import SettingError
from finemoe.serving.cells import CellKey
from finemoe.serving.logs import IterationLog, RequestLog
from finemoe.serving.metrics import CellSummary, summarize
from finemoe.serving.slo import METRICS, STATISTICS, Condition, ConditionResult, parse_slo
from hypothesis import given
from hypothesis import strategies as st


def test_conditions_are_read_with_their_units() -> None:
    assert parse_slo("ttft_p90<2s,tpot_p90<0.2s") == (
        Condition("ttft", "p90", 2.0, "ttft_p90<2s"),
        Condition("tpot", "p90", 0.2, "tpot_p90<0.2s"),
    )
    spaced = parse_slo(" ttft_service_mean < 250 ms ,\tqueue_p99<1s")
    assert [(one.metric, one.statistic, one.limit_s) for one in spaced] == [
        ("ttft_service", "mean", 0.25),
        ("queue", "p99", 1.0),
    ]
    assert spaced[0].text == "ttft_service_mean<250ms"


@given(
    st.lists(
        st.tuples(st.sampled_from(METRICS), st.sampled_from(STATISTICS), st.integers(1, 10**6)),
        min_size=1,
        unique_by=lambda one: one[:2],
    )
)
def test_every_metric_and_statistic_is_known(wanted: list[tuple[str, str, int]]) -> None:
    text = ",".join(f"{metric}_{statistic}<{limit}ms" for metric, statistic, limit in wanted)
    found = parse_slo(text)
    assert [(one.metric, one.statistic) for one in found] == [one[:2] for one in wanted]
    assert [one.limit_s for one in found] == pytest.approx([limit / 1000 for *_, limit in wanted])
    assert ",".join(one.text for one in found) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"--slo '', character 1: a metric was expected, not nothing\. Write METRIC_STATISTIC<LIMIT"),
        ("ttft_p90<2s,", r"character 13: a metric was expected, not nothing"),
        ("ttft_p90<2s,,", r"character 13: a metric was expected, not ','"),
        ("tftt_p90<2s", r"character 1: 'tftt' is no metric\. Did you mean ttft\? Choose ttft, .* or queue"),
        (
            "ttft_p91<2s",
            r"character 6: 'p91' is no statistic\. Did you mean p99\? Choose mean, p50, .*",
        ),
        ("ttft<2s", r"character 5: a statistic is missing\. Choose mean"),
        ("ttft_service<2s", r"character 6: 'service' is no statistic"),
        ("p90<2s", r"character 1: 'p90' is no metric"),
        ("ttft_p90>2s", r"character 9: < was expected, not '>'"),
        ("ttft_p90<=2s", r"character 10: a number was expected, not '='\. Give a limit such as 2s or 200ms"),
        ("ttft_p90", r"character 9: < was expected, not the end"),
        ("ttft_p90<", r"character 10: a number was expected, not the end"),
        ("ttft_p90<-1s", r"character 10: a number was expected, not '-'"),
        ("ttft_p90<2", r"character 11: '' is no unit of time\. Give s or ms"),
        ("ttft_p90<2min", r"character 11: 'min' is no unit of time"),
        ("ttft_p90<0s", r"character 10: nothing lies under a limit of 0"),
        ("ttft_p90<1e3s", r"character 11: 'e' is no unit of time"),
        ("ttft_p90<٢s", r"character 10: a number was expected, not '٢'"),
        ("ttft_p90<2s tpot_p90<1s", r"character 13: a comma or the end was expected, not 't'"),
        ("ttft_p90<2s;tpot_p90<1s", r"character 12: a comma or the end was expected, not ';'"),
        ("ttft_p90<2s,ttft_p90<1s", r"character 13: ttft_p90 has a limit already\. Leave one of them out"),
        ("x" * 200, r"--slo 'x{77}\.\.\.', character 1: 'x+' is no metric"),
    ],
)
def test_anything_else_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parse_slo(text)


def judged(
    requests: RequestLog, slo: str, *, offline: bool = False, ttft_defined: bool = True
) -> CellSummary:
    return summarize(
        key=CellKey("lru", "24GB", "rtx3090", None),
        expert_cache_bytes=1,
        requests=requests,
        iterations=IterationLog(),
        counters=dict.fromkeys(
            ("prefetch_bytes", "useful_bytes", "wasted_bytes", "searches", "late_searches"), 0
        ),
        per_layer={name: np.zeros((2, 1), np.int64) for name in ("activated", "hits")},
        memory_bytes={},
        busy_s={"link": 0.0},
        devices=1,
        simulated_s=1.0,
        counted_s=1.0,
        wall_s=None,
        max_num_seqs=8,
        hit_rate_defined=True,
        offline=offline,
        ttft_defined=ttft_defined,
        slo=parse_slo(slo),
    )


def four_requests() -> RequestLog:
    """TTFT 1, 2, 3, 4 s, of it 0, 0, 1, 2 s in the queue; TPOT 0.5, none, 0.1, 0.1 s; and a warm-up."""
    log = RequestLog()
    log.append(9, 0.0, 0.0, 100.0, 200.0, 10, 11, False)
    log.append(0, 10.0, 10.0, 11.0, 16.0, 10, 11, True)
    log.append(1, 10.0, 10.0, 12.0, 12.0, 10, 1, True)
    log.append(2, 12.0, 13.0, 15.0, 16.0, 10, 11, True)
    log.append(3, 16.0, 18.0, 20.0, 20.5, 10, 6, True)
    return log


def test_attainment_and_goodput_by_hand() -> None:
    slo = judged(four_requests(), "ttft_p50<3.5s,tpot_mean<0.4s").slo
    assert slo is not None
    # Under 3.5 s: requests 0, 1, 2; under 0.4 s or without a TPOT: 1, 2, 3.
    assert slo.attainment == 2 / 4
    assert slo.goodput_requests_per_s == pytest.approx(2 / 10.5)
    assert slo.conditions == (
        ConditionResult("ttft_p50<3.5s", 2.5, True),
        ConditionResult("tpot_mean<0.4s", (0.5 + 0.1 + 0.1) / 3, True),
    )
    assert slo.met is True
    missed = judged(four_requests(), "ttft_p50<2.5s,e2e_p99<100s").slo  # a limit itself is not under it
    assert missed is not None
    assert [condition.met for condition in missed.conditions] == [False, True]
    assert missed.met is False


def test_queue_and_service_add_up_to_the_whole() -> None:
    run = judged(four_requests(), "queue_mean<1s,ttft_service_mean<2s")
    assert (run.queue_s.mean, run.service_s.mean) == (0.75, (6 + 2 + 3 + 2.5) / 4)
    assert run.e2e_s.mean == 0.75 + (6 + 2 + 3 + 2.5) / 4
    assert run.slo is not None
    assert (run.slo.met, run.slo.attainment) == (True, 1 / 4)  # 0: service 1 s; 1, 2, 3: 2 s or more


def test_what_is_undefined_is_neither_met_nor_missed() -> None:
    offline = judged(four_requests(), "queue_p90<1s,e2e_p90<100s", offline=True).slo
    assert offline is not None
    assert offline.conditions[0] == ConditionResult("queue_p90<1s", None, None)
    assert (offline.met, offline.attainment, offline.goodput_requests_per_s) == (None, None, None)
    missed = judged(four_requests(), "queue_p90<1s,e2e_p90<1s", offline=True).slo
    assert missed is not None
    assert missed.met is False
    no_ttft = judged(four_requests(), "ttft_p90<9s", ttft_defined=False)
    assert (no_ttft.ttft_s.mean, no_ttft.ttft_service_s.mean) == (None, None)
    assert no_ttft.slo is not None
    assert (no_ttft.slo.met, no_ttft.slo.attainment) == (None, None)
    nothing = judged(RequestLog(), "ttft_p90<9s").slo
    assert nothing is not None
    assert (nothing.met, nothing.attainment, nothing.goodput_requests_per_s) == (None, None, None)


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.floats(0, 3), st.floats(0.01, 3), st.integers(1, 4)),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 4000),
    st.integers(1, 4000),
)
def test_attainment_is_the_share_within_all_limits(
    rows: list[tuple[float, float, float, int]], ttft_ms: int, tpot_ms: int
) -> None:
    log, within = RequestLog(), 0
    for index, (queue, prefill, decode, tokens) in enumerate(rows):
        admitted = index + queue
        first = admitted + prefill
        last = first + decode * (tokens - 1)
        log.append(index, float(index), admitted, first, last, 1, tokens, True)
        tpot = (last - first) / (tokens - 1) if tokens > 1 else 0.0
        within += first - index < ttft_ms / 1000 and tpot < tpot_ms / 1000
    run = judged(log, f"ttft_p99<{ttft_ms}ms,tpot_p50<{tpot_ms}ms")
    assert run.slo is not None
    assert run.slo.attainment == within / len(rows)
    served = run.load.served_requests_per_s
    if served is not None and run.slo.goodput_requests_per_s is not None:
        assert run.slo.goodput_requests_per_s == pytest.approx(served * within / len(rows))
    assert "NaN" not in msgspec.json.encode(run).decode()

"""Metrics against values worked by hand and against direct NumPy formulas."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from finemoe.serving.cells import CellKey
from finemoe.serving.logs import IterationLog, RequestLog
from finemoe.serving.metrics import CellSummary, Distribution, distribution, load, summarize
from hypothesis import given
from hypothesis import strategies as st

COUNTERS = {
    "prefetch_bytes": 120,
    "useful_bytes": 70,
    "wasted_bytes": 50,
    "searches": 8,
    "late_searches": 2,
}
PER_LAYER = {"activated": np.array([[8, 8], [0, 8]]), "hits": np.array([[2, 6], [0, 5]])}


def summary(requests: RequestLog, iterations: IterationLog, **changes: Any) -> CellSummary:
    arguments: dict[str, Any] = {
        "key": CellKey("lru", "24GB", "rtx3090", None),
        "expert_cache_bytes": 24 * 10**9,
        "requests": requests,
        "iterations": iterations,
        "counters": COUNTERS,
        "per_layer": PER_LAYER,
        "memory_bytes": {"dense weights": 3, "KV cache": 4, "expert slots": 5},
        "busy_s": {"link": 4.0, "compute": 5.0},
        "devices": 2,
        "simulated_s": 12.0,
        "counted_s": 10.0,
        "wall_s": 0.5,
        "max_num_seqs": 8,
        "hit_rate_defined": True,
        "offline": False,
    }
    return summarize(**(arguments | changes))


def two_requests() -> tuple[RequestLog, IterationLog]:
    """Request 0: three tokens. Request 1 waits 1 s, has one token only."""
    requests, iterations = RequestLog(), IterationLog()
    requests.append(1, 2.0, 3.0, 4.0, 4.0, 50, 1, True)
    requests.append(0, 0.0, 0.0, 2.0, 6.0, 100, 3, True)
    iterations.append(0.0, 2.0, "prefill", 1, 100, 8, 2, 1, 5, 50, 1.0, 0.0, 0.5, 0.0, 0.0)
    iterations.append(2.0, 3.0, "decode", 1, 1, 4, 2, 1, 1, 10, 0.4, 0.1, 0.5, 0.0, 0.0)
    iterations.append(3.0, 4.0, "prefill", 1, 50, 8, 6, 0, 2, 20, 0.4, 0.0, 0.5, 0.0, 0.0)
    iterations.append(4.0, 6.0, "decode", 1, 1, 4, 3, 0, 1, 10, 0.2, 0.3, 0.5, 0.0, 0.0)
    return requests, iterations


def test_figures_of_two_requests_by_hand() -> None:
    result = summary(*two_requests())
    assert result.ttft_s == Distribution(2.0, 2.0, 2.0, 2.0)
    service = result.ttft_service_s
    assert (service.mean, service.p50, service.p90, service.p99) == pytest.approx((1.5, 1.5, 1.9, 1.99))
    assert result.queue_s.mean == 0.5
    assert result.tpot_s.mean == 2.0  # request 0 alone: (6 − 2) / 2; one token has no TPOT
    e2e = result.e2e_s
    assert (e2e.mean, e2e.p50, e2e.p90, e2e.p99) == pytest.approx((4.0, 4.0, 5.6, 5.96))
    assert (result.hit_rate, result.hit_rate_prefill, result.hit_rate_decode) == (13 / 24, 8 / 16, 5 / 8)
    assert result.late_rate == 2 / 24
    assert result.demand_bytes == 90
    assert result.stall_share == pytest.approx(2.0 / 6.0)
    assert result.search_wait_share == pytest.approx(0.4 / 6.0)
    assert result.compute_share == pytest.approx(2.0 / 6.0)
    assert result.link_busy_share == pytest.approx(4.0 / 20.0)
    assert result.search_late_share == 0.25
    assert result.throughput_tokens_per_s == pytest.approx(4 / 6)
    prefetch = (result.prefetch_bytes, result.prefetch_useful_bytes, result.prefetch_wasted_bytes)
    assert prefetch == (120, 70, 50)
    assert result.hit_rate_by_layer_prefill == (0.25, 0.75)
    assert result.hit_rate_by_layer_decode == (None, 0.625)
    assert result.peak_memory_bytes == 12
    assert (result.requests, result.iterations, result.status) == (2, 4, "OK")


def test_a_warm_up_is_left_out_of_every_rate() -> None:
    requests, iterations = RequestLog(), IterationLog()
    requests.append(0, 0.0, 0.0, 2.0, 3.0, 10, 2, False)
    requests.append(1, 3.0, 3.0, 4.0, 5.0, 10, 2, True)
    iterations.append(0.0, 2.0, "prefill", 1, 10, 10, 0, 0, 10, 1000, 2.0, 0.0, 0.0, 0.0, 0.0)
    iterations.append(2.0, 3.0, "decode", 1, 1, 10, 0, 0, 10, 1000, 1.0, 0.0, 0.0, 0.0, 0.0)
    iterations.append(3.0, 4.0, "prefill", 1, 10, 10, 10, 0, 0, 0, 0.0, 0.0, 1.0, 0.0, 0.0)
    iterations.append(4.0, 5.0, "decode", 1, 1, 10, 5, 0, 5, 5, 0.5, 0.0, 0.5, 0.0, 0.0)
    result = summary(requests, iterations)
    assert (result.requests, result.iterations, result.hit_rate, result.demand_bytes) == (1, 2, 0.75, 5)
    assert (result.ttft_s.mean, result.tpot_s.mean, result.stall_share) == (1.0, 1.0, 0.25)
    assert result.throughput_tokens_per_s == 1.0


def test_offline_has_no_queue() -> None:
    result = summary(*two_requests(), offline=True)
    assert result.queue_s == Distribution()
    assert result.load.offered_requests_per_s is None
    assert result.ttft_s == result.ttft_service_s
    assert result.e2e_s.mean == pytest.approx((1.0 + 6.0) / 2)


def test_undefined_figures_are_null() -> None:
    """No hit rate where the system has none; without a sample no figure, and never NaN."""
    result = summary(*two_requests(), hit_rate_defined=False)
    assert (result.hit_rate, result.hit_rate_prefill, result.hit_rate_decode, result.late_rate) == (None,) * 4
    assert result.hit_rate_by_layer_decode == ()
    empty = summary(RequestLog(), IterationLog(), counters=dict.fromkeys(COUNTERS, 0), counted_s=0.0)
    text = json.dumps(msgspec.to_builtins(empty), allow_nan=False)  # raises on NaN
    assert json.loads(text)["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert (empty.hit_rate, empty.stall_share, empty.link_busy_share, empty.search_late_share) == (None,) * 4
    assert empty.throughput_tokens_per_s is None


def queued(seconds_per_request: float, count: int) -> RequestLog:
    """One request a second, served one at a time."""
    log, free = RequestLog(), 0.0
    for index in range(count):
        start = max(float(index), free)
        free = start + seconds_per_request
        log.append(index, float(index), start, free, free, 10, 2, True)
    return log


def test_overload_is_said_with_its_factor() -> None:
    result = load(queued(3.0, 40), max_num_seqs=8)
    assert result.offered_requests_per_s == 1.0
    assert result.served_requests_per_s == pytest.approx(1 / 3)
    assert result.waiting_at_last_arrival == 26  # request k starts at 3k s: those from 14 on after 39 s
    assert result.overload_factor == pytest.approx(3.0)  # 1/s against 1/3 per second
    assert summary(queued(3.0, 40), IterationLog()).status == "OVERLOADED 3x"


@pytest.mark.parametrize(("seconds", "count"), [(0.9, 40), (30.0, 3)])
def test_a_system_that_keeps_up_is_not_overloaded(seconds: float, count: int) -> None:
    """The second case takes 90 s for 2 s of arrivals, but never has a full batch waiting."""
    result = load(queued(seconds, count), max_num_seqs=8)
    assert result.overload_factor is None
    assert summary(queued(seconds, count), IterationLog()).status == "OK"


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_percentiles_interpolate_between_ranks(values: list[float]) -> None:
    result = distribution(np.array(values))
    ranked = sorted(values)
    for share, value in ((0.5, result.p50), (0.9, result.p90), (0.99, result.p99)):
        place = share * (len(ranked) - 1)
        low = ranked[int(place)]
        high = ranked[min(int(place) + 1, len(ranked) - 1)]
        assert value == pytest.approx(low + (high - low) * (place - int(place)), rel=1e-9, abs=1e-9)
    assert result.mean == pytest.approx(sum(values) / len(values), rel=1e-9, abs=1e-9)


def test_a_log_keeps_order_and_types_over_many_rows() -> None:
    log = IterationLog()
    for index in range(20_000):  # more than two blocks
        log.append(
            index,
            index + 1,
            "decode" if index % 2 else "prefill",
            1,
            2,
            3,
            4,
            5,
            6,
            2**40,
            0.5,
            0.25,
            0.125,
            0.0,
            0.0,
        )
    assert len(log) == 20_000
    assert log.column("start_s").tolist() == list(range(20_000))
    table = log.to_arrow()
    assert table.column_names == list(IterationLog.columns)
    assert table.schema.field("demand_bytes").type == pa.int64()
    assert table.column("demand_bytes")[19_999].as_py() == 2**40
    assert table.column("phase")[:2].to_pylist() == ["prefill", "decode"]


def test_an_empty_log_has_its_columns() -> None:
    table = RequestLog().to_arrow()
    assert table.num_rows == 0
    assert table.column_names == list(RequestLog.columns)
    assert table.schema.field("counted").type == pa.bool_()

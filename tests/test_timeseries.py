"""The time series against values worked by hand, and its bins against the totals of any run."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from finemoe.serving.logs import IterationLog, RequestLog
from finemoe.serving.timeseries import MOST_BINS, bin_edges, time_series
from hypothesis import given
from hypothesis import strategies as st


def series(
    requests: RequestLog, iterations: IterationLog, simulated_s: float, devices: int = 2, hits: bool = True
) -> pa.Table:
    return time_series(requests, iterations, simulated_s=simulated_s, devices=devices, hit_rate_defined=hits)


def two_requests() -> tuple[RequestLog, IterationLog]:
    """Request 0 from 0.5 s on, request 1 arrives at 1.5 s and waits until 2.5 s; idle from 3 to 4.5 s."""
    requests, iterations = RequestLog(), IterationLog()
    requests.append(0, 0.5, 0.5, 1.5, 2.5, 10, 2, True)
    requests.append(1, 1.5, 2.5, 3.0, 5.25, 10, 2, True)
    iterations.append(0.5, 1.5, "prefill", 1, 10, 10, 4, 0, 6, 0, 0.5, 0.1, 0.4, 0.0, 1.0)
    iterations.append(1.5, 2.5, "decode", 1, 1, 10, 10, 0, 0, 0, 0.0, 0.0, 1.0, 1.0, 1.0)
    iterations.append(2.5, 3.0, "prefill", 1, 10, 4, 0, 0, 4, 0, 0.25, 0.0, 0.25, 1.0, 1.5)
    iterations.append(4.5, 5.25, "decode", 1, 1, 4, 1, 0, 3, 0, 0.5, 0.0, 0.25, 2.0, 3.5)
    return requests, iterations


def test_two_requests_by_hand() -> None:
    table = series(*two_requests(), simulated_s=5.25)
    found = {name: table.column(name).to_pylist() for name in table.column_names}
    assert found["time_s"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert found["width_s"] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.25]
    assert found["queue"] == [0.0, 0.5, 0.5, 0.0, 0.0, 0.0]
    assert found["batch"] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert found["output_tokens"] == [0, 1, 1, 1, 0, 1]  # the third comes out at 3.0 s exactly
    assert found["activated"] == pytest.approx([5.0, 10.0, 9.0, 0.0, 8 / 3, 4 / 3])
    assert found["hit_rate"][:3] == pytest.approx([0.4, 0.7, 5 / 9])
    assert found["hit_rate"][3] is None
    assert found["hit_rate"][4:] == pytest.approx([0.25, 0.25])
    # Of two links. 0.5 s grow between the readings at 3 and 4.5 s, which are all that is known there.
    busy = [0.25, 0.25, 0.25, 1 / 6, 1 / 12 + 0.5, 1.0]
    assert found["link_busy"] == pytest.approx(busy)
    assert found["compute_busy"] == pytest.approx([0.2, 0.7, 0.75, 0.0, 1 / 6, 1 / 3])
    assert found["stall"] == pytest.approx([0.25, 0.25, 0.25, 0.0, 1 / 3, 2 / 3])
    assert found["search_wait"] == pytest.approx([0.05, 0.05, 0.0, 0.0, 0.0, 0.0])


def test_no_hit_rate_where_the_system_has_none() -> None:
    assert series(*two_requests(), simulated_s=5.25, hits=False).column("hit_rate").null_count == 6


def test_a_run_without_anything_has_one_empty_bin() -> None:
    (row,) = series(RequestLog(), IterationLog(), simulated_s=0.0).to_pylist()
    assert row.pop("hit_rate") is None
    assert set(row.values()) == {0.0}


@pytest.mark.parametrize(
    ("simulated_s", "count", "last_s"),
    [
        (0.25, 1, 0.25),
        (1.0, 1, 1.0),
        (3.0 + 1e-9, 3, 1.0 + 1e-9),  # a sliver makes no bin of its own
        (3.001, 4, 0.001),
        (1e6, MOST_BINS, 1.0),
        (1e6 + 5.0, 100_001, 5.0),  # bins of ten seconds
        (1e9, MOST_BINS, 1000.0),
    ],
)
def test_bins_have_a_second_and_are_never_too_many(simulated_s: float, count: int, last_s: float) -> None:
    edges = bin_edges(simulated_s)
    assert len(edges) == count + 1
    assert edges[-1] == simulated_s
    assert edges[-1] - edges[-2] == pytest.approx(last_s, rel=1e-6)
    assert len(set(np.diff(edges[:-1]).tolist())) <= 1


steps = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),  # idle before
        st.floats(0.01, 3.0),  # long
        st.floats(0.0, 1.0),  # share of it that is computation
        st.floats(0.0, 1.0),  # of the rest, stall
        st.floats(0.0, 1.0),  # link busy while idle, per link
        st.floats(0.0, 1.0),  # and in the step
        st.integers(1, 50),
    ),
    min_size=1,
    max_size=12,
)


@given(steps, st.integers(1, 3))
def test_bins_add_up_and_no_share_exceeds_one(
    made: list[tuple[float, float, float, float, float, float, int]], devices: int
) -> None:
    requests, iterations = RequestLog(), IterationLog()
    now = busy = 0.0
    for place, (idle, long, computing, stalling, idle_link, link, activated) in enumerate(made):
        busy += idle * idle_link * devices
        start, end, before = now + idle, now + idle + long, busy
        busy += (end - start) * link * devices
        compute = (end - start) * computing
        stall = (end - start - compute) * stalling
        waits = max(end - start - compute - stall, 0.0)
        iterations.append(
            start,
            end,
            "decode",
            1,
            1,
            activated,
            activated // 2,
            0,
            1,
            0,
            stall,
            waits,
            compute,
            before,
            busy,
        )
        requests.append(place, now, start, end, end, 1, 1, True)
        now = end
    table = series(requests, iterations, now, devices)
    columns = {name: table.column(name).to_numpy() for name in table.column_names if name != "hit_rate"}
    width_s, log = columns["width_s"], iterations.table()
    assert width_s.sum() == pytest.approx(now)
    totals = {
        "queue": sum(idle for idle, *_ in made),
        "batch": sum(long for _, long, *_ in made),
        "link_busy": busy / devices,
        "compute_busy": log["compute_s"].sum(),
        "stall": log["stall_s"].sum(),
        "search_wait": log["search_wait_s"].sum(),
    }
    for name, total in totals.items():
        assert (columns[name] * width_s).sum() == pytest.approx(total, rel=1e-9, abs=1e-9), name
        assert (columns[name] >= 0.0).all()
    for name in ("link_busy", "compute_busy", "stall", "search_wait"):
        assert (columns[name] <= 1.0).all()
    assert columns["output_tokens"].sum() == len(made)
    assert columns["activated"].sum() == pytest.approx(log["activated"].sum())
    hits = np.nan_to_num(table.column("hit_rate").to_numpy(zero_copy_only=False)) * columns["activated"]
    assert hits.sum() == pytest.approx(log["hits"].sum())

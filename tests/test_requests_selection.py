"""Selections: their figures, their draws, and that they can be read again."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from finemoe.errors import SettingError, TraceError
from finemoe.traces.requests import MAX_SPAN_S, RequestSelection, RequestTrace, open_requests, select_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from request_writers import Look, Rows, write_conversations, write_text


def vidur(path: Path, rows: Rows) -> RequestTrace:
    write_text(path, "vidur", rows, Look())
    return open_requests(path)


def untimed(path: Path, count: int) -> RequestTrace:
    write_conversations(path, "lmsys", [[("user", "a" * 9), ("assistant", "b")]] * count, "jsonl", Look())
    return open_requests(path)


def steady(path: Path, count: int) -> RequestTrace:
    """One request a second, with 1, 2, 3, … prompt tokens."""
    return vidur(path, [(place * 10**9, place + 1, 7) for place in range(count)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("selection")


def check_figures(selection: RequestSelection) -> None:
    """The figures are those of the requests, which come out the same each time."""
    requests = list(selection)
    assert requests == list(selection)
    assert len(selection) == selection.count == len(requests)
    assert selection.first_index == requests[0].index
    assert selection.span_s == requests[-1].arrival_s - requests[0].arrival_s
    assert selection.prompt_tokens_mean == sum(r.prompt_tokens for r in requests) / len(requests)
    assert selection.output_tokens_mean == sum(r.output_tokens for r in requests) / len(requests)
    assert selection.longest_tokens == max(r.prompt_tokens + r.output_tokens for r in requests)


@settings(deadline=None)
@given(
    gaps=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    start=st.integers(0, 5),
    num_requests=st.none() | st.integers(1, 50),
    rate=st.none() | st.sampled_from([0.25, 3.0]),
    share=st.none() | st.floats(0.01, 1),
    seed=st.integers(0, 2**63 - 1),
    lengths=st.none() | st.just(11),
    timed=st.booleans(),
)
def test_figures(
    folder: Path,
    gaps: list[int],
    start: int,
    num_requests: int | None,
    rate: float | None,
    share: float | None,
    seed: int,
    lengths: int | None,
    timed: bool,
) -> None:
    ticks = (np.cumsum(gaps) * 10**9).tolist()
    trace = (
        vidur(folder / "t", [(tick, place % 7 + 1, place % 5 + 1) for place, tick in enumerate(ticks)])
        if timed
        else untimed(folder / "u", len(gaps))
    )
    window = gaps[start:] if num_requests is None else gaps[start : start + num_requests]
    if not window:
        return
    sample = None if share is None else max(1, int(share * len(window)))
    count = len(window) if sample is None else sample
    options = {"start": start, "sample": sample, "rate": rate, "output_tokens": lengths, "seed": seed}
    try:
        selection = select_requests(trace, num_requests=num_requests, **options)  # type: ignore[arg-type]
    except SettingError:
        chosen = select_requests(trace, num_requests=num_requests, **{**options, "rate": None})  # type: ignore[arg-type]
        assert timed
        assert rate is not None
        assert chosen.span_s == 0
        return
    check_figures(selection)
    assert selection.count == count
    requests = list(selection)
    assert requests[0].arrival_s == 0
    assert [r.index for r in requests] == sorted({r.index for r in requests})
    if timed and rate is None:
        assert [r.arrival_s for r in requests] == [
            (ticks[r.index] - ticks[requests[0].index]) / 1e9 for r in requests
        ]
    if timed and rate is not None and count > 1:
        assert selection.span_s == pytest.approx((count - 1) / rate)
    if not timed and rate is None:
        assert selection.span_s == 0


def test_a_sample_is_uniform_over_subsets(tmp_path: Path) -> None:
    trace = steady(tmp_path / "trace", 7)
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(2000):
        chosen = select_requests(trace, num_requests=5, start=1, sample=2, seed=seed)
        seen[tuple(request.index for request in chosen)] += 1
    assert set(seen) == set(combinations(range(1, 6), 2))
    # χ² with 9 degrees of freedom exceeds 27.9 in one of a thousand cases; the seeds are fixed.
    assert sum((count - 200) ** 2 / 200 for count in seen.values()) < 27.9


def test_a_sample_keeps_times_and_the_seed_decides(tmp_path: Path) -> None:
    trace = steady(tmp_path / "trace", 100)
    chosen = select_requests(trace, num_requests=None, start=10, sample=20, time_scale=0.5, seed=3)
    assert [r.arrival_s for r in chosen] == [(r.index - chosen.first_index) / 2 for r in chosen]
    assert [r.prompt_tokens for r in chosen] == [r.index + 1 for r in chosen]
    assert chosen.remarks == ("20 of 90 requests, drawn at random (seed 3)",)
    again = select_requests(trace, num_requests=None, start=10, sample=20, time_scale=0.5, seed=3)
    other = select_requests(trace, num_requests=None, start=10, sample=20, time_scale=0.5, seed=4)
    assert list(again) == list(chosen) != list(other)
    everything = select_requests(trace, num_requests=None, sample=100)
    assert [r.index for r in everything] == list(range(100))


def test_poisson_arrivals(tmp_path: Path) -> None:
    trace = untimed(tmp_path / "trace", 20_000)  # several batches: the draws must not begin anew in each
    chosen = select_requests(trace, num_requests=None, rate=4.0, seed=1)
    arrivals = np.array([request.arrival_s for request in chosen])
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0
    assert gaps.min() > 0
    assert len(np.unique(gaps)) > 19_900
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.03)
    # Kolmogorov and Smirnov: the largest distance of an exponential sample of this size, 99 times of 100.
    steps = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(1 - np.exp(-4 * np.sort(gaps)) - steps).max() < 1.63 / np.sqrt(len(gaps))
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    assert chosen.remarks[-1] == (
        "the trace has no arrival times; they are ASSUMED: Poisson at 4 requests/s (seed 1)"
    )
    short = [r.arrival_s for r in select_requests(trace, num_requests=10, rate=4.0, seed=1)]
    assert short == arrivals[:10].tolist()
    faster = [r.arrival_s for r in select_requests(trace, num_requests=10, rate=8.0, seed=1)]
    assert faster == pytest.approx(arrivals[:10] / 2)
    other = [r.arrival_s for r in select_requests(trace, num_requests=10, rate=4.0, seed=2)]
    assert other[1:] != short[1:]


def test_times_that_are_not_there_cannot_be_scaled(tmp_path: Path) -> None:
    trace = untimed(tmp_path / "trace", 3)
    with pytest.raises(
        SettingError, match=r"time_scale = 2, but .*trace has no arrival times to scale. Give a"
    ):
        select_requests(trace, num_requests=None, time_scale=2.0)
    with pytest.raises(
        SettingError, match=r"--rate is 1e-12: request 2 of .* would arrive at .* greater one"
    ):
        select_requests(trace, num_requests=None, rate=1e-12)
    with pytest.raises(SettingError, match=r"--rate is 1e-315: request 2 of .* would arrive at inf s"):
        select_requests(trace, num_requests=None, rate=1e-315)
    assert select_requests(trace, num_requests=None, rate=1 / MAX_SPAN_S * 10).span_s < MAX_SPAN_S


@settings(deadline=None)
@given(keep=st.lists(st.booleans(), min_size=30, max_size=30), rate=st.none() | st.just(2.0))
def test_parts(folder: Path, keep: list[bool], rate: float | None) -> None:
    whole = select_requests(steady(folder / "p", 40), num_requests=30, start=5, rate=rate, prompt_tokens=3)
    mask = np.array(keep)
    if not any(keep):
        with pytest.raises(SettingError, match="no request is left of the 30 selected ones of"):
            whole.part(mask)
        return
    part = whole.part(mask)
    check_figures(part)
    assert list(part) == [request for request, kept in zip(whole, keep, strict=True) if kept]
    assert part.remarks == whole.remarks
    with pytest.raises(ValueError, match="whole selection"):
        part.part(mask)
    with pytest.raises(ValueError, match="whole selection"):
        whole.part(mask[1:])


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    trace = steady(tmp_path / "trace", 10)
    chosen = select_requests(trace, num_requests=None)
    sampled = select_requests(trace, num_requests=None, sample=9)
    steady(tmp_path / "trace", 6)
    with pytest.raises(
        TraceError, match=r"the file changed while it was in use \(10 requests before, 6 now\)"
    ):
        list(chosen)
    with pytest.raises(TraceError, match="the file changed"):
        list(sampled)


def test_two_readers_do_not_disturb_each_other(tmp_path: Path) -> None:
    chosen = select_requests(steady(tmp_path / "trace", 9), num_requests=None)
    assert [(one.index, other.index) for one, other in zip(chosen, chosen, strict=True)] == [
        (place, place) for place in range(9)
    ]

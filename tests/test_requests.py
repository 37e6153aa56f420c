"""Request traces: every format and container gives the same requests; selection; the real traces."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from finemoe.errors import SettingError, TraceError
from finemoe.traces.requests import Request, RequestTrace, open_requests, select_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from request_writers import COLUMNS, Look, Rows, any_look, write_parquet, write_text
from shared_data import shared

AZURE_START = 1_700_158_546_680_590_000  # 2023-11-16 18:15:46.68059


@st.composite
def tables(draw: st.DrawFn, start: int | None = None, step: int = 100) -> Rows:
    """Valid traces in time order, equal times included, with times in multiples of `step` ns."""
    count = draw(st.integers(1, 30))
    tick = draw(st.just(0) | st.integers(0, 2 * 10**9)) * 10**9 if start is None else start
    rows = []
    for _ in range(count):
        tick += draw(st.sampled_from([0, 1, 12_345_678, 10**9, 86_400 * 10**7])) * step
        tokens = st.integers(1, 2**31) | st.integers(1, 3000)
        rows.append((tick, draw(tokens), draw(tokens)))
    return rows


looks = any_look(zone=st.sampled_from(["", "Z", "+00:00", "+0130", "-08:00"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("requests")


def check(trace: RequestTrace, rows: Rows, batch_rows: int = 8192) -> None:
    """The trace's columns are exactly these rows, and its batches no longer than asked for."""
    batches = list(trace.batches(batch_rows))
    assert all(0 < len(batch) <= batch_rows for batch in batches)
    read = [
        (arrival_s, prompt, output)
        for batch in batches
        for arrival_s, prompt, output in zip(
            batch.arrival_s.tolist(), batch.prompt_tokens.tolist(), batch.output_tokens.tolist(), strict=True
        )
    ]
    assert read == [((tick - rows[0][0]) / 1e9, prompt, output) for tick, prompt, output in rows]
    assert {batch.prompt_tokens.dtype for batch in batches} == {np.dtype(np.int64)}
    assert {batch.arrival_s.dtype for batch in batches} == {np.dtype(np.float64)}


@settings(deadline=None)
@given(rows=tables(), form=st.sampled_from(list(COLUMNS)), look=looks, batch=st.integers(1, 40))
def test_text_round_trip(folder: Path, rows: Rows, form: str, look: Look, batch: int) -> None:
    path = folder / "trace.parquet"  # a misleading name on purpose
    write_text(path, form, rows, look)
    trace = open_requests(path)
    assert trace.format == form
    assert not trace.synthetic
    check(trace, rows, batch)


@settings(deadline=None)
@given(
    rows=tables(start=AZURE_START),
    form=st.sampled_from(list(COLUMNS)),
    time_type=st.sampled_from(["text", "dictionary", "dates", "zoned dates"]),
    count_type=st.sampled_from(
        [pa.int64(), pa.uint32(), pa.uint64(), pa.float64(), pa.string(), pa.large_string()]
    ),
    batch=st.integers(1, 40),
)
def test_parquet_round_trip(
    folder: Path, rows: Rows, form: str, time_type: str, count_type: pa.DataType, batch: int
) -> None:
    path = folder / "trace.csv"
    write_parquet(path, form, rows, time_type, count_type)
    check(open_requests(path), rows, batch)


@settings(deadline=None)
@given(rows=tables(start=0), form=st.sampled_from(list(COLUMNS)))
def test_parquet_with_times_as_numbers(folder: Path, rows: Rows, form: str) -> None:
    path = folder / "numbers"
    write_parquet(path, form, rows, "number", pa.int64())
    check(open_requests(path), rows)


def test_unix_seconds_keep_the_nanosecond(tmp_path: Path) -> None:
    path = tmp_path / "unix.csv"
    path.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n1700000000.1234567,1,1\n1700000000.123456899,2.0,2e3\n"
    )
    check(open_requests(path), [(1_700_000_000_123_456_700, 1, 1), (1_700_000_000_123_456_899, 2, 2000)])


def test_spaces_and_times_before_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "# a comment\narrived_at, num_prefill_tokens, num_decode_tokens\n-1.5, 3, 4\n +.5 , 5 , 6\n"
    )
    check(open_requests(path), [(-1_500_000_000, 3, 4), (500_000_000, 5, 6)])


def test_a_csv_comment_labels_a_trace_synthetic(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("# SYNTHETIC, made by hand\narrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n")
    assert open_requests(path).synthetic


@settings(deadline=None)
@given(rows=st.permutations([(5, 1, 1), (5, 2, 1), (0, 3, 1), (7, 4, 1), (7, 5, 1), (2, 6, 1)]))
def test_sort_is_stable(folder: Path, rows: Rows) -> None:
    path = folder / "unsorted.csv"
    write_text(path, "vidur", rows, Look())
    check(open_requests(path, sort=True), sorted(rows, key=lambda row: row[0]), batch_rows=4)


def test_batches_come_before_the_file_is_read(tmp_path: Path) -> None:
    """Row 500,000 is bad: those before it are delivered, with a part of the file in memory."""
    path = tmp_path / "long.csv.gz"
    good = "".join(f"{row}.25,{row % 4000 + 1},{row % 1000 + 1}\n" for row in range(1, 500_000))
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + good + "500000.0,0,1\n"
    path.write_bytes(gzip.compress(text.encode(), 1))
    del good
    before = pa.total_allocated_bytes()
    batches = open_requests(path).batches(1000)
    seen = most = 0
    for batch in islice(batches, 300):
        seen += len(batch)
        most = max(most, pa.total_allocated_bytes() - before)
    assert seen > 250_000
    # Arrow holds a few blocks of 1 MiB and their cells at a time.
    assert most < 8 << 20 < len(text)
    with pytest.raises(TraceError, match="row 500000, column num_prefill_tokens: zero tokens"):
        list(batches)


def vidur(tmp_path: Path, rows: Rows) -> RequestTrace:
    write_text(tmp_path / "trace.csv", "vidur", rows, Look())
    return open_requests(tmp_path / "trace.csv")


ROWS = [(second * 10**9, second + 10, second + 20) for second in (5, 6, 8, 12, 20)]


def test_select_a_window(tmp_path: Path) -> None:
    trace = vidur(tmp_path, ROWS)
    assert list(select_requests(trace, num_requests=3, start=1)) == [
        Request(1, 0.0, 16, 26),
        Request(2, 2.0, 18, 28),
        Request(3, 6.0, 22, 32),
    ]
    assert [request.index for request in select_requests(trace, num_requests=None)] == [0, 1, 2, 3, 4]
    assert [request.index for request in select_requests(trace, num_requests=9, start=3)] == [3, 4]


def test_scale_and_override(tmp_path: Path) -> None:
    trace = vidur(tmp_path, ROWS)
    chosen = list(
        select_requests(trace, num_requests=2, start=2, time_scale=0.25, prompt_tokens=7, output_tokens=9)
    )
    assert chosen == [Request(2, 0.0, 7, 9), Request(3, 1.0, 7, 9)]


def test_rate_is_the_mean_rate_of_the_selected_requests(tmp_path: Path) -> None:
    chosen = list(select_requests(vidur(tmp_path, ROWS), num_requests=4, rate=6.0))
    assert [request.arrival_s for request in chosen] == pytest.approx([0, 0.5 / 7, 1.5 / 7, 0.5])
    alone = list(select_requests(vidur(tmp_path, ROWS), num_requests=1, start=4, rate=6.0))
    assert alone == [Request(4, 0.0, 30, 40)]


@settings(deadline=None)
@given(rows=tables(), start=st.integers(0, 40), count=st.none() | st.integers(1, 40))
def test_selection_equals_slicing(folder: Path, rows: Rows, start: int, count: int | None) -> None:
    write_text(folder / "slice.csv", "azure", rows, Look())
    trace = open_requests(folder / "slice.csv")
    expected = rows[start:] if count is None else rows[start : start + count]
    if not expected:
        with pytest.raises(
            TraceError, match=rf"start = {start}, but the trace has {len(rows)} requests.*below"
        ):
            select_requests(trace, num_requests=count, start=start)
        return
    chosen = select_requests(trace, num_requests=count, start=start)
    assert list(chosen) == [
        Request(start + place, (tick - expected[0][0]) / 1e9, prompt, output)
        for place, (tick, prompt, output) in enumerate(expected)
    ]


def test_selection_stops_reading(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "1,1,1\n" * 10_000 + "2,-1,1\n"
    path.write_text(text)
    assert len(list(select_requests(open_requests(path), num_requests=8000))) == 8000
    with pytest.raises(TraceError, match="row 10001"):
        select_requests(open_requests(path), num_requests=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_requests": 0}, "num_requests = 0: must be 1 to"),
        ({"start": -1}, "start = -1: must be 0 to"),
        ({"time_scale": 0.0}, "time_scale = 0: must be positive and finite"),
        ({"time_scale": float("nan")}, "time_scale = nan"),
        ({"rate": float("inf")}, "rate = inf: must be positive and finite"),
        ({"rate": 1.0, "time_scale": 2.0}, "rate = 1 and time_scale = 2: give one of them"),
        ({"prompt_tokens": 0}, "prompt_tokens = 0"),
        ({"output_tokens": 2**32}, "output_tokens = 4294967296"),
        ({"sample": 0}, "sample = 0: must be 1 to"),
        ({"sample": 6}, "sample = 6, but only 5 requests of .* are selected. Give at most 5"),
        ({"sample": 3, "num_requests": 2}, "sample = 3, but only 2 requests"),
        ({"seed": -1}, "seed = -1: must be 0 to"),
        ({"time_scale": 1e9}, "--time-scale is 1e\\+09: request 4 of .* would arrive at 1.5e\\+10 s"),
        ({"time_scale": 1e308}, "--time-scale is 1e\\+308: request 4 of .* would arrive at inf s"),
        ({"rate": 1e-315}, "--rate is 1e-315: request 4 of .* would arrive at inf s"),
        ({"rate": 1e-10}, "--rate is 1e-10: request 4 of .* would arrive at 4e\\+10 s"),
    ],
)
def test_bad_selections_are_refused_at_once(tmp_path: Path, options: dict[str, float], message: str) -> None:
    arguments: dict[str, object] = {"num_requests": None, **options}
    with pytest.raises(SettingError, match=message):
        select_requests(vidur(tmp_path, ROWS), **arguments)  # type: ignore[arg-type]


def test_no_rate_for_requests_that_arrive_at_once(tmp_path: Path) -> None:
    trace = vidur(tmp_path, [(0, 1, 1), (0, 2, 2)])
    with pytest.raises(SettingError, match=r"rate = 2: the 2 selected requests .* arrive at once"):
        select_requests(trace, num_requests=2, rate=2.0)


def columns(trace: RequestTrace) -> Iterator[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    batches = list(trace.batches())
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        yield np.concatenate([getattr(batch, name) for batch in batches])


def test_the_real_azure_trace_and_vidurs_copy_agree() -> None:
    azure = list(columns(open_requests(shared("requests/AzureLLMInferenceTrace_conv.csv"))))
    copy = list(columns(open_requests(shared("requests/vidur_splitwise_conv.csv"))))
    assert len(azure[0]) == 19_366
    assert azure[0][1] == 4.314579
    assert azure[0][-1] == pytest.approx(3501.721937, abs=1e-9)
    np.testing.assert_allclose(azure[0], copy[0], rtol=0, atol=1e-6)  # Vidur's file has six digits
    np.testing.assert_array_equal(azure[1], copy[1])
    np.testing.assert_array_equal(azure[2], copy[2])


def test_the_real_mooncake_trace() -> None:
    trace = open_requests(shared("requests/mooncake_conversation_trace.jsonl"))
    arrival_s, prompt, output = columns(trace)
    assert (trace.format, len(arrival_s)) == ("mooncake", 12_031)
    assert (arrival_s[0], arrival_s[-1]) == (0.0, 3536.999)
    assert (prompt[0], output[0]) == (6758, 500)
    assert prompt.mean() == pytest.approx(12_035.06, abs=0.01)

"""Statistics of a request trace, and its conversion to Parquet."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finemoe.errors import TraceError
from finemoe.traces.request_info import (
    GAP_LAGS,
    QUANTILE_GRID,
    Distribution,
    TraceInfo,
    convert_requests,
    trace_info,
)
from finemoe.traces.requests import RequestTrace, open_requests
from request_writers import COLUMNS, Look, Rows, write_text
from scipy.stats import spearmanr
from shared_data import shared

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def test_a_trace_small_enough_to_work_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "10,100,1\n11,300,2\n14,200,4\n")
    info = trace_info(path)
    assert (info.path, info.format, info.container, info.synthetic) == (str(path), "vidur", "csv", False)
    assert (info.requests, info.span_s, info.rate_per_s, info.gap_cv) == (3, 4.0, 0.5, 0.5)
    assert info.gap_s is not None
    assert (info.gap_s.mean, info.gap_s.min, info.gap_s.p50, info.gap_s.max) == (2.0, 1.0, 2.0, 3.0)
    prompt = info.prompt_tokens
    assert (prompt.mean, prompt.min, prompt.p50, prompt.max) == (200.0, 100.0, 200.0, 300.0)
    assert (prompt.p90, prompt.p99) == pytest.approx((280.0, 298.0))
    assert info.length_rank_correlation == pytest.approx(0.5)
    assert info.gap_rank_correlation == (None, None, None)
    assert msgspec.json.decode(msgspec.json.encode(info), type=TraceInfo) == info


def test_one_request_has_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "10,100,1\n")
    info = trace_info(path)
    assert (info.requests, info.span_s, info.rate_per_s, info.gap_cv, info.gap_s) == (
        1,
        0.0,
        None,
        None,
        None,
    )
    assert info.length_rank_correlation is None


def test_simultaneous_requests_have_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "10,100,1\n10,100,1\n")
    info = trace_info(path)
    assert (info.rate_per_s, info.gap_cv) == (None, None)


@pytest.mark.parametrize("seed", range(5))
def test_statistics_against_numpy_and_scipy(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = np.stack(
        [rng.integers(0, 300, 400) * 10**8, rng.integers(1, 50, 400), rng.integers(1, 9, 400)], 1
    )
    rows: Rows = [(tick, prompt, output) for tick, prompt, output in table.tolist()]
    path = tmp_path / "statistics.jsonl"
    write_text(path, "mooncake", rows, Look())
    info = trace_info(path, sort=True)
    ordered = np.array(sorted(rows, key=lambda row: row[0]))
    gaps = np.diff(ordered[:, 0]) / 1e9
    assert info.requests == len(rows)
    assert info.rate_per_s == pytest.approx(1 / gaps.mean())
    assert info.gap_cv == pytest.approx(gaps.std() / gaps.mean())
    for lag, correlation in zip(GAP_LAGS, info.gap_rank_correlation, strict=True):
        assert correlation == pytest.approx(spearmanr(gaps[:-lag], gaps[lag:]).statistic, abs=1e-9)
    assert info.length_rank_correlation == pytest.approx(spearmanr(ordered[:, 1], ordered[:, 2]).statistic)
    assert info.prompt_tokens.quantiles == pytest.approx(np.quantile(ordered[:, 1], QUANTILE_GRID))
    assert info.output_tokens.mean == pytest.approx(ordered[:, 2].mean())


def records(trace: RequestTrace) -> list[tuple[int, int, int]]:
    return [
        row
        for batch in trace.batches()
        for row in zip(
            batch.ticks.tolist(), batch.prompt_tokens.tolist(), batch.output_tokens.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize("form", list(COLUMNS))
def test_convert_keeps_every_request(tmp_path: Path, form: str) -> None:
    rows = [(tick * 123_456_789_100, tick % 97 + 1, tick % 31 + 1) for tick in range(1000)]
    write_text(tmp_path / "in", form, rows, Look(gzipped=True, extra_column=True))
    info = convert_requests(tmp_path / "in", tmp_path / "out.parquet")
    assert info == trace_info(tmp_path / "in")
    copy = open_requests(tmp_path / "out.parquet")
    assert (copy.format, copy.layout.container, copy.synthetic) == (form, "parquet", False)
    assert records(copy) == rows
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert schema.names == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    assert schema.types == [pa.timestamp("ns"), pa.int64(), pa.int64()]
    assert sorted(os.listdir(tmp_path)) == ["in", "out.parquet"]


def test_convert_sorts_and_keeps_the_label(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("# SYNTHETIC\n" + HEADER + "3,1,1\n2,2,2\n3,3,3\n")
    info = convert_requests(tmp_path / "in", tmp_path / "out.parquet", sort=True)
    assert info.synthetic
    copy = open_requests(tmp_path / "out.parquet")
    assert copy.synthetic
    assert records(copy) == [(2 * 10**9, 2, 2), (3 * 10**9, 1, 1), (3 * 10**9, 3, 3)]
    again = convert_requests(tmp_path / "out.parquet", tmp_path / "again.parquet")
    assert again.synthetic
    assert open_requests(tmp_path / "again.parquet").synthetic


def test_convert_is_deterministic_and_replaces(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(HEADER + "3,1,1\n4,2,2\n")
    (tmp_path / "b.parquet").write_text("PAR1, an older file")
    convert_requests(tmp_path / "in", tmp_path / "a.parquet")
    convert_requests(tmp_path / "in", tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_a_failed_conversion_leaves_the_old_file_alone(tmp_path: Path) -> None:
    # The bad row comes after the first part is written.
    (tmp_path / "in").write_text(HEADER + "3,1,1\n" * 200_000 + "4,0,2\n")
    (tmp_path / "out.parquet").write_text("PAR1, an older file")
    with pytest.raises(TraceError, match=r"/in: row 200001, column num_prefill_tokens: zero tokens"):
        convert_requests(tmp_path / "in", tmp_path / "out.parquet")
    assert (tmp_path / "out.parquet").read_text() == "PAR1, an older file"
    assert sorted(os.listdir(tmp_path)) == ["in", "out.parquet"]


def test_convert_refuses_its_own_source(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_text(HEADER + "3,1,1\n")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    for name in ("in", "link", "hard", "../" + tmp_path.name + "/in"):
        with pytest.raises(
            TraceError, match=r"source and destination are the same file. Choose another name"
        ):
            convert_requests(source, tmp_path / name)
    assert source.read_text() == HEADER + "3,1,1\n"


def test_convert_to_an_impossible_place(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(HEADER + "3,1,1\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match=r"folder: the destination is a directory. Name a file in it"):
        convert_requests(tmp_path / "in", tmp_path / "folder")
    with pytest.raises(TraceError, match=r"out.parquet: cannot be written .*No such file.*Check the folder"):
        convert_requests(tmp_path / "in", tmp_path / "absent" / "out.parquet")
    with pytest.raises(TraceError, match=r"out.parquet: cannot be written .*Not a directory"):
        convert_requests(tmp_path / "in", tmp_path / "in" / "out.parquet")
    assert sorted(os.listdir(tmp_path)) == ["folder", "in"]


def test_the_real_azure_trace(tmp_path: Path) -> None:
    info = convert_requests(shared("requests/AzureLLMInferenceTrace_conv.csv"), tmp_path / "azure.parquet")
    assert info.requests == 19_366
    assert info.span_s == pytest.approx(3501.721937, abs=1e-9)
    assert info.rate_per_s == pytest.approx(5.53, abs=0.005)

    def headline(lengths: Distribution) -> list[int]:
        return [round(value) for value in (lengths.mean, lengths.p50, lengths.max)]

    assert headline(info.prompt_tokens) == [1155, 1020, 14050]
    assert headline(info.output_tokens) == [211, 129, 1000]
    copy = trace_info(tmp_path / "azure.parquet")
    assert msgspec.structs.replace(copy, path=info.path, container="csv") == info

"""The shipped synthetic sample: it can be made again, and has the distribution of the trace it stands for."""

from __future__ import annotations

from pathlib import Path

import finemoe.traces
import numpy as np
import pyarrow.parquet as pq
import pytest
from finemoe.traces import azure_sample
from finemoe.traces.request_info import QUANTILE_GRID, TraceInfo, trace_info
from finemoe.traces.requests import RequestBatch, open_requests
from shared_data import shared

SAMPLE = Path(finemoe.traces.__file__).parent / "samples" / "azure_conv_synthetic.parquet"


def test_the_shipped_file_comes_from_the_generator(tmp_path: Path) -> None:
    again = tmp_path / "again.parquet"
    azure_sample.write_sample(again, np.random.default_rng(azure_sample.SAMPLE_SEED))
    shipped, made = pq.ParquetFile(SAMPLE), pq.ParquetFile(again)
    assert shipped.schema_arrow.equals(made.schema_arrow, check_metadata=True)
    assert shipped.read().equals(made.read())
    if shipped.metadata.created_by == made.metadata.created_by:  # the same Parquet writer
        assert SAMPLE.read_bytes() == again.read_bytes()
    assert SAMPLE.stat().st_size < 100_000


def test_the_sample_is_labelled() -> None:
    assert open_requests(SAMPLE).synthetic
    metadata = pq.read_schema(SAMPLE).metadata
    assert metadata[b"finemoe.evidence"] == b"SYNTHETIC"
    assert b"not records" in metadata[b"finemoe.source"]
    assert b"Azure/AzurePublicDataset, CC-BY-4.0" in metadata[b"finemoe.source"]


def shares_below(
    values: np.ndarray[tuple[int], np.dtype[np.float64]], bounds: tuple[float, ...]
) -> list[float]:
    """Share of values at or below each bound."""
    return [float(np.mean(values <= bound)) for bound in bounds]


def check_distribution(batch: RequestBatch, tolerance: float) -> None:
    gaps = np.diff(batch.ticks) / 1e9
    for values, quantiles in (
        (batch.prompt_tokens.astype(np.float64), azure_sample.PROMPT_TOKENS),
        (batch.output_tokens.astype(np.float64), azure_sample.OUTPUT_TOKENS),
        (gaps, azure_sample.GAP_S),
    ):
        assert values.min() >= quantiles[0]
        assert values.max() <= quantiles[-1]
        np.testing.assert_allclose(shares_below(values, quantiles), QUANTILE_GRID, atol=tolerance)


def test_the_sample_has_the_published_quantiles() -> None:
    (batch,) = open_requests(SAMPLE).batches()
    assert len(batch) == azure_sample.SAMPLE_REQUESTS == 2000
    check_distribution(
        batch, tolerance=0.035
    )  # the 99 % band of Kolmogorov and Smirnov at n = 2,000 is 0.036
    info = trace_info(SAMPLE)
    assert info.gap_s is not None
    assert info.gap_s.mean == pytest.approx(azure_sample.GAP_MEAN_S, rel=0.05)
    assert info.gap_cv == pytest.approx(azure_sample.GAP_CV, abs=0.05)
    assert info.length_rank_correlation == pytest.approx(azure_sample.LENGTH_RANK_CORRELATION, abs=0.05)


def test_a_long_sample_has_the_correlations_too() -> None:
    batch = azure_sample.sample_requests(60_000, np.random.default_rng(1))
    check_distribution(batch, tolerance=0.02)
    gaps = np.diff(batch.ticks).argsort().argsort().astype(np.float64)
    for lag, expected in zip((1, 10, 100), azure_sample.GAP_RANK_CORRELATION, strict=True):
        assert np.corrcoef(gaps[:-lag], gaps[lag:])[0, 1] == pytest.approx(expected, abs=0.02)
    # Drift bunches arrivals: variance / mean of the counts per minute is 1 for Poisson, 16 in the trace.
    counts = np.bincount((batch.arrival_s / 60).astype(np.int64))[:-1]
    assert 8 < counts.var() / counts.mean() < 24


def test_the_same_generator_gives_the_same_sample() -> None:
    first = azure_sample.sample_requests(50, np.random.default_rng(3))
    again = azure_sample.sample_requests(50, np.random.default_rng(3))
    other = azure_sample.sample_requests(50, np.random.default_rng(4))
    assert first.ticks.tolist() == again.ticks.tolist() != other.ticks.tolist()


@pytest.fixture(scope="module")
def azure() -> TraceInfo:
    return trace_info(shared("requests/AzureLLMInferenceTrace_conv.csv"))


def test_the_constants_are_those_of_the_real_trace(azure: TraceInfo) -> None:
    assert azure.gap_s is not None
    assert azure.prompt_tokens.quantiles == pytest.approx(azure_sample.PROMPT_TOKENS, abs=0.01)
    assert azure.output_tokens.quantiles == pytest.approx(azure_sample.OUTPUT_TOKENS, abs=0.01)
    assert azure.gap_s.quantiles == pytest.approx(azure_sample.GAP_S, abs=1e-6)
    assert azure.gap_s.mean == pytest.approx(azure_sample.GAP_MEAN_S, abs=1e-6)
    assert azure.gap_cv == pytest.approx(azure_sample.GAP_CV, abs=0.001)
    assert azure.length_rank_correlation == pytest.approx(azure_sample.LENGTH_RANK_CORRELATION, abs=0.001)
    assert azure.gap_rank_correlation == pytest.approx(azure_sample.GAP_RANK_CORRELATION, abs=0.001)

"""A synthetic request trace with the distribution of the Azure 2023 conversation trace.

The constants are statistics, not records, of AzureLLMInferenceTrace_conv.csv (publisher:
Azure/AzurePublicDataset, licence CC-BY-4.0), as measured by ``finemoe trace info``:
`tests/test_requests_sample.py` measures them again where the trace is at hand. `write_sample` makes
`samples/azure_conv_synthetic.parquet` of them:

    python -m finemoe.traces.azure_sample traces/samples/azure_conv_synthetic.parquet

Lengths and gaps are drawn by inverse CDF, interpolated between the quantiles. A Gaussian copula carries the
dependence: prompt with output length (weak, 0.07), and each gap with those around it through a slowly
drifting load.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from scipy.special import ndtr, ndtri

from .request_files import EVIDENCE_KEY, SYNTHETIC
from .request_formats import SECOND
from .request_info import QUANTILE_GRID, parquet_schema, parquet_table
from .request_trace import RequestBatch

Floats = npt.NDArray[np.float64]

# Values at QUANTILE_GRID: 0, 1 %, 5 %, 10 %, ... 95 %, 99 %, 99.5 %, 99.9 %, 99.99 %, 100 %.
# fmt: off
PROMPT_TOKENS = (
    2, 29, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1876.25,
    2734.5, 4083, 4142, 4831, 6179.15, 7667.775, 14050,
)
OUTPUT_TOKENS = (
    7, 16, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 601,
    643.175, 954, 1000, 1000,
)
GAP_S = (
    0.000002, 0.000546, 0.006320, 0.016144, 0.026417, 0.036519, 0.048272, 0.060723, 0.073459, 0.087254,
    0.101942, 0.118424, 0.137612, 0.158680, 0.183170, 0.213606, 0.246733, 0.288826, 0.345918, 0.420656,
    0.565194, 0.889671,
    1.034205, 1.411171, 3.104313, 4.314579,
)
# fmt: on
GAP_MEAN_S = 0.180827
GAP_CV = 1.094
LENGTH_RANK_CORRELATION = 0.073
GAP_RANK_CORRELATION = (0.045, 0.028, 0.027)
"""Spearman's ρ of gaps 1, 10 and 100 requests apart."""

DRIFT_SHARE = 0.047
"""Share of the slowly drifting load in a gap's variance on the Gaussian scale. With DRIFT_REQUESTS it gives
rank correlations of 0.045, 0.044 and 0.033 at 1, 10 and 100 requests."""

DRIFT_REQUESTS = 300
"""Requests after which the drift's autocorrelation has fallen to 1/e."""

SAMPLE_REQUESTS = 2_000
SAMPLE_SEED = 7
"""A seed whose 2,000 requests come near the mean gap of the whole trace: drift moves it by a fifth."""


def sample_requests(count: int, rng: np.random.Generator) -> RequestBatch:
    """`count` requests, the first at 0 s. Times have the resolution of the Azure trace, 100 ns."""
    drift = _drift(_normal(rng, count), math.exp(-1 / DRIFT_REQUESTS))
    load = math.sqrt(DRIFT_SHARE) * drift + math.sqrt(1 - DRIFT_SHARE) * _normal(rng, count)
    ticks = np.cumsum(np.rint(_inverse(ndtr(load), GAP_S) * 1e7).astype(np.int64)) * 100
    ticks -= ticks[0]
    # Spearman's ρ of a Gaussian copula with correlation r is (6/π) asin(r/2).
    r = 2 * math.sin(math.pi / 6 * LENGTH_RANK_CORRELATION)
    prompt = _normal(rng, count)
    output = r * prompt + math.sqrt(1 - r * r) * _normal(rng, count)
    return RequestBatch(
        ticks / SECOND,
        np.rint(_inverse(ndtr(prompt), PROMPT_TOKENS)).astype(np.int64),
        np.rint(_inverse(ndtr(output), OUTPUT_TOKENS)).astype(np.int64),
        ticks,
    )


def write_sample(path: Path, rng: np.random.Generator) -> None:
    """Write SAMPLE_REQUESTS requests as Parquet with Azure's columns, labelled SYNTHETIC."""
    metadata = {
        EVIDENCE_KEY: SYNTHETIC.encode(),
        b"finemoe.source": b"finemoe.traces.azure_sample: drawn from published quantiles, not records, of "
        b"AzureLLMInferenceTrace_conv.csv (Azure/AzurePublicDataset, CC-BY-4.0)",
    }
    schema = parquet_schema(metadata)
    with pq.ParquetWriter(path, schema) as writer:
        writer.write_table(parquet_table(sample_requests(SAMPLE_REQUESTS, rng), schema))


def _normal(rng: np.random.Generator, count: int) -> Floats:
    # From uniforms: their stream is the one NumPy keeps stable, and the sample must come out the same for
    # everyone.
    drawn: Floats = ndtri(rng.random(count))
    return drawn


def _drift(shocks: Floats, keep: float) -> Floats:
    """First-order autoregression with unit variance."""
    drift = shocks.copy()
    for now in range(1, len(drift)):
        drift[now] = keep * drift[now - 1] + math.sqrt(1 - keep * keep) * shocks[now]
    return drift


def _inverse(uniform: Floats, quantiles: tuple[float, ...]) -> Floats:
    return np.interp(uniform, QUANTILE_GRID, quantiles)


if __name__ == "__main__":
    write_sample(Path(sys.argv[1]), np.random.default_rng(SAMPLE_SEED))

"""Traces far larger than memory: what a selection holds does not grow with the file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Peak resident memory of a fresh process before and after, in KiB; then what it counted.
PROGRAM = """
import sys
from finemoe.traces.requests import open_requests, select_requests

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

def read(path):
    trace = open_requests(path)
    whole = select_requests(trace, num_requests=None, prompts=True)
    half = select_requests(trace, num_requests=None, prompts=True, rate=2.0, sample=len(whole) // 2)
    return sum(1 for request in whole) + sum(1 for request in half)

read(sys.argv[1])  # imports, and the memory that Arrow keeps for reuse
before = peak()
counted = read(sys.argv[2])
print(before, peak(), counted)
"""


def vidur_csv(path: Path, count: int) -> None:
    with path.open("w") as file:
        file.write("arrived_at,num_prefill_tokens,num_decode_tokens\n")
        file.writelines(f"{place / 8},{place % 4000 + 1},{place % 1000 + 1}\n" for place in range(count))


def parquet(path: Path, count: int) -> None:
    """In one row group, as other programs write it."""
    names = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    places = np.arange(count)
    columns = [pa.array(places / 8), pa.array(places % 4000 + 1), pa.array(places % 1000 + 1)]
    pq.write_table(pa.table(columns, names=names), path, row_group_size=count, use_dictionary=False)


def sharegpt_array(path: Path, count: int) -> None:
    turns = [
        {"from": "human", "value": 'a prompt of "several" words, on one line\n' * 20},
        {"from": "gpt", "value": "an answer " * 80},
    ]
    element = json.dumps({"id": "x", "conversations": turns})
    with path.open("w") as file:
        file.write("[" + element)
        file.writelines("," + element for _ in range(count - 1))
        file.write("]")


def growth_mib(tmp_path: Path, write: Callable[[Path, int], None], small: int, large: int) -> float:
    """Peak memory of reading `large` requests above that of reading `small`."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    write(tmp_path / "small", small)
    write(tmp_path / "large", large)
    arguments = [str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True, timeout=250
    )
    before, after, counted = (int(word) for word in done.stdout.split())
    assert counted == large + large // 2
    return (after - before) / 1024


@pytest.mark.parametrize(
    ("write", "small", "large", "most_mib"),
    [
        (vidur_csv, 100_000, 600_000, 40),  # 110 MiB as a list of requests
        (parquet, 100_000, 600_000, 40),
        (sharegpt_array, 5_000, 24_000, 20),  # 33 MiB of text more
    ],
)
def test_memory_stays_flat(
    tmp_path: Path, write: Callable[[Path, int], None], small: int, large: int, most_mib: float
) -> None:
    assert growth_mib(tmp_path, write, small, large) < most_mib


@pytest.mark.long
@pytest.mark.parametrize(
    ("write", "count"), [(vidur_csv, 2_500_000), (parquet, 5_000_000), (sharegpt_array, 200_000)]
)
def test_memory_stays_flat_over_millions(
    tmp_path: Path, write: Callable[[Path, int], None], count: int
) -> None:
    """As a list of requests, 2.5 million take 480 MiB; the array is 350 MB."""
    assert growth_mib(tmp_path, write, 5_000 if write is sharegpt_array else 100_000, count) < 80

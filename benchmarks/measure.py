"""What the benchmarks share: single-threaded libraries, interleaved timing, the bare SimPy timeout."""

from __future__ import annotations

import os

# Before NumPy and torch are imported: their thread pools read these once. A core type forced from outside
# would hold the BLAS to older kernels than this processor has.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)

import platform
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import simpy

ROOT = Path(__file__).resolve().parents[1]


def machine() -> str:
    """Processor, cores and Python of this machine."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = [line.split(":", 1) for line in info.read_text().splitlines() if ":" in line]
        known = {key.strip(): value.strip() for key, value in fields}
        model = (
            f"{known.get('model name', model)} (family {known.get('cpu family')}, model {known.get('model')})"
        )
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def interleaved(
    contenders: Mapping[str, Callable[[], object]], repeats: int, in_a_row: int = 5
) -> dict[str, float]:
    """Least seconds of each contender over `repeats` turns of `in_a_row` calls.

    They take turns, so that a busy machine slows all of them alike; several calls in a row let each find its
    own data in the caches.
    """
    least = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, call in contenders.items():
            for _ in range(in_a_row):
                begin = time.perf_counter()
                call()
                least[name] = min(least[name], time.perf_counter() - begin)
    return least


def timeout_s(count: int = 200_000) -> float:
    """T: CPU seconds of one `yield env.timeout(1)` of a bare process."""
    env = simpy.Environment()

    def bare() -> Generator[simpy.Event, None, None]:
        for _ in range(count):
            yield env.timeout(1)

    env.process(bare())
    begin = time.process_time()
    env.run()
    return (time.process_time() - begin) / count


def median(values: list[float]) -> float:
    """Median of the repeats."""
    return statistics.median(values)

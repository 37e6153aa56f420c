"""What a run takes after its simulation has ended, and how long a user waits for the first sign of it.

The end: metrics, time series and files of made-up logs as long as those of the whole Azure conversation trace
at a batch of up to 32 (19,366 requests, 150,000 iterations), and the peak memory of the process. The decision
log is written earlier, as soon as its last iteration is over. Target: within one second.
The start: `finemoe-sim` on a terminal until its progress bar shows simulated time, for the whole of a given
trace. Target: within three seconds.
"""

from __future__ import annotations

import argparse
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from finemoe.serving.cells import CellKey
from finemoe.serving.logs import IterationLog, RequestLog
from finemoe.serving.metrics import summarize
from finemoe.serving.results import Results, ResultsWriter
from finemoe.serving.scheduler import Phase
from finemoe.serving.slo import parse_slo
from finemoe.serving.timeseries import time_series
from measure import ROOT, machine, median

END_TARGET_S, START_TARGET_S = 1.0, 3.0
LAYERS = 32


def made_logs(requests: int, iterations: int) -> tuple[RequestLog, IterationLog, float]:
    """Logs of that length and the seconds that they cover."""
    rng = np.random.default_rng(0)
    done, steps = RequestLog(), IterationLog()
    now = busy = 0.0
    for place in range(iterations):
        taken = 0.02 + 0.03 * rng.random()
        phase: Phase = "decode" if place % 8 else "prefill"
        steps.append(
            now,
            now + taken,
            phase,
            batch=32,
            tokens=32,
            activated=256,
            hits=100,
            late=3,
            misses=153,
            demand_bytes=153 * 352_321_536,
            stall_s=0.6 * taken,
            search_wait_s=0.0,
            compute_s=0.4 * taken,
            link_busy_start_s=busy,
            link_busy_end_s=busy + 3 * taken,
        )
        now, busy = now + taken, busy + 3 * taken
    for place, arrival in enumerate(np.sort(rng.random(requests)) * 0.9 * now):
        first = float(arrival) + 5.0 + rng.random()
        done.append(place, float(arrival), first - 1.0, first, first + 60 * rng.random(), 1000, 200, True)
    return done, steps, now


def end_s(done: RequestLog, steps: IterationLog, simulated_s: float) -> float:
    """Seconds from the logs to the committed results directory."""
    begin = time.perf_counter()
    key = CellKey("lru", "24GB", "rtx3090x6", None)
    run = summarize(
        key=key,
        expert_cache_bytes=24 * 10**9,
        requests=done,
        iterations=steps,
        counters=dict.fromkeys(
            ("prefetch_bytes", "useful_bytes", "wasted_bytes", "searches", "late_searches"), 1
        ),
        per_layer={name: np.ones((2, LAYERS), np.int64) for name in ("activated", "hits")},
        memory_bytes={"expert_slots": 1},
        busy_s={"link": simulated_s},
        devices=6,
        simulated_s=simulated_s,
        counted_s=simulated_s,
        wall_s=None,
        max_num_seqs=32,
        hit_rate_defined=True,
        offline=False,
        slo=parse_slo("ttft_p90<2s,tpot_p90<0.2s"),
    )
    series = time_series(done, steps, simulated_s=simulated_s, devices=6, hit_rate_defined=True)
    with tempfile.TemporaryDirectory() as folder:
        writer = ResultsWriter.replacing(Path(folder) / "results", ("lru-24GB",), {})
        writer.write_cell("lru-24GB", done, steps, series)
        writer.write_summary(Results(runs=(run,), config={}, trace={}, evidence={}, version=""), "")
        writer.commit()
        return time.perf_counter() - begin


def start_s(trace: Path) -> float:
    """Seconds from the start of the command to the first progress on its terminal."""
    leader, follower = pty.openpty()
    code = "from finemoe.cli.entry import simulate_main; simulate_main()"
    options = ["--trace", str(trace), "--num-requests", "all", "--max-num-seqs", "32"]
    shown = b""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", code, *options, "--output", f"{folder}/results"],
            stdout=follower,
            stderr=follower,
            env=os.environ | {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        os.close(follower)
        while b"s simulated" not in shown:
            if not select.select([leader], [], [], 60.0)[0]:
                raise RuntimeError("no progress within a minute")
            shown += os.read(leader, 4096)
        taken_s = time.perf_counter() - begin
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            if select.select([leader], [], [], 0.1)[0]:
                try:
                    os.read(leader, 4096)
                except OSError:  # the other end is closed
                    process.wait()
    os.close(leader)
    return taken_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trace", type=Path, default=ROOT / "traces" / "samples" / "azure_conv_synthetic.parquet"
    )
    parser.add_argument("--requests", type=int, default=19_366)
    parser.add_argument("--iterations", type=int, default=150_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    print(f"{machine()}; medians of {args.repeats}")
    done, steps, simulated_s = made_logs(args.requests, args.iterations)
    taken_s = median([end_s(done, steps, simulated_s) for _ in range(args.repeats)])
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    verdict = "met" if taken_s <= END_TARGET_S else f"MISSED: over {END_TARGET_S:g} s"
    print(
        f"end of a run   {taken_s:.2f} s for {len(done):,} requests, {len(steps):,} iterations, "
        f"{simulated_s:,.0f} s simulated; peak memory {peak_mb:.0f} MB: {verdict}"
    )
    taken_s = median([start_s(args.trace) for _ in range(args.repeats)])
    verdict = "met" if taken_s <= START_TARGET_S else f"MISSED: over {START_TARGET_S:g} s"
    print(f"first progress {taken_s:.2f} s after the start, on {args.trace.name}: {verdict}")


if __name__ == "__main__":
    main()

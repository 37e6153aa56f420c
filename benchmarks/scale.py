"""Cost per iteration at batch 1 and 32, and the whole Azure conversation trace.

T is a bare SimPy timeout, measured before and after every run in the same process; a cell's cost is the CPU
time of `finemoe.simulate` without imports, over its iterations and T. `--whole` serves all 19,366 requests in
a process per system, and states wall time, the highest resident memory, the seconds until the first progress
report and those from the last one to the results on disk.

Targets: 600 T an iteration at batch 1, 1,200 T at batch 32, loads included; 500 MB; 3 s; 1 s.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import ROOT, machine, timeout_s

TRACE = ROOT.parent / "shared" / "data" / "requests" / "AzureLLMInferenceTrace_conv.csv"
CELLS = ((1, 16, 600.0), (32, 200, 1200.0))  # batch, requests, target in T


def run_cell(trace: Path, policy: str, cache: str, batch: int, requests: int | str) -> dict[str, float]:
    """One run: iterations, loads, T per iteration, and the times of a whole run."""
    begin = time.perf_counter()
    from finemoe.serving.settings_file import resolve
    from finemoe.sim.plan import make_plan
    from finemoe.sim.run import run_plan

    before = timeout_s()
    progress: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        cpu_s = time.process_time()
        options = {
            "trace": trace,
            "policy": policy,
            "expert_cache": cache,
            "num_requests": requests,
            "max_num_seqs": batch,
            "decisions": "1000" if requests == "all" else "none",
        }
        plan = make_plan(resolve(options))
        run = run_plan(plan, Path(folder) / "results", lambda *_: progress.append(time.perf_counter())).runs[
            0
        ]
        end = time.perf_counter()
        cpu_s = time.process_time() - cpu_s
    unit_s = (before + timeout_s()) / 2
    loads = run.counters["demand_loads"] + run.counters["prefetch_loads"]
    return {
        "iterations": run.iterations,
        "requests": run.requests,
        "loads": loads / run.iterations,
        "preemptions": run.counters["preemptions"] / run.iterations,
        "cost_t": cpu_s / unit_s / run.iterations,
        "wall_s": end - begin,
        "first_s": progress[0] - begin,
        "last_s": end - progress[-1],
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "timeout_us": unit_s * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--policies", default="lru,finemoe")
    parser.add_argument("--caches", default="24GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a run in a process of its own, as JSON
    args = parser.parse_args()
    if args.one:
        policy, cache, batch, requests = args.one.split(",")
        count: int | str = "all" if requests == "all" else int(requests)
        print(json.dumps(run_cell(args.trace, policy, cache, int(batch), count)))
        return

    def measured(policy: str, cache: str, batch: int, requests: int | str) -> dict[str, float]:
        command = [sys.executable, __file__, "--trace", str(args.trace)]
        command += ["--one", f"{policy},{cache},{batch},{requests}"]
        found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return found

    print(machine())
    for cache in args.caches.split(","):
        for policy in args.policies.split(","):
            if args.whole:
                run = measured(policy, cache, 32, "all")
                print(
                    f"{policy} {cache}, whole trace, batch 32: {run['requests']:,} requests, "
                    f"{run['iterations']:,} iterations, {run['cost_t']:,.0f} T each "
                    f"({run['loads']:.0f} loads), wall {run['wall_s']:.0f} s, peak {run['peak_mb']:.0f} MB, "
                    f"first progress {run['first_s']:.2f} s, last progress to results {run['last_s']:.2f} s",
                    flush=True,
                )
                continue
            for batch, requests, target in CELLS:
                runs = [measured(policy, cache, batch, requests) for _ in range(args.repeats)]
                cost = sorted(run["cost_t"] for run in runs)[len(runs) // 2]
                verdict = "met" if cost <= target else f"MISSED: over {target:,.0f}"
                print(
                    f"{policy} {cache}, batch {batch}: {cost:,.0f} T an iteration "
                    f"({runs[0]['loads']:.0f} loads, {runs[0]['preemptions']:.0f} preemptions), {verdict}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

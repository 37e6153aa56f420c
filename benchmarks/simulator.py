"""Cost of the simulator at batch 1, in bare SimPy timeouts T measured beside every run.

One run is what `finemoe.simulate` does after the imports: reading the trace, making the routing, simulating,
metrics and writing the results. A cell's cost per layer is its CPU time over iterations × layers; its cost
per load is what it takes beyond the same system with every expert cached, over the loads it makes more.

Targets: at most 12 T per layer without loads, at most 5 T more per load. The budget of a cell is
12 T × layers + 5 T × loads.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from finemoe.serving.settings_file import resolve
from finemoe.sim.plan import make_plan
from finemoe.sim.run import run_plan
from measure import ROOT, machine, median, timeout_s

LAYER_TARGET, LOAD_TARGET = 12.0, 5.0
WHOLE = "1.0"


@dataclass
class Cell:
    """One configuration and what its repeats took, in T."""

    policy: str
    cache: str
    decisions: int
    layers: int = 0  # iterations × layers of one run
    loads: int = 0
    taken_t: list[float] = field(default_factory=list)

    @property
    def per_layer(self) -> float:
        """T per layer, loads included."""
        return median(self.taken_t) / self.layers

    @property
    def of_budget(self) -> float:
        """Share of 12 T × layers + 5 T × loads that the run takes."""
        return median(self.taken_t) / (LAYER_TARGET * self.layers + LOAD_TARGET * self.loads)

    def per_load(self, base: Cell) -> float:
        """T per load beyond `base`, of the repeats pairwise."""
        more = [mine - its for mine, its in zip(self.taken_t, base.taken_t, strict=True)]
        return median(more) / (self.loads - base.loads)


def run_once(cell: Cell, trace: Path, requests: int) -> None:
    """Run the cell once, with T measured before and after."""
    before = timeout_s()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        chosen = {
            "trace": trace,
            "policy": cell.policy,
            "expert_cache": cell.cache,
            "num_requests": requests,
            "max_num_seqs": 1,
            "decisions": cell.decisions,
        }
        plan = make_plan(resolve(chosen))
        run = run_plan(plan, Path(folder) / "results").runs[0]
        taken_s = time.process_time() - begin
    cell.layers = run.iterations * plan.model.layers
    cell.loads = run.counters["demand_loads"] + run.counters["prefetch_loads"]
    cell.taken_t.append(taken_s / ((before + timeout_s()) / 2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trace", type=Path, default=ROOT / "traces" / "samples" / "azure_conv_synthetic.parquet"
    )
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--caches", default="0.75,0.5,0.25,0.1", help="sizes below the whole model")
    args = parser.parse_args()

    sizes = args.caches.split(",")
    cells = [Cell("no-offload", WHOLE, decisions) for decisions in (0, 1000)]
    for policy in ("lru", "finemoe"):
        for decisions in (0, 1000):
            cells.append(Cell(policy, WHOLE, decisions))
        cells += [Cell(policy, size, decisions) for size in sizes for decisions in (0, 1000)]
    for _ in range(args.repeats):
        for cell in cells:
            run_once(cell, args.trace, args.requests)

    print(f"{machine()}; T = {timeout_s() * 1e6:.2f} µs; medians of {args.repeats} interleaved runs")
    print("| system | cache | decisions | layers | loads | loads/layer | T/layer | of budget | T/load | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    base: dict[tuple[str, int], Cell] = {}
    for cell in cells:
        head = (
            f"| {cell.policy} | {cell.cache} | {cell.decisions} | {cell.layers} | {cell.loads} "
            f"| {cell.loads / cell.layers:.2f} | {cell.per_layer:.1f} | {cell.of_budget:.0%} |"
        )
        if cell.cache == WHOLE:
            base[cell.policy, cell.decisions] = cell
            met = cell.per_layer <= LAYER_TARGET
            print(head, "| met |" if met else f"| MISSED: over {LAYER_TARGET:g} |")
        else:
            per_load = cell.per_load(base[cell.policy, cell.decisions])
            verdict = "met" if per_load <= LOAD_TARGET else f"MISSED: over {LOAD_TARGET:g}"
            print(head, f"{per_load:.1f} | {verdict} |")


if __name__ == "__main__":
    main()

"""What a preset's synthetic routing shows of the paper's motivation, beside what the paper says.

One trace of requests with the paper's mean lengths is made of each preset and analysed as `finemoe trace
analyze` does; the tracking ablation is served offline, as in the paper.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import finemoe
import msgspec
from finemoe.traces.routing_analysis import RoutingAnalysis, analyse_routing
from finemoe.traces.routing_file import write_routing
from finemoe.traces.routing_preset import load_preset
from finemoe.traces.synthetic import SyntheticRouting
from measure import ROOT

PRESETS = ("mixtral-8x7b", "qwen1.5-moe", "phi-3.5-moe")
PROMPT, OUTPUT = 37, 127  # LMSYS-Chat-1M's means
REQUESTS = 100
TRACE = ROOT / "traces" / "samples" / "azure_conv_synthetic.parquet"
ABLATION = ("hit-count", "speculate", "map-t", "map-ts", "map-tsd")


def curves(found: RoutingAnalysis) -> list[tuple[str, str, str]]:
    """Figure, what the paper says, what the trace says."""
    fine, coarse = (sum(bits) / len(bits) for bits in (found.entropy.fine, found.entropy.coarse))
    parts = {part.iterations: part.bits for part in found.entropy.aggregated}
    rise = (parts[16] - parts[1]) / (parts[64] - parts[1])
    seed = found.seeds[0]
    small, large = next(store for store in seed.stores if store.maps == 1000), seed.stores[-1]
    rows = [
        (
            "Fig. 3, fine entropy below coarse",
            "30 % or more",
            f"{1 - fine / coarse:.0%} ({fine:.2f}, {coarse:.2f} bits)",
        ),
        ("Fig. 3, rise to 64 iterations that 16 have", "flat after about 10", f"{rise:.0%}"),
        (
            "Fig. 4, hits at d = 1, 3, 6: fine",
            "above coarse, falling",
            ", ".join(f"{small.hits[d]:.2f}" for d in (1, 3, 6)),
        ),
        ("Fig. 4, the same: coarse", "", ", ".join(f"{seed.coarse[d]:.2f}" for d in (1, 3, 6))),
    ]
    for item in found.likeness:
        if item.level == "request":
            rows.append(
                (
                    f"Fig. 8, 9: Pearson, {item.search}, pairs and points",
                    "0.84 to 0.97",
                    f"{item.pairs:.2f}, {item.requests:.2f}",
                )
            )
    rows.append(
        (
            f"Fig. 16a, mean score of {small.maps:,} and {large.maps:,} maps",
            "flat past 1K",
            f"{small.mean_score:.3f}, {large.mean_score:.3f}",
        )
    )
    return rows


def ablation(model: str, requests: int) -> str:
    """Decode hit rates of the tracking ablation's systems, a quarter of the experts cached."""
    with tempfile.TemporaryDirectory() as folder:
        runs = finemoe.simulate(
            TRACE,
            model=model,
            policy=ABLATION,
            expert_cache=("0.25",),
            offline=True,
            num_requests=requests,
            prompt_tokens=PROMPT,
            output_tokens=OUTPUT,
            decisions=0,
            output=Path(folder) / "results",
        ).runs
    return ", ".join("n/a" if run.hit_rate is None else f"{run.hit_rate:.3f}" for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("presets", nargs="*", default=PRESETS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--ablation", type=int, default=40, help="requests of the ablation; 0: none")
    args = parser.parse_args()
    for name in args.presets:
        preset = load_preset(name)
        source = SyntheticRouting(preset, 0)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.parquet"
            meta = msgspec.structs.replace(source.meta, speculation=(1, 3, 6))
            write_routing(
                path, meta, (source.routing_for(i, PROMPT, OUTPUT, (1, 3, 6)) for i in range(args.requests))
            )
            found = analyse_routing(path, seeds=(0,), capacities=(1000, 8000))
        print(f"\n## {preset.model}\n\n| figure | paper | generated |\n|---|---|---|")
        for row in curves(found):
            print("| " + " | ".join(row) + " |")
        if args.ablation:
            print(
                f"| Fig. 14a, hit rates | {' < '.join(ABLATION)} | {ablation(preset.model, args.ablation)} |"
            )


if __name__ == "__main__":
    main()

"""Every system on the Azure conversation trace, for the paper's models and cache sizes, and on real routing.

Prints, per model, TPOT and service TTFT of each system and cache size, decode hit rates, and where an
iteration's time goes at one size: computing, waiting for experts, waiting for searches and staged prefetches.
Arrivals are faster than any of these machines serves, so TTFT is service TTFT: from the start of the prefill.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import finemoe
from finemoe.serving.metrics import CellSummary
from finemoe.traces.npz_import import import_chosen_experts
from measure import ROOT

DATA = ROOT.parent / "shared" / "data"
MODELS = {
    "mixtral-8x7b": ("6GB", "12GB", "24GB", "48GB", "96GB"),
    "qwen1.5-moe": ("6GB", "12GB", "24GB"),
    "phi-3.5-moe": ("6GB", "24GB", "96GB"),
}
RECORDED = {"gpt-oss-20b": "gpt-oss-20b_mmlu524.npz", "deepseek-v2-lite": "deepseek-v2-lite_esft173.npz"}
SHARES = ("0.125", "0.25", "0.5")


def table(
    runs: Sequence[CellSummary], sizes: Sequence[str], value: Callable[[CellSummary], float | None]
) -> None:
    """Systems × sizes, three significant digits."""
    print("| system | " + " | ".join(sizes) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    for policy in dict.fromkeys(run.policy for run in runs):
        cells = []
        for size in sizes:
            found = [run for run in runs if run.policy == policy and run.expert_cache in (size, "all")]
            number = value(found[0]) if found and found[0].ran else None
            status = found[0].status.partition(":")[0] if found else ""
            cells.append(status if number is None and found and not found[0].ran else _text(number))
        print(f"| {policy} | " + " | ".join(cells) + " |")
    print()


def breakdown(runs: Sequence[CellSummary], size: str) -> None:
    """Where the time of the iterations goes."""
    print("| system | TPOT, s | compute | wait for experts | wait for search, staging | link busy | late |")
    print("|---|---|---|---|---|---|---|")
    for run in sorted(
        (run for run in runs if run.expert_cache in (size, "all") and run.ran),
        key=lambda run: run.tpot_s.mean or 0.0,
    ):
        shares = (
            run.compute_share,
            run.stall_share,
            run.search_wait_share,
            run.link_busy_share,
            run.late_rate,
        )
        cells = " | ".join("n/a" if share is None else f"{share:.1%}" for share in shares)
        print(f"| {run.policy} | {_text(run.tpot_s.mean)} | {cells} |")
    print()


def _text(number: float | None) -> str:
    return "n/a" if number is None else f"{number:.3g}"


def show(title: str, runs: Sequence[CellSummary], sizes: Sequence[str], middle: str) -> None:
    """All tables of one model."""
    print(f"## {title}\n\nTPOT, mean, s\n")
    table(runs, sizes, lambda run: run.tpot_s.mean)
    print("Service TTFT, mean, s\n")
    table(runs, sizes, lambda run: run.ttft_service_s.mean)
    print("Hit rate, decode\n")
    table(runs, sizes, lambda run: run.hit_rate_decode)
    print(f"Where the time goes at {middle}\n")
    breakdown(runs, middle)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--policy", default="all")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--only", default=",".join([*MODELS, *RECORDED]))
    args = parser.parse_args()
    trace = args.data / "requests" / "AzureLLMInferenceTrace_conv.csv"
    with tempfile.TemporaryDirectory() as folder:
        for model in args.only.split(","):
            options: dict[str, Any] = {
                "policy": args.policy,
                "num_requests": args.requests,
                "decisions": 0,
                "max_num_seqs": args.max_num_seqs,
                "model": model,
                "output": Path(folder) / model,
            }
            if model in MODELS:
                sizes, middle = MODELS[model], "24GB" if model != "qwen1.5-moe" else "12GB"
                runs = finemoe.simulate(trace, expert_cache=sizes, **options).runs
                show(f"{model}, rtx3090x6, synthetic routing", runs, sizes, middle)
            else:
                routing = Path(folder) / f"{model}.parquet"
                import_chosen_experts(args.data / "routing" / RECORDED[model], routing)
                runs = finemoe.simulate(
                    trace, expert_cache=SHARES, hardware="a100-80gb", routing=routing, **options
                ).runs
                show(f"{model}, a100-80gb, recorded routing", runs, SHARES, "0.25")


if __name__ == "__main__":
    main()

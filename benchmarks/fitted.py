"""Hit rates of every system on recorded routing and on synthetic routing fitted to it, side by side.

Both are served in the same content: what the recording has not (gates of experts that were not chosen,
embeddings, speculation, a prefill of its own) is taken away from the synthetic routing too. Requests are the
recording's in random order, those long enough for every decode iteration to be a recorded one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import finemoe
import numpy as np
from finemoe.serving.metrics import CellSummary
from finemoe.traces.chosen_experts import routing_of_tokens
from finemoe.traces.npz_import import import_chosen_experts
from finemoe.traces.routing import RequestRouting, RoutingMeta
from finemoe.traces.routing_file import RoutingFile, write_routing
from finemoe.traces.synthetic import SyntheticRouting, load_preset
from measure import ROOT, machine

DATA = ROOT.parent / "shared" / "data"
RECORDED = {"gpt-oss-20b": "gpt-oss-20b_mmlu524.npz", "deepseek-v2-lite": "deepseek-v2-lite_esft173.npz"}
MOST_REQUESTS = 200


def recorded(file: RoutingFile, least: int, seed: int) -> Iterator[RequestRouting]:
    """Requests of at least so many iterations, in random order."""
    found = 0
    for number in np.random.default_rng(seed).permutation(file.requests):
        routing = file.recorded(int(number))
        if routing.iterations >= least and found < MOST_REQUESTS:
            found += 1
            yield routing


def synthetic(file: RoutingFile, count: int, seed: int, iterations: int) -> Iterator[RequestRouting]:
    """As many requests from the model's preset, with the recording's content."""
    meta = file.meta
    source = SyntheticRouting(load_preset(meta.model), seed)
    prompt = max(1, int(file.recorded(0).tokens(meta.top_k)[0]))
    for number in range(count):
        routing = source.routing_for(number, prompt, prompt + iterations)
        rows = routing.gate[1:]
        ids = routing.experts[routing.offsets[meta.layers] :].reshape(len(rows), meta.layers, meta.top_k)
        chances = np.take_along_axis(rows.astype(np.float32), ids.astype(np.int64), axis=2)
        if meta.unchosen_mass == "zero":
            chances /= chances.sum(axis=2, keepdims=True)
        yield routing_of_tokens(ids, chances, prompt, meta)


def serve(
    routing: Path, meta: RoutingMeta, args: argparse.Namespace, output: Path
) -> tuple[CellSummary, ...]:
    """All systems, one request after another."""
    return finemoe.simulate(
        args.data / "requests" / "AzureLLMInferenceTrace_conv.csv",
        model=meta.model,
        routing=routing,
        policy=args.policy,
        hardware="a100-80gb",
        expert_cache=(args.cache,),
        num_requests=args.requests,
        prompt_tokens=64,
        output_tokens=args.output_tokens,
        max_num_seqs=1,
        decisions=0,
        output=output,
    ).runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", default=",".join(RECORDED))
    parser.add_argument("--policy", default="all")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--output-tokens", type=int, default=100)
    parser.add_argument("--cache", default="0.25")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(machine())
    for model in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            paths = {name: Path(folder) / f"{name}.parquet" for name in ("all", "recorded", "synthetic")}
            import_chosen_experts(args.data / "routing" / RECORDED[model], paths["all"], model=model)
            file = RoutingFile(paths["all"])
            count = write_routing(paths["recorded"], file.meta, recorded(file, args.output_tokens, args.seed))
            write_routing(
                paths["synthetic"], file.meta, synthetic(file, count, args.seed, args.output_tokens)
            )
            runs = {
                name: serve(paths[name], file.meta, args, Path(folder) / f"results-{name}")
                for name in ("recorded", "synthetic")
            }
        print(f"\n## {model}: decode hit rates, {args.cache} cached, {args.requests} of {count} requests\n")
        print(
            "| system | recorded | synthetic | difference | rank recorded, synthetic |\n|---|---|---|---|---|"
        )
        rates = {name: {run.policy: run.hit_rate_decode for run in found} for name, found in runs.items()}
        compared = {
            policy: (rate, other)
            for policy, rate in rates["recorded"].items()
            if rate is not None and (other := rates["synthetic"][policy]) is not None
        }
        ranks = [sorted(compared, key=lambda policy: -compared[policy][side]) for side in (0, 1)]
        for policy in ranks[0]:
            ours, theirs = compared[policy]
            places = ", ".join(str(rank.index(policy) + 1) for rank in ranks)
            print(f"| {policy} | {ours:.3f} | {theirs:.3f} | {theirs - ours:+.3f} | {places} |")
        for run in runs["recorded"]:
            if run.policy not in compared:
                print(f"| {run.policy} | {run.status if not run.ran else 'n/a'} | | | |")


if __name__ == "__main__":
    main()

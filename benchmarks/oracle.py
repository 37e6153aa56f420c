"""What Belady and the oracle leave of the demand loads' time, on recorded routing.

Requests of gpt-oss-20b one after another, decode only; one link, a fixed time per expert and per layer, the
whole future known. Prints ms per token for demand loads under LRU and under Belady, and for the oracle.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from finemoe.policy.core import CHUNK_READY, Core, core_options, make_config
from finemoe.policy.system import System
from finemoe.policy.systems import SYSTEMS

ROOT = Path(__file__).resolve().parents[1]
LAYERS, EXPERTS, TOP_K, EXPERT_BYTES = 24, 32, 4, 1000
BELADY = System(name="belady", description="demand loads under Belady", source="", eviction="belady")


def ms_per_token(system: System, chosen: np.ndarray, share: float, load_s: float, layer_s: float) -> float:
    """Play decode iterations [n, L, K] with `share` of the experts cached."""
    options = core_options(
        system,
        layers=LAYERS,
        experts=EXPERTS,
        top_k=TOP_K,
        devices=1,
        slots_per_device=int(LAYERS * EXPERTS * share),
        expert_bytes=EXPERT_BYTES,
        prefetch_distance=3,
        store_capacity=1,
        embedding_width=0,
        embedding_work=0,
    )
    core = Core(make_config(options))
    if system.eviction == "belady":
        steps = chosen.reshape(-1, TOP_K) + np.tile(np.arange(LAYERS) * EXPERTS, len(chosen))[:, None]
        core.foresight(0, steps.tolist())
    row = np.full((1, EXPERTS), 1 / EXPERTS, np.float16)
    now, done, expert = 0.0, np.inf, -1

    def start() -> None:
        nonlocal done, expert
        for command in core.take_device(0):
            if command[0] == "Load":  # a load that is asked to pause completes instead
                expert, done = command[1], now + load_s * command[5] / EXPERT_BYTES

    def advance(until: float) -> int:
        nonlocal now, done
        mask = 0
        while done <= until:
            now, done = done, np.inf
            mask = core.loaded(expert)
            start()
        now = until
        return mask

    for iteration in chosen.tolist():
        core.begin_iteration([(0, "decode", 1, False)])
        start()
        for layer, experts in enumerate(iteration):
            mask = core.gate(layer, row, experts, [1] * TOP_K)
            start()
            while not mask & CHUNK_READY:
                mask = advance(done)
            advance(now + layer_s)
            core.computed_chunk()
            start()
        core.end_iteration()
        start()
    return 1000 * now / len(chosen)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    shared = Path(os.environ.get("FINEMOE_SHARED_DATA", ROOT.parent / "shared" / "data"))
    parser.add_argument("--npz", type=Path, default=shared / "routing" / "gpt-oss-20b_mmlu524.npz")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--load-ms", type=float, default=2.01)
    parser.add_argument("--layer-ms", type=float, default=1.0)
    given = parser.parse_args()
    with np.load(given.npz, allow_pickle=False) as arrays:
        offsets, ids = arrays["offsets"], np.sort(arrays["expert_ids"], axis=-1).astype(np.int64)
    picked = np.random.default_rng(0).permutation(len(offsets) - 1)[: given.requests]
    chosen = np.concatenate([ids[offsets[r] : offsets[r + 1]] for r in picked])
    print(f"{len(chosen)} tokens, {given.load_ms} ms per expert, {given.layer_ms} ms per layer; ms per token")
    print("| cached | demand, LRU | demand, Belady | oracle |\n|---|---|---|---|")
    for share in (0.125, 0.25, 0.5):
        systems = (SYSTEMS["lru"], BELADY, SYSTEMS["oracle"])
        times = [ms_per_token(s, chosen, share, given.load_ms / 1e3, given.layer_ms / 1e3) for s in systems]
        print(f"| {share:.1%} | " + " | ".join(f"{t:.1f}" for t in times) + " |")


if __name__ == "__main__":
    main()

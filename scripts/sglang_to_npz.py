#!/usr/bin/env python3
"""Convert a dump of SGLang's expert distribution recorder (.pt) to the npz that `finemoe trace import` reads.

Run it where SGLang runs (it needs torch and NumPy, not FineMoE): python sglang_to_npz.py DUMP.pt OUT.npz
The dump is loaded with weights_only, so nothing in it is executed. Modes per_token and per_pass are
converted; stat and stat_approx add up the passes of all requests, which leaves no trace.
"""

from __future__ import annotations

import sys

import numpy as np
import torch


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: sglang_to_npz.py DUMP.pt OUT.npz")
    dump = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
    if "records" not in dump:
        sys.exit(
            "no records: this dump is of mode stat; record with --expert-distribution-recorder-mode per_token"
        )
    records = sorted(dump["records"], key=lambda record: record["forward_pass_id"])
    if not records:
        sys.exit("no passes: send requests between start_ and stop_expert_distribution_record")
    logical = np.asarray(dump["last_physical_to_logical_map"])
    convert = tokens if "topk_ids_of_layer" in records[0] else passes
    np.savez_compressed(sys.argv[2], **convert(records, logical))


def tokens(records: list, logical: np.ndarray) -> dict[str, np.ndarray]:
    """Mode per_token: ids [tokens, layers, slots], positions, and each pass's tokens and prompts."""
    ids = np.concatenate([np.asarray(record["topk_ids_of_layer"]) for record in records], axis=1)
    layers = np.arange(len(ids))[:, None, None]
    ids = np.where(ids < 0, -1, logical[layers, np.clip(ids, 0, logical.shape[1] - 1)])
    return {
        "sglang_topk_ids": ids.transpose(1, 0, 2).astype(np.int32),
        "positions": np.concatenate([np.asarray(record["positions"], np.int64) for record in records]),
        "pass_tokens": np.array([len(record["positions"]) for record in records]),
        "pass_requests": np.array([len(record["extend_seq_lens"] or []) for record in records]),
    }


def passes(records: list, logical: np.ndarray) -> dict[str, np.ndarray]:
    """Mode per_pass: tokens per expert, [passes, layers, experts]."""
    physical = np.stack([np.asarray(record["global_physical_count"]) for record in records])
    counts = np.zeros((*physical.shape[:2], int(logical.max()) + 1), np.int64)
    for layer, experts in enumerate(logical):
        for place, expert in enumerate(experts):
            counts[:, layer, expert] += physical[:, layer, place]
    return {"sglang_counts": counts}


if __name__ == "__main__":
    main()

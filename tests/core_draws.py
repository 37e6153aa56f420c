"""Random configurations and gate rows for the tests of the policy core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from reference_state import Config

F32 = npt.NDArray[np.float32]

PREDICTORS = {"none": 0.5, "map": 4.0, "speculate": 2.0, "activation": 4.0, "oracle": 1.0, "plugin": 2.0}
EVICTIONS = ("finemoe", "lru", "lfu", "lfru", "activation", "belady", "plugin")


def draw_config(rng: np.random.Generator) -> Config:
    """A small random configuration; mostly with a predictor."""
    layers, experts, devices = (
        int(rng.choice(sizes)) for sizes in ([1, 2, 3, 4, 5, 5], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3])
    )
    contended = bool(rng.random() < 0.25)  # many prefetches stopped from afar
    if contended:
        layers, devices = 5, max(devices, 2)
    devices = min(devices, layers * experts)
    owned = -(-layers * experts // devices)
    tight = not contended and bool(rng.random() < 0.5)
    slots = int(rng.integers(1, min(owned, 3) + 1 if tight else owned + 1))
    weights = np.array([*PREDICTORS.values()])
    predictor = "speculate" if contended else str(rng.choice([*PREDICTORS], p=weights / weights.sum()))
    by_requests = predictor == "activation"
    return Config(
        layers=layers,
        experts=experts,
        top_k=int(rng.integers(1, experts + 1)),
        devices=devices,
        slots_per_device=owned if rng.random() < 0.05 else slots,
        expert_bytes=int(rng.choice([7, 100] if contended else [1, 7, 100, 352_321_536])),
        predictor=predictor,
        semantic=bool(rng.random() < 0.8),
        trajectory=bool(rng.random() < 0.8),
        targets=str(rng.choice(["distance", "later"])) if by_requests else "distance",
        popular_start=by_requests and bool(rng.random() < 0.6),
        selector=str(rng.choice(["delta", "top_k", "positive"], p=[0.5, 0.2, 0.3])),
        priority=str(rng.choice(["distance", "depth", "layer"], p=[0.5, 0.25, 0.25])),
        prefetch_distance=int(rng.integers(1, layers + 2)),
        store_capacity=int(rng.integers(1, (4 if by_requests else 6) if rng.random() < 0.9 else 40)),
        embedding_width=int(rng.integers(0, 5)),
        embedding_work=int(rng.integers(0, 10)),
        eviction=str(rng.choice(EVICTIONS)),
        layer_quota=int(rng.integers(1, experts + 1)) if not contended and rng.random() < 0.35 else 0,
        frequency=str(rng.choice(["run", "residency"])),
        frequency_decay=float(rng.choice([1.0, 0.5])),
        rank_prefill_by_tokens=bool(rng.random() < 0.5),
        load_shape=str(rng.choice(["expert", "layer"], p=[0.8, 0.2])),
        search_blocks=bool(rng.random() < 0.3),
        prefetch_blocks=bool(rng.random() < 0.4),
        preempt_scope="all" if contended else str(rng.choice(["device", "all"])),
    )


def draw_preload(rng: np.random.Generator, config: Config) -> list[int]:
    """Experts to keep: all that a device owns where they fit, else at most all but one of its slots."""
    kept: list[int] = []
    for device in range(config.devices):
        mine = range(device, config.layers * config.experts, config.devices)
        most = config.slots(device) - 1
        count = int(rng.integers(0, most + 1))
        if most + 1 == len(mine) and rng.random() < 0.5:
            count = len(mine)
        kept += [int(e) for e in rng.choice(mine, count, replace=False)]
    return sorted(kept)


def draw_row_counts(rng: np.random.Generator, rows: int, row_sums: Sequence[int]) -> npt.NDArray[np.int32]:
    """Tokens [B, J] of each row for each expert that sum to the experts' tokens [J]."""
    shares = rng.dirichlet(np.full(rows, rng.choice([0.1, 1.0])))
    return np.stack([rng.multinomial(n, shares) for n in row_sums], axis=1).astype(np.int32)


def draw_gate_row(rng: np.random.Generator, experts: int) -> F32:
    """A gate row [J]: smooth, with exact zeros, with ties, tiny, all zero, or not summing to 1."""
    kind = rng.integers(8)
    row: npt.NDArray[np.floating[Any]]
    if kind == 0:
        row = rng.integers(0, 3, experts) / 8.0
    elif kind == 1:
        row = rng.random(experts) * 1e-6
    elif kind == 2:
        row = rng.random(experts)
    elif kind == 3:
        row = rng.integers(0, 2, experts) * 1.0
    else:
        logits = rng.normal(size=experts) * rng.choice([0.3, 2.0, 8.0])
        row = np.exp(logits - logits.max())
        row /= row.sum()
        if kind == 4:
            row = np.where(row < np.median(row), 0.0, row)
    return row.astype(np.float32)

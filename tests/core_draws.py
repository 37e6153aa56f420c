"""Random configurations and gate rows for the tests of the policy core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from reference_devices import Config

F32 = npt.NDArray[np.float32]

PREDICTORS = ("none", "map", "speculate", "oracle")
EVICTIONS = ("finemoe", "lru", "lfu", "belady")


def draw_config(rng: np.random.Generator, predictors: Sequence[str] = PREDICTORS) -> Config:
    """A small random configuration; mostly with a predictor."""
    layers, experts, devices = (
        int(rng.choice(sizes)) for sizes in ([1, 2, 3, 4, 5, 5], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3])
    )
    contended = bool(rng.random() < 0.3) and "speculate" in predictors  # many prefetches stopped from afar
    if contended:
        layers, devices = 5, max(devices, 2)
    devices = min(devices, layers * experts)
    owned = -(-layers * experts // devices)
    tight = bool(rng.random() < 0.5)
    slots = int(rng.integers(1, min(owned, 3) + 1 if tight else owned + 1))
    preloaded = bool(rng.random() < 0.05)
    weights = np.array([{"none": 0.3, "map": 4.0, "speculate": 3.0}.get(p, 1.0) for p in predictors])
    return Config(
        layers=layers,
        experts=experts,
        top_k=int(rng.integers(1, experts + 1)),
        devices=devices,
        slots_per_device=owned if preloaded else slots,
        expert_bytes=int(rng.choice([1, 7, 100, 352_321_536])),
        predictor="speculate" if contended else str(rng.choice(predictors, p=weights / weights.sum())),
        semantic=bool(rng.random() < 0.8),
        trajectory=bool(rng.random() < 0.8),
        prefetch_distance=int(rng.integers(1, layers + 2)),
        store_capacity=int(rng.integers(1, 6 if rng.random() < 0.9 else 40)),
        embedding_width=int(rng.integers(0, 5)),
        embedding_work=int(rng.integers(0, 10)),
        eviction=str(rng.choice(EVICTIONS)),
        frequency=str(rng.choice(["run", "residency"])),
        frequency_decay=float(rng.choice([1.0, 0.5])),
        rank_prefill_by_tokens=bool(rng.random() < 0.5),
        load_shape=str(rng.choice(["expert", "layer"], p=[0.8, 0.2])),
        search_blocks=bool(rng.random() < 0.3),
        preempt_scope="all" if contended else str(rng.choice(["device", "all"])),
        preloaded=preloaded,
    )


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

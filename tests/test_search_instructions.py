"""The binary gives the same results on every processor: all kernels that this one has agree bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from finemoe import _core
from finemoe.errors import CoreError
from finemoe.policy.core import CoreConfig, Searcher, core_options, make_config
from finemoe.policy.systems import find_system

LAYERS, EXPERTS, WIDTH = 5, 6, 24


def config(capacity: int) -> CoreConfig:
    options = core_options(
        find_system("finemoe"),
        layers=LAYERS,
        experts=EXPERTS,
        top_k=2,
        devices=1,
        slots_per_device=1,
        expert_bytes=1,
        prefetch_distance=2,
        store_capacity=capacity,
        embedding_width=WIDTH,
        embedding_work=WIDTH,
    )
    return make_config(options)


def run(name: str, capacity: int, iterations: int, sharpness: float) -> tuple[list[Any], list[Any]]:
    """Searches and the store after `iterations` iterations, on those instructions."""
    _core.use_search_instructions(name)
    try:
        rng = np.random.default_rng(capacity)
        searcher = Searcher(config(capacity))
        found: list[Any] = []
        for _ in range(iterations):
            logits = sharpness * rng.standard_normal((LAYERS, EXPERTS))
            gate = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            gate[rng.random(gate.shape) < 0.1] = 0.0
            embedding = rng.standard_normal(WIDTH).astype(np.float16)
            found.append(searcher.search_iteration(gate.astype(np.float16), embedding))
            searcher.fill(gate[None].astype(np.float16), embedding[None])
        maps, embeddings, written = searcher.contents()
        assert embeddings is not None
        return found, [maps.tobytes(), embeddings.tobytes(), written]
    finally:
        _core.use_search_instructions(_core.search_instructions()[0])


@pytest.mark.parametrize("name", _core.search_instructions())
@pytest.mark.parametrize("capacity", [1, 15, 130, 257])
def test_same_searches_and_replacements(name: str, capacity: int) -> None:
    # Probabilities go down to halves below 2^-14, which are subnormal.
    assert run(name, capacity, 300, 4.0) == run("generic", capacity, 300, 4.0)


def test_stored_rows_are_exact() -> None:
    gate = np.linspace(0.0, 1.0, LAYERS * EXPERTS).reshape(1, LAYERS, EXPERTS).astype(np.float16)
    tiny = np.array([1, 2, 3, 1023, 1024, 1025], np.uint16).view(np.float16)  # around the least normal half
    gate[0, 1] = tiny
    searcher = Searcher(config(3))
    searcher.fill(gate, None)
    maps, _, _ = searcher.contents()
    assert maps.tobytes() == gate.tobytes()


def test_unknown_instructions_are_refused() -> None:
    with pytest.raises(CoreError, match="no kernels for mmx"):
        _core.use_search_instructions("mmx")


def test_values_that_no_gate_has_are_refused() -> None:
    searcher = Searcher(config(3))
    for value in (-0.5, 1.5, float("nan")):
        with pytest.raises(CoreError, match="stored value is not in"):
            searcher.fill(np.full((1, LAYERS, EXPERTS), value, np.float16), None)
    assert searcher.contents()[2] == []

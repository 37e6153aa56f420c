"""The binary gives the same results on every processor: all kernels that this one has agree bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from finemoe import _core
from finemoe.errors import CoreError
from finemoe.policy.core import Core, CoreConfig, Searcher, core_options, make_config
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


def log_of_batches(name: str, batch: int) -> dict[str, Any]:
    """What a core decides over iterations of `batch` rows with a full store, on those instructions."""
    _core.use_search_instructions(name)
    try:
        options = core_options(
            find_system("finemoe"),
            layers=LAYERS,
            experts=EXPERTS,
            top_k=2,
            devices=1,
            slots_per_device=LAYERS * EXPERTS,
            expert_bytes=1,
            prefetch_distance=2,
            store_capacity=133,
            embedding_width=WIDTH,
            embedding_work=WIDTH,
        )
        core, rng = Core(make_config(options), -1), np.random.default_rng(batch)
        rows = [(request, "decode", 1, request % 5 != 3) for request in range(batch)]
        for _ in range(300 // batch + 4):
            core.begin_iteration(rows, rng.standard_normal((batch, WIDTH)).astype(np.float16))
            for layer in range(LAYERS):
                logits = 2.0 * rng.standard_normal((batch, EXPERTS))
                gate = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).astype(np.float16)
                core.gate(layer, gate, list(range(EXPERTS)), [1] * EXPERTS)
                search_and_load(core)
                core.computed_chunk()
            core.end_iteration()
            search_and_load(core)
        return core.take_log() | {"store": [np.asarray(part).tobytes() for part in core.store_contents()]}
    finally:
        _core.use_search_instructions(_core.search_instructions()[0])


def search_and_load(core: Core) -> None:
    """Everything that was asked for, at once."""
    done = False
    while not done:
        searches, loads = core.take_searches(), core.take_device(0)
        for search in searches:
            core.search_done(search[1])
        for load in loads:
            if load[0] == "Load":
                core.loaded(load[1])
        done = not searches and not loads


@pytest.mark.parametrize("batch", [2, 3, 4, 7, 9])
def test_rows_that_are_scored_together_do_not_change_one_another(batch: int) -> None:
    """Whatever instructions, hence however many rows at a time: the same log and the same store."""
    generic = log_of_batches("generic", batch)
    for name in _core.search_instructions():
        log = log_of_batches(name, batch)
        assert log["store"] == generic["store"]
        for column in ("kind", "expert", "target", "ticket", "evicts"):
            assert np.array_equal(log[column], generic[column]), column


def test_a_batch_finds_what_each_of_its_rows_finds_alone() -> None:
    """One row's sums, with others beside it and without."""
    rng = np.random.default_rng(5)
    logits = 2.0 * rng.standard_normal((40, LAYERS, EXPERTS))
    gates = (np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)).astype(np.float16)
    embeddings = rng.standard_normal((40, WIDTH)).astype(np.float16)
    searcher = Searcher(config(64))
    searcher.fill(gates[:33], embeddings[:33])
    alone = [searcher.search_iteration(gates[i], embeddings[i]) for i in range(33, 40)]
    together = searcher.search_batch(gates[33:], embeddings[33:])
    assert [list(row) for row in zip(*together, strict=True)] == alone


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

"""The compiled core and the plain-Python model give the same commands and counters after every event."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from compiled_core import CompiledCore
from core_draws import draw_config, draw_gate_row
from core_walk import Walk
from finemoe import _core
from finemoe.errors import CoreError
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import ReferenceCore
from reference_formulas import delta_of, delta_set_brute_force, round_f16, shares, unit_embedding
from reference_state import Command, Config
from reference_store import ActivationStore, ReferenceStore
from small_policy import policy_for

SEEDS = st.integers(0, 2**32 - 1)


class Both:
    """Drives both cores with the same events and compares what comes back."""

    def __init__(self, config: Config) -> None:
        self.policy = policy_for(config)
        self.compiled, self.reference = CompiledCore(config), ReferenceCore(config, self.policy)

    def __getattr__(self, event: str) -> Any:
        def drive(*arguments: Any) -> list[Command]:
            try:
                commands: list[Command] = getattr(self.reference, event)(*arguments)
            except CoreError:
                with pytest.raises(CoreError):
                    getattr(self.compiled, event)(*arguments)
                raise
            assert getattr(self.compiled, event)(*arguments) == commands, (event, arguments)
            reference = self.reference
            bits: dict[int, object] = {_core.CHUNK_OPEN: reference.chunk, _core.MORE_CHUNKS: reference.rest}
            bits[_core.CHUNK_READY] = all(reference.states[e].status == "resident" for e in reference.chunk)
            bits[_core.PREFETCH_OPEN] = reference.prefetch_open()
            assert all(bool(self.compiled.mask & bit) == bool(state) for bit, state in bits.items())
            return commands

        return drive

    def residents(self, device: int) -> list[int]:
        """The resident experts of both, which are the same."""
        resident = self.reference.residents(device)
        assert self.compiled.residents(device) == resident
        return resident

    def counter_values(self) -> dict[str, Any]:
        """The counters of both, which are the same."""
        values = self.reference.counter_values()
        assert self.compiled.counter_values() == values
        return values


def compare_on(seed: int, iterations: int) -> None:
    """One walk through both."""
    rng = np.random.default_rng(seed)
    config = draw_config(rng)
    both = Both(config)
    Walk(both, config, rng).run(iterations)
    compiled, reference = both.compiled.core, both.reference
    for g in range(config.devices):
        both.residents(g)
    if both.policy is not None and both.compiled.policy is not None:
        assert both.compiled.policy.told == both.policy.told
    maps, embeddings, written = compiled.store_contents()
    assert np.array_equal(maps, reference.store.maps)
    assert np.array_equal(np.argsort(written), np.argsort(reference.store.written)), "only their order counts"
    assert embeddings is None or np.array_equal(embeddings, reference.store.embeddings)


@given(SEEDS)
@settings(deadline=None, max_examples=200)
def test_both_give_the_same_commands_and_counters(seed: int) -> None:
    compare_on(seed, iterations=4)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_both_agree_on_a_thousand_longer_walks() -> None:
    for seed in range(1000):
        compare_on(seed, iterations=6)


@given(SEEDS)
@settings(deadline=None, max_examples=60)
def test_searches_and_replacement_equal_the_formulas_bit_for_bit_on_larger_stores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, experts, width = (int(rng.integers(1, n)) for n in (7, 70, 70))
    capacity, maps = int(rng.integers(1, 70)), int(rng.integers(1, 100))
    distance = int(rng.integers(1, layers + 1))
    config = Config(
        layers,
        experts,
        1,
        1,
        1,
        1,
        prefetch_distance=distance,
        store_capacity=capacity,
        embedding_width=width,
    )
    searcher = _core.Searcher(_core.CoreConfig(**asdict(config)))
    store = ReferenceStore(layers, experts, width, capacity)
    gates = [round_f16([draw_gate_row(rng, experts) for _ in range(layers)]) for _ in range(maps)]
    embeddings = [round_f16(rng.normal(size=width) * (rng.random() < 0.7)) for _ in range(maps)]
    for i in range(1, maps):
        if rng.random() < 0.2:
            twin = int(rng.integers(i))
            gates[i], embeddings[i] = gates[twin], embeddings[twin]
    searcher.fill(np.stack(gates), np.stack(embeddings))
    for rows, embedding in zip(gates, embeddings, strict=True):
        store.update(rows, unit_embedding(embedding), distance)
    kept_maps, kept_embeddings, written = searcher.contents()
    assert np.array_equal(kept_maps, store.maps)
    assert kept_embeddings is not None
    assert np.array_equal(kept_embeddings, store.embeddings)
    assert np.array_equal(np.argsort(written), np.argsort(store.written))
    asked = int(rng.integers(maps))
    rows = gates[asked]
    if rng.random() < 0.7:
        rows = round_f16([draw_gate_row(rng, experts) for _ in range(layers)])
    unit = unit_embedding(embeddings[asked])
    expected = [] if unit is None else [store.semantic(unit)]
    expected += [store.trajectory(rows[: m + 1]) for m in range(layers - distance)]
    assert searcher.search_iteration(rows, embeddings[asked]) == expected


@given(SEEDS)
@settings(deadline=None, max_examples=60)
def test_activation_matrices_fill_a_store_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, experts = int(rng.integers(1, 7)), int(rng.integers(1, 70))
    capacity, matrices = int(rng.integers(1, 40)), int(rng.integers(1, 60))
    config = Config(layers, experts, 1, 1, 1, 1, predictor="activation", store_capacity=capacity)
    searcher = _core.Searcher(_core.CoreConfig(**asdict(config)))
    store = ActivationStore(layers, experts, 0, capacity)
    shape = (matrices, layers, experts)
    drawn = list(rng.integers(0, 40, shape) * (rng.random((matrices, layers, 1)) < 0.9))
    for i in range(1, matrices):
        if rng.random() < 0.2:
            drawn[i] = drawn[int(rng.integers(i))] * int(rng.integers(1, 3))  # the same shares
    for counts in drawn:
        searcher.fill_counts(counts.astype(np.int32))
        store.update(shares(counts).astype(np.float16), None, 1)
    kept, embeddings, written = searcher.contents()
    assert embeddings is None
    assert np.array_equal(kept, store.maps)
    assert np.array_equal(np.argsort(written), np.argsort(store.written))


@given(SEEDS, st.floats(-1.0, 1.5, width=32), st.integers(1, 8))
@settings(deadline=None, max_examples=200)
def test_delta_sets_equal_brute_force(seed: int, score: float, top_k: int) -> None:
    rng = np.random.default_rng(seed)
    p = round_f16(draw_gate_row(rng, int(rng.integers(top_k, 9))))
    reachable = 1.0 - np.cumsum(np.sort(p.astype(np.float64))[::-1])
    for s in [score, *reachable.astype(np.float32).tolist()]:
        expected = delta_set_brute_force(p, delta_of(float(np.float32(s))), top_k)
        assert _core.select_experts(p.astype(np.float32), s, top_k) == expected

"""The reference formulas against brute force, plain loops, cosines and hand-worked values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from core_draws import draw_gate_row
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_activation import Activations
from reference_formulas import (
    activation_key,
    activation_keys,
    best_map,
    delta_of,
    delta_set,
    delta_set_brute_force,
    inverse_norms,
    lfru_key,
    priority,
    rank_by_tokens,
    redundancy,
    round_f16,
    row_inverse_norms,
    running_sums,
    running_sums_step,
    select,
    semantic_scores,
    shares,
    unit_embedding,
)
from reference_store import ActivationStore, ReferenceStore

SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.floats(0.0, 1.0), st.integers(1, 8))
@settings(deadline=None, max_examples=300)
def test_delta_set_is_the_smallest_of_all_subsets(seed: int, delta: float, top_k: int) -> None:
    rng = np.random.default_rng(seed)
    p = round_f16(draw_gate_row(rng, int(rng.integers(top_k, 9))))
    deltas = [delta, 0.0, 1.0, *np.cumsum(np.sort(p.astype(np.float64))[::-1]).tolist()]
    for d in deltas:
        assert delta_set(p, d, top_k) == delta_set_brute_force(p, d, top_k)


@given(SEEDS)
@settings(deadline=None)
def test_incremental_sums_equal_sums_from_scratch_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, layers, experts = (int(x) for x in rng.integers(1, 9, 3))
    maps = round_f16([[draw_gate_row(rng, experts) for _ in range(layers)] for _ in range(n)])
    query = round_f16([draw_gate_row(rng, experts) for _ in range(layers)])
    running = np.zeros(n, dtype=np.float32)
    for layer in range(layers):
        running = running_sums_step(running, maps[:, layer], query[layer])
        assert running.tobytes() == running_sums(maps, query[: layer + 1]).tobytes()
        for i in range(n):  # and the plainest loop there is
            total = np.float32(0.0)
            for m in range(layer + 1):
                dot = np.float32(0.0)
                for j in range(experts):
                    dot = dot + np.float32(maps[i, m, j]) * np.float32(query[m, j])
                total = total + dot
            assert total == running[i]


@given(SEEDS)
@settings(deadline=None)
def test_scores_are_cosines(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, experts, width, n = (int(x) for x in rng.integers(1, 9, 4))
    store = ReferenceStore(layers, experts, width, n)
    raw = rng.normal(size=(n, width))
    units = [unit_embedding(e) for e in raw.astype(np.float32)]
    store.seed(
        [[draw_gate_row(rng, experts) for _ in range(layers)] for _ in range(n)],
        [np.zeros(width) if u is None else u for u in units],
        np.arange(n),
    )
    query = rng.normal(size=width)
    unit = unit_embedding(query.astype(np.float32))
    assert unit is not None
    cosines = raw @ query / np.linalg.norm(raw, axis=1) / np.linalg.norm(query)
    assert np.allclose(semantic_scores(store.embeddings, unit), cosines, atol=5e-3)
    assert math.isclose(store.semantic(unit)[1], cosines.max(), abs_tol=5e-3)
    rows = round_f16([draw_gate_row(rng, experts) for _ in range(int(rng.integers(1, layers + 1)))])
    flat = store.maps[:, : len(rows)].reshape(n, -1).astype(np.float64)
    asked = rows.reshape(-1).astype(np.float64)
    norms = np.linalg.norm(flat, axis=1) * np.linalg.norm(asked)
    expected = np.divide(flat @ asked, norms, out=np.zeros(n), where=norms > 0)
    assert math.isclose(store.trajectory(rows)[1], expected.max(), abs_tol=1e-5)


def test_small_formulas() -> None:
    assert unit_embedding([0.0, 0.0]) is None
    assert unit_embedding([1e-9]) is None, "rounds to zero in half precision"
    assert unit_embedding([3.0, 4.0]) == pytest.approx([0.6, 0.8], abs=1e-3)
    assert delta_of(1.5) == 0.0
    assert delta_of(-1.0) == 1.0
    assert delta_set([0.5, 0.25, 0.25, 0.0], 0.6, 1) == [0, 1], "equal p: the lower j"
    assert delta_set([0.0, 0.5, 0.0, 0.0], 1.0, 3) == [0, 1, 2], "zeros only within the first K"
    assert inverse_norms(round_f16([[0.0], [0.5], [0.0]])).tolist() == [0.0, 2.0, 2.0]
    keys, written = np.array([1.0, 2.0, 2.0, 0.0], dtype=np.float32), np.array([9, 4, 7, 8])
    assert best_map(keys, written) == 2, "equal keys: the most recently written"
    assert rank_by_tokens(0.5, 2) == 0.75
    assert rank_by_tokens(0.0, 1000) == 0.0
    sem, traj = np.array([1.0], dtype=np.float32), np.array([0.5], dtype=np.float32)
    assert redundancy(sem, traj, 1, 4).tolist() == [0.25 + 0.375]
    assert redundancy(sem, traj, 9, 4).tolist() == [1.0], "the distance counts up to L"
    assert redundancy(None, traj, 1, 4).tolist() == [0.5]


def test_a_full_store_replaces_the_most_redundant_map() -> None:
    store = ReferenceStore(1, 2, 0, 2)
    store.seed([[[1.0, 0.0]], [[0.0, 1.0]]], np.zeros((2, 0)), [5, 2])
    assert store.update(round_f16([[0.125, 0.875]]), None, 1) == 1
    assert store.written.tolist() == [5, 6]
    assert store.update(round_f16([[0.0, 0.0]]), None, 1) == 1, "all keys 0: the most recently written"


@given(SEEDS)
@settings(deadline=None)
def test_activation_scores_are_mean_cosines_of_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, layers, experts = (int(x) for x in rng.integers(1, 9, 3))
    counts = rng.integers(0, 5, (n, layers, experts)) * (rng.random((n, layers, 1)) < 0.8)
    store = ActivationStore(layers, experts, 0, n)
    store.seed(shares(counts).astype(np.float16), np.zeros((n, 0)), np.arange(n))
    asked = rng.integers(0, 5, (int(rng.integers(1, layers + 1)), experts))
    norms = np.linalg.norm(counts[:, : len(asked)], axis=2) * np.linalg.norm(asked, axis=1)
    dots = (counts[:, : len(asked)] * asked).sum(axis=2)
    cosines = np.divide(dots, norms, out=np.zeros(dots.shape), where=norms > 0)
    best, score = store.trajectory(shares(asked).astype(np.float16))
    assert math.isclose(score, cosines.mean(axis=1).max(), abs_tol=2e-3)
    assert math.isclose(score, cosines.mean(axis=1)[best], abs_tol=2e-3)


def test_activation_shares_and_scores_worked_by_hand() -> None:
    assert shares([[1, 3], [0, 0]]).tolist() == [[0.25, 0.75], [0.0, 0.0]]
    third = shares([1, 2])
    assert third.tolist() == [float(np.float32(1 / 3)), float(np.float32(2 / 3))]
    assert third.astype(np.float16).tolist() == [0.333251953125, 0.66650390625]
    query = round_f16([[0.5, 0.5], [1.0, 0.0]])
    assert row_inverse_norms(query).tolist() == [float(np.float32(math.sqrt(2.0))), 1.0]
    matrices = round_f16([[[0.5, 0.5], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [1.0, 0.0]]])
    # f32(√2) is 2.4e-8 too small, so 0.5 · √2 · √2 is one last place below 1; with 1 added, 2 is even.
    below_one, root_half = 1.0 - 2.0**-24, float(np.float32(math.sqrt(0.5)))
    assert activation_keys(matrices, query[:1]).tolist() == [below_one, root_half, 0.0]
    assert activation_keys(matrices, query).tolist() == [2.0, root_half, 1.0]
    store = ActivationStore(2, 2, 0, 3)
    store.seed(matrices, np.zeros((3, 0)), [4, 6, 5])
    assert store.trajectory(query) == (0, 1.0)
    assert store.trajectory(query[1:]) == (1, 1.0), "row 0 of the query meets row 0 of each"
    assert store.update(query, None, 1) == 0
    assert store.written.tolist() == [7, 6, 5]


def test_activations_by_request_and_by_popularity() -> None:
    activations = Activations(2, 2)
    assert activations.popular(0) is None
    activations.grow([5, 6], 0, np.array([[3, 1], [0, 4]]))
    activations.grow([5], 1, np.array([[2, 0]]))
    assert activations.rows(5).tolist() == [[0.75, 0.25], [1.0, 0.0]]
    assert activations.rows(4).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert [activations.share(0, 0), activations.share(0, 1), activations.share(1, 1)] == [0.375, 0.625, 0.0]
    activations.forget([5, 9])
    assert [activations.share(0, 0), activations.share(0, 1), activations.share(1, 0)] == [0.0, 1.0, 0.0]
    popular = activations.popular(0)
    assert popular is not None
    assert popular.tolist() == [0.375, 0.625], "popularity forgets nothing"


def test_selectors_priorities_and_keys_worked_by_hand() -> None:
    row = [0.5, 0.0, 0.25, 0.25]
    assert select("delta", row, 0.6, 1) == [0, 2]
    assert select("top_k", row, 0.6, 1) == [0]
    assert select("top_k", [0.0, 0.5, 0.0], 1.0, 2) == [0, 1], "a zero within the first K"
    assert select("positive", row, 0.0, 1) == [0, 2, 3]
    assert select("positive", [0.0, 0.0], 1.0, 2) == []
    assert priority("distance", 0.75, 4, 1, 8) == (0.25,)
    assert priority("depth", 0.5, 3, 1, 8) == (0.375,)
    assert priority("depth", 0.5, 3, -1, 4) == (0.0,), "the last layer before the first gate"
    assert priority("layer", 0.0, 2, 0, 4) > priority("layer", 1.0, 3, 0, 4), "the lower layer first"
    assert priority("layer", 0.5, 2, 0, 4) > priority("layer", 0.25, 2, 0, 4)
    assert lfru_key(False, 9.0, 5, 3) < lfru_key(True, 1.0, 1, 2), "who is not privileged goes first"
    assert lfru_key(False, 1.0, 5, 3) < lfru_key(False, 2.0, 4, 2)
    assert lfru_key(True, 9.0, 4, 3) < lfru_key(True, 1.0, 5, 2), "visits do not count for the privileged"
    assert activation_key(0.5, 2, 4, 7, 9) == ((0.5 + 1e-6) * 0.5, 7, 9)
    assert activation_key(0.0, 0, 4, 7, 9) == (1e-6, 7, 9)

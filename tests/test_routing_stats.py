"""Measures of routing: small cases worked out by hand, and the figures known of real recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from finemoe.traces.npz_import import import_chosen_experts
from finemoe.traces.routing_file import RoutingFile
from finemoe.traces.routing_stats import (
    chosen_experts,
    entropy_bits,
    load_shares,
    nearest_map_hit,
    previous_hit,
    speculation_recall,
    static_hit,
    summarise,
    top_k_mask,
)
from routing_samples import random_request, small_meta
from shared_data import shared


def choices(*rows: str) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """One layer; each row lists an iteration's experts as 0 and 1."""
    return np.array([[[digit == "1" for digit in row]] for row in rows])


def test_popularity_and_the_previous_iteration() -> None:
    training = choices("1100", "1100", "1010", "0101")  # loads 3, 3, 1, 1
    served = choices("1100", "0110", "0011")
    assert static_hit(training, served) == pytest.approx((2 + 1 + 0) / 6)
    assert load_shares(training).tolist() == [[3 / 8, 3 / 8, 1 / 8, 1 / 8]]
    assert previous_hit([served, choices("0110", "0110")]) == pytest.approx((1 + 1 + 2) / 6)


def test_the_nearest_map_is_that_of_the_seen_rows() -> None:
    stored = np.array([[[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[0, 0, 1], [1, 0, 0], [1, 0, 0]]], float)
    gate = np.array([[[0.9, 0.1, 0], [1, 0, 0], [0, 0, 1]], [[0, 0, 1], [0, 1, 0], [1, 0, 0]]], float)
    chosen = top_k_mask(gate, 1)
    # Distance 1, layer 1: row 0 is nearest to map 0 and map 1, whose rows 1 are both wrong. Layer 2: the
    # products of iteration 0 with the maps are 0.9 + 0 and 0 + 1, so map 1 wins; iteration 1 has 0 + 1 and
    # 1 + 0, of equals the first map wins. Both are wrong again.
    assert nearest_map_hit(stored, gate, chosen, distance=1) == 0
    # Distance 2: layer 2 follows layer 0 alone, both nearest maps are right.
    assert nearest_map_hit(stored, gate, chosen, distance=2) == 1


def test_blending_neighbours_follows_the_majority() -> None:
    # Three maps are close to the query; the nearest one disagrees with the other two about layer 1.
    stored = np.array([[[1, 0], [1, 0]], [[1, 0.01], [0, 1]], [[1, 0.01], [0, 1]], [[0, 1], [1, 0]]], float)
    gate = np.array([[[1, 0], [0, 1]]], float)
    assert nearest_map_hit(stored, gate, top_k_mask(gate, 1), distance=1) == 0
    assert nearest_map_hit(stored, gate, top_k_mask(gate, 1), distance=1, neighbours=3) == 1


def test_recall_compares_with_the_layer_that_was_aimed_at() -> None:
    gate = np.array([[[0.6, 0.3, 0.1], [0.1, 0.6, 0.3], [0.3, 0.1, 0.6]]])
    perfect = np.zeros_like(gate)
    perfect[:, :1] = gate[:, 2:]
    assert speculation_recall(gate, perfect, distance=2, top_k=2) == 1
    assert speculation_recall(gate, gate, distance=2, top_k=2) == pytest.approx(0.5)
    assert speculation_recall(gate, gate, distance=1, top_k=1) == 0


def test_entropy_and_ties() -> None:
    rows = np.array([[[0.25] * 4, [1.0, 0, 0, 0]], [[0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0]]])
    assert entropy_bits(rows).tolist() == pytest.approx([1.5, 0.75])
    assert top_k_mask(np.array([0.2, 0.4, 0.2, 0.2]), 2).tolist() == [True, True, False, False]


def test_chosen_experts_leave_the_prefill_out() -> None:
    routing = random_request(np.random.default_rng(0), small_meta(), [6, 1, 1])
    chosen = chosen_experts(routing, 1)
    assert chosen.shape == (2, 2, 4)
    for iteration in (1, 2):
        for layer in (0, 1):
            experts, _ = routing.required(iteration, layer)
            assert np.flatnonzero(chosen[iteration - 1, layer]).tolist() == experts.tolist()


@pytest.mark.parametrize(
    ("name", "static", "previous", "nearest"),
    [("gpt-oss-20b_mmlu524.npz", 0.29, 0.43, 0.61), ("deepseek-v2-lite_esft173.npz", 0.195, 0.28, 0.63)],
)
def test_real_recordings_measure_as_known(
    tmp_path: Path, name: str, static: float, previous: float, nearest: float
) -> None:
    meta = import_chosen_experts(shared(f"routing/{name}"), tmp_path / "t.parquet")
    file = RoutingFile(tmp_path / "t.parquet")
    rng = np.random.default_rng(0)
    drawn = rng.permutation(file.requests)[:160]
    requests = [file.recorded(int(i)) for i in drawn]
    found = summarise(requests, meta.top_k, distance=3, stored=1000, served=500, rng=rng)
    assert found["static_hit"] == pytest.approx(static, abs=0.03)
    assert found["previous_hit"] == pytest.approx(previous, abs=0.03)
    assert found["nearest_map_hit"] == pytest.approx(nearest, abs=0.03)

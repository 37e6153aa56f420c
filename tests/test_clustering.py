"""Routers by balanced spherical k-means: even loads, the mean folded away, the wanted top-K mass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from finemoe.realexec import clustering
from finemoe.realexec.clustering import balanced_spherical_kmeans, loads, make_router, unit_rows

Floats = npt.NDArray[np.float32]
WIDTH = 24


def topics(sizes: tuple[int, ...], seed: int = 3) -> tuple[Floats, npt.NDArray[np.intp]]:
    """Points around len(sizes) far directions, so many to each, and the direction of every point."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0][: len(sizes)]
    topic = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    points = 3 * directions[topic] + 0.3 * rng.standard_normal((len(topic), WIDTH))
    return points.astype(np.float32), topic


def with_mean(points: Floats, length: float) -> Floats:
    mean = np.full(WIDTH, length / np.sqrt(WIDTH), dtype=np.float32)
    return points + mean


def test_clusters_are_the_topics() -> None:
    points, topic = topics((100, 100, 100, 100))
    centroids = balanced_spherical_kmeans(unit_rows(points), 4, np.random.default_rng(0))
    assert np.linalg.norm(centroids, axis=1) == pytest.approx(np.ones(4), abs=1e-5)
    owner = np.argmax(points @ centroids.T, axis=1)
    assert len({(int(t), int(o)) for t, o in zip(topic, owner, strict=True)}) == 4  # one to one


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (16, 2), (12, 4)])
def test_loads_are_even_where_the_topics_are_not(experts: int, top_k: int) -> None:
    points, _ = topics((1000, 200, 100, 50, 50))
    router = make_router(with_mean(points, 20), experts, top_k, 0.6, np.random.default_rng(0))
    assert router.loads.sum() == pytest.approx(1, abs=1e-5)
    assert router.loads.max() < 1.15 / experts
    plain = unit_rows(points[:experts])  # a router of unbalanced rows, as a measure of what balance does
    assert loads(points @ plain.T, top_k).max() > 1.5 / experts


@pytest.mark.parametrize("mass", [0.4, 0.8])
def test_top_k_mass_is_as_asked(mass: float) -> None:
    points, _ = topics((300, 300, 300))
    inputs = with_mean(points, 20)
    router = make_router(inputs, 8, 2, mass, np.random.default_rng(1))
    logits = (inputs @ router.weight.T).astype(np.float64)
    rows = np.exp(logits - logits.max(axis=1, keepdims=True))
    rows /= rows.sum(axis=1, keepdims=True)
    assert np.sort(rows, axis=1)[:, -2:].sum(axis=1).mean() == pytest.approx(mass, abs=2e-3)
    assert router.top_k_mass == pytest.approx(mass, abs=2e-3)


def test_the_mean_does_not_choose() -> None:
    """However long the inputs' mean is, the router tells the topics apart as it does without one."""
    points, topic = topics((200, 200, 200, 200))
    for length in (1, 30, 300):
        inputs = with_mean(points, length)
        first = np.argmax(inputs @ make_router(inputs, 4, 1, 0.8, np.random.default_rng(2)).weight.T, axis=1)
        pure = sum(np.bincount(first[topic == t], minlength=4).max() for t in range(4))
        assert pure / len(topic) > 0.95, length


def test_same_generator_same_bytes() -> None:
    inputs = with_mean(topics((200, 100, 50))[0], 10)
    one, same, other = (make_router(inputs, 8, 2, 0.8, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert one.weight.tobytes() == same.weight.tobytes()
    assert one.weight.tobytes() != other.weight.tobytes()


def test_a_cluster_that_nobody_is_near_starts_again() -> None:
    points, _ = topics((40, 40))
    doubled = np.concatenate([points[:1]] * 60 + [points])  # several first centroids are the same point
    centroids = balanced_spherical_kmeans(unit_rows(doubled), 8, np.random.default_rng(0))
    assert np.isfinite(centroids).all()
    assert np.linalg.norm(centroids, axis=1) == pytest.approx(np.ones(8), abs=1e-5)


def test_choices_and_weights_are_mixtrals() -> None:
    logits = np.array([[0.0, 2.0, 1.0], [3.0, 3.0, -1.0]], dtype=np.float32)
    chosen, weights = clustering.choose(logits, 2)
    assert chosen.tolist() == [[1, 2], [0, 1]]
    odds = np.exp(1) / (1 + np.exp(1))
    assert weights == pytest.approx(np.array([[odds, 1 - odds], [0.5, 0.5]]), abs=1e-6)

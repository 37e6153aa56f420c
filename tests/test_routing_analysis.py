"""The routing analysis against plain computations of the same things, and figures known of a recording."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from analysis_traces import analysis_meta, write_trace
from finemoe._core import select_experts
from finemoe.errors import SettingError, TraceError
from finemoe.traces.npz_import import import_chosen_experts
from finemoe.traces.routing import RequestRouting
from finemoe.traces.routing_analysis import RoutingAnalysis, analyse_routing, claimed_bounds
from finemoe.traces.routing_analysis_draw import first_pass, second_pass, split_requests
from finemoe.traces.routing_analysis_patterns import Patterns, likeness
from finemoe.traces.routing_analysis_search import Served, coarse_hits, map_searcher, search_store
from finemoe.traces.routing_file import RoutingFile, write_routing
from finemoe.traces.routing_stats import (
    chosen_experts,
    entropy_bits,
    nearest_map_hit,
    previous_hit,
    top_k_mask,
)
from routing_samples import random_request
from shared_data import shared


def served_of(request: RequestRouting) -> Served:
    return Served(
        gate=request.gate[1:],
        chosen=chosen_experts(request, 1),
        embedding=None if request.embedding is None else request.embedding[1:],
        totals=request.token_totals(np.arange(1, request.iterations)),
        speculation={},
    )


@pytest.fixture
def longer() -> tuple[RequestRouting, RequestRouting]:
    """A request to search for, and one whose decode iterations are the store."""
    rng = np.random.default_rng(3)
    meta = analysis_meta()
    return random_request(rng, meta, [5] + [1] * 40), random_request(rng, meta, [5] + [1] * 60)


def test_searches_find_what_the_plain_computation_finds(
    longer: tuple[RequestRouting, RequestRouting],
) -> None:
    request, stored = longer
    meta, served, maps = analysis_meta(), served_of(request), stored.gate[1:]
    found = search_store(meta, maps, stored.embedding[1:] if stored.embedding is not None else None, served)
    assert list(found.hits) == [1, 2, 3, 4]
    for distance, hit in found.hits.items():
        assert hit == pytest.approx(
            nearest_map_hit(maps, served.gate, served.chosen, distance=distance), abs=1e-12
        )
    whole = maps[:, :4].reshape(len(maps), -1).astype(float)
    queries = served.gate[:, :4].reshape(len(served.gate), -1).astype(float)
    cosines = (queries @ whole.T) / np.linalg.norm(queries, axis=1)[:, None] / np.linalg.norm(whole, axis=1)
    assert found.whole_mean == pytest.approx(cosines.max(axis=1).mean(), abs=1e-5)
    assert found.whole_least == pytest.approx(cosines.max(axis=1).min(), abs=1e-5)


def test_delta_acts_where_the_core_prefetches_more_than_k(
    longer: tuple[RequestRouting, RequestRouting],
) -> None:
    request, stored = longer
    meta, served = analysis_meta(embedding_width=0), served_of(request)
    maps = stored.gate[1:][:3]  # so few that scores are low and δ large
    searcher = map_searcher(meta, len(maps))
    searcher.fill(maps, None)
    acting = 0
    for gate in served.gate:
        for layer, (place, score) in enumerate(searcher.search_iteration(gate, None)):
            acting += len(select_experts(maps[place, layer + 1], score, meta.top_k)) > meta.top_k
    share = search_store(meta, maps, None, served).delta[1]
    assert share == pytest.approx(acting / (len(served.gate) * (meta.layers - 1)))
    assert search_store(meta, maps, None, served_of(stored)).delta[4] < 1


def test_the_semantic_search_predicts_the_first_layers(
    longer: tuple[RequestRouting, RequestRouting],
) -> None:
    request, stored = longer
    meta, served = analysis_meta(), served_of(request)
    assert stored.embedding is not None
    assert served.embedding is not None
    maps, embeddings = stored.gate[1:], stored.embedding[1:]
    unit, asked = (
        rows.astype(float) / np.linalg.norm(rows.astype(float), axis=1, keepdims=True)
        for rows in (embeddings, served.embedding)
    )
    nearest = (asked @ unit.T).argmax(axis=1)
    guess = top_k_mask(maps[nearest, :2], meta.top_k)
    expected = (guess & served.chosen[:, :2]).sum() / served.chosen[:, :2].sum()
    found = search_store(meta, maps, embeddings, served)
    assert found.semantic[2] == pytest.approx(expected, abs=0.01)
    assert search_store(meta, maps, None, served).semantic == {}


def test_coarse_counts_are_searched_row_by_row(longer: tuple[RequestRouting, RequestRouting]) -> None:
    rng = np.random.default_rng(5)
    meta, served = analysis_meta(), served_of(longer[0])
    counts = rng.integers(0, 9, (7, meta.layers, meta.experts))
    best = top_k_mask(counts.astype(float), 2)
    inside = activations = 0
    for totals, chosen in zip(served.totals, served.chosen, strict=True):
        for seen in range(meta.layers - 2):
            scores = [
                sum(
                    float(row @ other) / float(np.linalg.norm(row) * np.linalg.norm(other))
                    for row, other in zip(totals[: seen + 1], matrix, strict=False)
                )
                for matrix in counts
            ]
            nearest = scores.index(max(scores))
            inside += int((best[nearest][seen + 2] & chosen[seen + 2]).sum())
            activations += int(chosen[seen + 2].sum())
    assert coarse_hits(counts, served, 2)[2] == pytest.approx(inside / activations)


def test_tokens_so_far_in_any_order(longer: tuple[RequestRouting, RequestRouting]) -> None:
    request = longer[0]
    rows = np.array([7, 0, 40, 7])
    for found, row in zip(request.token_totals(rows), rows.tolist(), strict=True):
        expected = np.zeros((5, 6), np.int64)
        for iteration in range(row + 1):
            for layer in range(5):
                experts, counts = request.required(iteration, layer)
                expected[layer, experts] += counts
        assert found.tolist() == expected.tolist()


def test_patterns_of_two_requests(longer: tuple[RequestRouting, RequestRouting]) -> None:
    meta = analysis_meta()
    patterns = Patterns(meta.layers, meta.experts)
    for request in longer:
        patterns.add(request.gate[1:], chosen_experts(request, 1))
    rows = np.concatenate([request.gate[1:] for request in longer])
    entropy = patterns.entropy()
    assert entropy.fine == pytest.approx(entropy_bits(rows).tolist())
    means = np.stack([request.gate[1:].astype(np.float32).mean(axis=0) for request in longer])
    assert entropy.coarse == pytest.approx(entropy_bits(means).tolist(), abs=1e-5)
    pairs = np.concatenate([r.gate[1:].astype(np.float32).reshape(-1, 2, 5, 6).mean(axis=1) for r in longer])
    two = entropy.aggregated[1]
    assert (two.iterations, two.windows) == (2, 50)
    assert two.bits == pytest.approx(entropy_bits(pairs).mean(), abs=1e-5)
    assert [a.iterations for a in entropy.aggregated] == [1, 2, 4, 8, 16, 32]
    choices = [chosen_experts(request, 1) for request in longer]
    assert patterns.previous_overlap() == pytest.approx(previous_hit(choices))
    loads = np.concatenate(choices).sum(axis=0)
    assert patterns.busiest() == pytest.approx((loads.max(axis=1) / loads.sum(axis=1) * 6).tolist())


def test_likeness_is_the_correlation_over_all_pairs() -> None:
    rng = np.random.default_rng(7)
    vectors, chosen = rng.random((6, 8)), top_k_mask(rng.random((6, 3, 5)), 2)
    similarity, hits = [], []
    for one in range(6):
        for other in range(one):
            a, b = vectors[one], vectors[other]
            similarity.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
            hits.append((chosen[one] & chosen[other]).sum() / 6)
    found = likeness("trajectory", "request", vectors, chosen, with_points=True)
    assert found is not None
    assert found.pairs == pytest.approx(np.corrcoef(similarity, hits)[0, 1], abs=1e-5)
    assert len(found.points) == 6
    assert [x for x, _ in found.curve] == sorted(x for x, _ in found.curve)
    assert likeness("semantic", "request", np.ones((6, 8)), chosen, with_points=False) is None


def analyse(folder: Path, **options: object) -> RoutingAnalysis:
    write_trace(folder / "trace.parquet", analysis_meta())
    settings = {"seeds": (0, 1), "capacities": (8, 1000), **options}
    return analyse_routing(folder / "trace.parquet", **settings)  # type: ignore[arg-type]


def test_an_analysis_of_a_trace(tmp_path: Path) -> None:
    found = analyse(tmp_path)
    assert (found.requests, found.recorded_requests) == (10, 10)
    assert [(s.seed, s.training_requests, s.served_requests) for s in found.seeds] == [(0, 7, 3), (1, 7, 3)]
    most = min(seed.training_iterations for seed in found.seeds)
    bounds = {bound.maps for bound in claimed_bounds(5, 6)}
    for seed in found.seeds:
        assert seed.training_iterations + seed.served_iterations == found.iterations
        assert [s.maps for s in seed.stores] == sorted({8, most} | {n for n in bounds if n <= most})
        assert list(seed.speculation) == [1]
        assert all(0 <= hit <= 1 for store in seed.stores for hit in store.hits.values())
    assert {(item.search, item.level) for item in found.likeness} == {
        (search, level) for search in ("trajectory", "semantic") for level in ("iteration", "request")
    }
    again = analyse(tmp_path)
    assert msgspec.json.encode(again) == msgspec.json.encode(found)


def test_training_and_served_requests_are_apart_and_maps_are_the_training_ones(tmp_path: Path) -> None:
    meta = analysis_meta()
    written = write_trace(tmp_path / "trace.parquet", meta)
    file = RoutingFile(tmp_path / "trace.parquet")
    overview = first_pass(file, 2000, 0, lambda _: None)
    split = split_requests(4, overview, overview, 0.7, 1000)
    assert sorted([*split.training, *split.testing]) == list(range(10))
    (drawn,) = second_pass(file, file, [split], [6], "sample", 3, lambda _: None)
    stored = {row.tobytes() for request in split.training for row in written[request].gate[1:]}
    asked = {row.tobytes() for request in split.testing for row in written[request].gate[1:]}
    maps, _ = drawn.store(6)
    assert len({row.tobytes() for row in maps}) == 6
    assert {row.tobytes() for row in maps} <= stored
    assert {row.tobytes() for row in drawn.served.gate} == asked
    (filled,) = second_pass(file, file, [split], [6], "rdy", 3, lambda _: None)
    searcher = map_searcher(meta, 6, distance=3)
    for request in split.training:
        embedding = written[request].embedding
        assert embedding is not None
        searcher.fill(written[request].gate[1:], embedding[1:])
    assert filled.store(6)[0].tobytes() == searcher.contents()[0].tobytes()


def test_a_store_of_another_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "store.parquet", analysis_meta(), requests=4, seed=9)
    found = analyse(tmp_path, store=tmp_path / "store.parquet")
    assert [(s.training_requests, s.served_requests) for s in found.seeds] == [(4, 10), (4, 10)]
    write_trace(tmp_path / "other.parquet", analysis_meta(layers=4))
    with pytest.raises(TraceError, match=r"other.parquet: metadata: layers = 4, .*trace.parquet has 5"):
        analyse(tmp_path, store=tmp_path / "other.parquet")


def test_without_embeddings_prefill_or_speculation(tmp_path: Path) -> None:
    meta = analysis_meta(embedding_width=0, speculation=(), prefill="none")
    rng = np.random.default_rng(0)
    requests = [random_request(rng, meta, [1] * 6) for _ in range(5)]
    write_routing(tmp_path / "t.parquet", meta, requests)
    found = analyse_routing(tmp_path / "t.parquet", seeds=(2,), capacities=(5,))
    assert found.iterations == 30  # the first iteration is a decode iteration, too
    assert found.seeds[0].speculation == {}
    assert {item.search for item in found.likeness} <= {"trajectory"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": ()}, "seeds = "),
        ({"seeds": (1, 1)}, "different whole numbers"),
        ({"capacities": (0,)}, r"capacities = \[0\]"),
    ],
)
def test_settings_that_mean_nothing(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        analyse(tmp_path, **options)


def test_traces_that_are_too_small(tmp_path: Path) -> None:
    write_trace(tmp_path / "few.parquet", analysis_meta(), requests=3)
    with pytest.raises(TraceError, match="3 requests with decode iterations; at least 4"):
        analyse_routing(tmp_path / "few.parquet")
    write_trace(tmp_path / "flat.parquet", analysis_meta(layers=1, speculation=()))
    with pytest.raises(TraceError, match="one layer"):
        analyse_routing(tmp_path / "flat.parquet")


def test_the_claimed_store_sizes() -> None:
    assert [(bound.maps, bound.claimed) for bound in claimed_bounds(24, 32)] == [
        (1536, 0.75),
        (2552, 0.98),
        (10_205, 0.98),
    ]


@pytest.mark.long
def test_the_recording_of_gpt_oss_gives_the_known_hit_rates(tmp_path: Path) -> None:
    import_chosen_experts(shared("routing/gpt-oss-20b_mmlu524.npz"), tmp_path / "t.parquet")
    found = analyse_routing(tmp_path / "t.parquet", capacities=(1000, 10_000))
    known = {1000: (0.64, 0.61, 0.59), 10_000: (0.70, 0.67, 0.64)}
    for place, store in enumerate(found.seeds[0].stores):
        for distance, hit in zip((1, 3, 6), known.get(store.maps, ()), strict=False):
            mean = np.mean([seed.stores[place].hits[distance] for seed in found.seeds])
            assert mean == pytest.approx(hit, abs=0.02), (store.maps, distance)
    assert {store.maps for store in found.seeds[0].stores} >= set(known)
    assert found.previous == pytest.approx(0.43, abs=0.01)
    assert np.mean(found.entropy.fine) < 0.7 * np.mean(found.entropy.coarse)

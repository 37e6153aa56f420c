"""Fitting the synthetic generator: a trace of known parameters is reproduced on requests held out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from finemoe.errors import SettingError, TraceError
from finemoe.traces.fit import PresetFit, fit_preset, measured, starting_preset
from finemoe.traces.fit_categories import read_categories
from finemoe.traces.fit_knobs import knobs_of, with_entropy, with_knobs, with_skew
from finemoe.traces.fit_sample import as_recorded, generated_requests, recorded_requests
from finemoe.traces.fit_search import generated_figures
from finemoe.traces.fit_statistics import measure
from finemoe.traces.preset_file import preset_text, write_preset
from finemoe.traces.routing_file import RoutingFile, write_routing
from finemoe.traces.routing_preset import load_preset, preset_names
from finemoe.traces.routing_stats import top_k_mask
from finemoe.traces.synthetic import SyntheticRouting
from fit_traces import ITERATIONS, REQUESTS, fit_meta, known_preset, write_known
from routing_samples import random_request

LENGTHS = ([64] * 28, [64] * 12)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> PresetFit:
    path = tmp_path_factory.mktemp("fit") / "known.parquet"
    return fit_preset(path, categories=write_known(path, fit_meta()))


def test_figures_of_held_out_requests_are_reproduced(fitted: PresetFit) -> None:
    assert (fitted.training_requests, fitted.held_out_requests) == (28, 12)
    recorded, generated = fitted.recorded.values, fitted.generated.values
    assert recorded.keys() == generated.keys()
    hits = [name for name in recorded if name.startswith(("overlap", "nearest", "blend", "own"))]
    assert len(hits) >= 10
    for name in hits:
        tolerance = 0.1 if name == "own_request_hit" else 0.05  # of 12 requests
        assert generated[name] == pytest.approx(recorded[name], abs=tolerance), name
    for name in ("static_hit", "cosine_within", "cosine_across", "semantic_hit"):
        assert generated[name] == pytest.approx(recorded[name], abs=0.08), name
    for distance, recall in ((1, 0.8), (3, 0.7)):
        assert recorded[f"speculation_recall_{distance}"] == pytest.approx(recall, abs=0.03)
        assert generated[f"speculation_recall_{distance}"] == pytest.approx(recall, abs=0.04)
    assert fitted.generated.entropy == pytest.approx(fitted.recorded.entropy, rel=0.05)


def test_what_the_recording_tells_is_calibrated_and_the_rest_assumed(fitted: PresetFit) -> None:
    preset = fitted.preset
    assert (preset.model, preset.layers, preset.experts, preset.embedding_width) == ("tiny", 6, 8, 16)
    labels = {name: entry.label for name, entry in preset.evidence.items()}
    assert labels["latent, shares, tokens"] == labels["rows"] == labels["speculation_recall"] == "CALIBRATED"
    assert "ASSUMED" in labels.values()
    assert preset.measured == measured(preset)
    lasting = preset.embedding.topic + preset.embedding.request
    assert lasting == pytest.approx(0.3, abs=0.12)  # what the known preset has


def test_same_seed_same_preset(fitted: PresetFit, tmp_path: Path) -> None:
    path = tmp_path / "known.parquet"
    again = fit_preset(path, categories=write_known(path, fit_meta()))
    assert msgspec.json.encode(again.preset) == msgspec.json.encode(fitted.preset)


def test_the_search_comes_nearer_than_its_start(fitted: PresetFit) -> None:
    meta = fit_meta()
    start = generated_figures(starting_preset(meta), meta, LENGTHS, 0, 300)
    names = ("static_hit", "overlap_1", "overlap_16", "nearest_1K_d3", "blend_1K_d3", "cosine_across")

    def error(values: dict[str, float]) -> float:
        return sum(abs(values[name] - fitted.recorded.values[name]) for name in names)

    assert error(fitted.generated.values) < 0.5 * error(start.values)


def test_knobs_give_a_preset_back() -> None:
    for name in preset_names():
        preset = load_preset(name)
        same = with_knobs(preset, knobs_of(preset))
        assert np.allclose(knobs_of(same), knobs_of(preset), atol=0.05)
        assert sum(msgspec.structs.asdict(same.shares).values()) == pytest.approx(1, abs=1e-9)
        for knob in range(len(knobs_of(preset))):  # any value means something
            for far in (-40.0, 40.0):
                moved = knobs_of(preset)
                moved[knob] = far
                SyntheticRouting(with_knobs(preset, moved), 0)


@pytest.mark.parametrize(("content", "mass"), [("full", "recorded"), ("chosen", "zero"), ("chosen", "even")])
def test_entropy_is_set_in_what_was_recorded(content: str, mass: str) -> None:
    meta = fit_meta(gate_content=content, unchosen_mass=mass, embedding_width=0, speculation=())
    goal = [0.8] * 3 + [0.95] * 3 if mass == "zero" else [2.0] * 3 + [2.5] * 3
    preset = with_entropy(known_preset(meta), goal, meta, 0)
    assert generated_figures(preset, meta, LENGTHS, 0, 100).entropy == pytest.approx(goal, rel=0.05)


def test_popularity_follows_the_recorded_load_layer_by_layer() -> None:
    meta = fit_meta(embedding_width=0, speculation=())
    preset, start = known_preset(meta), starting_preset(meta)
    wanted = generated_figures(preset, meta, LENGTHS, 0, 100)
    for _ in range(4):
        start = with_skew(start, wanted, generated_figures(start, meta, LENGTHS, 0, 100))
    got = generated_figures(start, meta, LENGTHS, 0, 100)
    assert np.array(got.skew) - 1 == pytest.approx(np.array(wanted.skew) - 1, rel=0.3)
    assert start.rows.bias[0] < start.rows.bias[-1]


def test_rows_keep_what_the_recording_kept() -> None:
    rows = np.array([[0.4, 0.3, 0.2, 0.1]])
    chosen = top_k_mask(rows, 2)
    full, zero, even = (
        fit_meta(experts=4),
        fit_meta(experts=4, gate_content="chosen", unchosen_mass="zero"),
        fit_meta(experts=4, gate_content="chosen", unchosen_mass="even"),
    )
    assert as_recorded(rows, chosen, full) == pytest.approx(rows, abs=1e-3)
    assert as_recorded(rows, chosen, zero) == pytest.approx(np.array([[4 / 7, 3 / 7, 0, 0]]), abs=1e-3)
    assert as_recorded(rows, chosen, even) == pytest.approx(np.array([[0.4, 0.3, 0.15, 0.15]]), abs=1e-3)


def test_recorded_and_generated_requests_of_one_source_are_the_same(tmp_path: Path) -> None:
    meta = fit_meta()
    source = SyntheticRouting(known_preset(meta), 3)
    write_routing(tmp_path / "t.parquet", meta, (source.routing_for(i, 64, 31, (1, 3)) for i in range(12)))
    file = RoutingFile(tmp_path / "t.parquet")
    topics = [str(source.topic(i)) for i in range(12)]
    read = recorded_requests(file, range(12), topics, ITERATIONS)
    made = generated_requests(source, [30] * 12, meta)
    figures = [measure(s[:8], s[8:], 2, searches=50, rng=np.random.default_rng(0)) for s in (read, made)]
    assert figures[0] == figures[1]


def test_copies_are_found_by_every_search(tmp_path: Path) -> None:
    """Where each served iteration is stored too, every search finds it."""
    meta = fit_meta(speculation=())
    routing = random_request(np.random.default_rng(0), meta, [4] + [1] * 60)
    gate = top_k_mask(routing.gate, 2) * routing.gate  # what is chosen is what the row says
    experts = np.nonzero(gate[1:])[2]
    chosen = random_request(np.random.default_rng(0), meta, [1] * 61)
    same = type(routing)(
        gate=gate / gate.sum(axis=2, keepdims=True),
        experts=np.concatenate((chosen.experts[: chosen.offsets[6]], experts)).astype(np.uint16),
        token_counts=chosen.token_counts,
        offsets=chosen.offsets,
        embedding=routing.embedding,
        speculation={},
    )
    write_routing(tmp_path / "t.parquet", meta, [same, same])
    requests = recorded_requests(RoutingFile(tmp_path / "t.parquet"), range(2), None, ITERATIONS)
    values = measure(requests[:1], requests[1:], 2, searches=60, rng=np.random.default_rng(0)).values
    assert values["nearest_1K_d3"] == values["semantic_hit"] == 1
    assert values["spread_1K"] == 0
    assert values["own_request_hit"] < 0.6
    assert values["cosine_requests"] == pytest.approx(1, abs=1e-5)
    assert "cosine_within" not in values


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_written_as_they_are_read(name: str, tmp_path: Path) -> None:
    preset = load_preset(name)
    write_preset(tmp_path / "own.toml", preset)
    assert load_preset(tmp_path / "own.toml") == preset
    write_preset(tmp_path / "own.toml", preset)  # a preset may be replaced
    assert [path.name for path in tmp_path.iterdir()] == ["own.toml"]
    odd = msgspec.structs.replace(preset, model='a "quoted"\n\x7fname')
    (tmp_path / "odd.toml").write_text(preset_text(odd), "utf-8")
    assert load_preset(tmp_path / "odd.toml") == odd


def test_what_is_no_preset_is_not_replaced(tmp_path: Path) -> None:
    preset = load_preset("mixtral-8x7b")
    (tmp_path / "notes.toml").write_text("mine = true\n")
    (tmp_path / "link.toml").symlink_to(tmp_path / "notes.toml")
    for name, problem in (
        ("notes.toml", "is no preset"),
        ("link.toml", "is a link"),
        (".", "is a directory"),
        ("absent/p.toml", "there is no folder"),
    ):
        with pytest.raises(SettingError, match=problem):
            write_preset(tmp_path / name, preset)
    assert (tmp_path / "notes.toml").read_text() == "mine = true\n"


def test_categories(tmp_path: Path) -> None:
    path = tmp_path / "categories"
    path.write_text('{"category": "law", "prompt": "…"}\n physics \n{"category": "law"}\n', "utf-8")
    assert read_categories(path) == ["law", "physics", "law"]
    for text, problem in (
        ("", "an empty file"),
        ("law\n\n", "line 2: '' has no category"),
        ('{"topic": 1}\n', "line 1: .* has no category"),
        ("law\n{broken\n", "line 2: no JSON"),
    ):
        path.write_text(text)
        with pytest.raises(TraceError, match=problem):
            read_categories(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="no UTF-8"):
        read_categories(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_categories(tmp_path / "absent")


def test_traces_that_cannot_be_fitted(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "t.parquet"

    def write(meta_changes: dict[str, object], count: int) -> None:
        meta = fit_meta(speculation=(), **meta_changes)
        write_routing(path, meta, [random_request(rng, meta, [2, 1, 1]) for _ in range(count)])

    write({}, REQUESTS)
    with pytest.raises(SettingError, match="categories: 2 for 40 requests"):
        fit_preset(path, categories=["a", "b"])
    write({}, 9)
    with pytest.raises(TraceError, match="9 requests with two decode iterations"):
        fit_preset(path)
    write({"layers": 1}, 12)
    with pytest.raises(TraceError, match="one layer"):
        fit_preset(path)
    write({"experts": 2}, 12)
    with pytest.raises(SettingError, match="uses all 2 experts"):
        fit_preset(path)

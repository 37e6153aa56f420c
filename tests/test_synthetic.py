"""The synthetic generator: same bytes in any order, the format's rules, and the presets' statistics."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from finemoe._core import (
    synthetic_drift,
    synthetic_embeddings,
    synthetic_gate,
    synthetic_logits,
    synthetic_repeats,
)
from finemoe.errors import CoreError, SettingError
from finemoe.traces import routing_preset
from finemoe.traces.fit import summary
from finemoe.traces.routing_check import check_routing
from finemoe.traces.routing_preset import preset_for, preset_names
from finemoe.traces.routing_stats import load_shares, nearest_map_hit, top_k_mask
from finemoe.traces.synthetic import SyntheticRouting, load_preset
from finemoe.traces.synthetic_math import drift, evenly_spaced, noise_strength, prompt_counts
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_samples import assert_same

NAMES = ["deepseek-v2-lite", "gpt-oss-20b", "mixtral-8x7b", "phi-3.5-moe", "qwen1.5-moe"]


@cache
def source(name: str, seed: int = 0) -> SyntheticRouting:
    return SyntheticRouting(load_preset(name), seed)


def test_presets_have_the_shapes_of_the_models() -> None:
    assert preset_names() == NAMES
    shapes = [(26, 64, 6), (24, 32, 4), (32, 8, 2), (32, 16, 2), (24, 60, 4)]
    for name, shape in zip(NAMES, shapes, strict=True):
        preset = load_preset(name)
        assert preset.model == name
        assert (preset.layers, preset.experts, preset.top_k) == shape


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    request=st.integers(0, 10_000),
    prompt=st.one_of(st.integers(1, 100), st.integers(1000, 14_050)),
    output=st.one_of(st.integers(1, 4), st.integers(250, 260)),
    speculation=st.sets(st.integers(1, 23), max_size=2),
)
def test_every_request_obeys_the_format(
    name: str, request: int, prompt: int, output: int, speculation: set[int]
) -> None:
    made = source(name)
    routing = made.routing_for(request, prompt, output, tuple(speculation))
    check_routing(routing, made.meta, "made", request)
    assert routing.tokens(made.meta.top_k).tolist() == [prompt] + [1] * (output - 1)
    assert routing.embedding is not None
    assert routing.embedding.shape == (output, 64)
    assert set(routing.speculation) == speculation
    for distance, rows in routing.speculation.items():
        assert not rows[:, made.meta.layers - distance :].any()
    # In decode the experts are the top K of the f16 row, the lower one of equals.
    flat = routing.experts[routing.offsets[made.meta.layers] :]
    mask = top_k_mask(routing.gate[1:], made.meta.top_k)
    assert np.array_equal(flat, np.nonzero(mask)[2])


def test_same_bytes_whatever_was_asked_before() -> None:
    preset = load_preset("mixtral-8x7b")
    one, other = SyntheticRouting(preset, 5), SyntheticRouting(preset, 5)
    asked = [(3, 40, 300, ()), (0, 2000, 5, (1, 3)), (7, 1, 1, ()), (3, 40, 300, (2,)), (0, 2000, 5, ())]
    first = [one.routing_for(*request) for request in asked]
    for index in (4, 1, 0, 3, 2, 0):
        assert_same(other.routing_for(*asked[index]), first[index])
    # Asking for speculation changes nothing else; a distance does not depend on the others asked for.
    assert first[3].gate.tobytes() == first[0].gate.tobytes()
    assert first[1].experts.tobytes() == first[4].experts.tobytes()
    alone = one.routing_for(0, 2000, 5, (3,))
    assert alone.speculation[3].tobytes() == first[1].speculation[3].tobytes()


def test_same_bytes_in_another_process_with_more_threads() -> None:
    program = (
        "import hashlib; from finemoe.traces.synthetic import *; "
        "r = SyntheticRouting(load_preset('phi-3.5-moe'), 11).routing_for(2, 500, 70, (1,)); "
        "parts = (r.gate, r.experts, r.token_counts, r.offsets, r.embedding, r.speculation[1]); "
        "print(hashlib.sha256(b''.join(p.tobytes() for p in parts)).hexdigest())"
    )
    paths = os.pathsep.join([str(Path(p).resolve()) for p in sys.path if p])
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": count, "OPENBLAS_NUM_THREADS": count},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for count in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 65


def test_requests_and_seeds_differ() -> None:
    made = source("mixtral-8x7b")
    gates = [made.routing_for(i, 10, 3).gate for i in range(3)]
    gates.append(source("mixtral-8x7b", 1).routing_for(0, 10, 3).gate)
    assert len({gate.tobytes() for gate in gates}) == 4


@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_those_the_preset_states(name: str) -> None:
    preset = load_preset(name)
    for seed in (0, 1):
        found = summary(preset, seed)
        for distance, recall in enumerate(preset.speculation_recall, start=1):
            assert found[f"speculation_recall_{distance}"] == pytest.approx(recall, abs=0.03)
        assert found["entropy_bits"] == pytest.approx(
            evenly_spaced(preset.rows.entropy_bits, preset.layers).mean(), abs=0.1
        )
        assert found.keys() == preset.measured.keys()
        for key, value in preset.measured.items():
            if seed == 0:
                assert found[key] == pytest.approx(value, abs=0.001)
            else:
                assert found[key] == pytest.approx(value, abs=0.04 if value < 1 else 0.1 * value)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen1.5-moe"])
def test_load_balances_in_the_long_run_but_not_within_a_request(name: str) -> None:
    made = source(name)
    layers, experts, top_k = made.meta.layers, made.meta.experts, made.meta.top_k
    masks = []
    for request in range(150):
        routing = made.routing_for(request, 1, 61)
        flat = routing.experts[routing.offsets[layers] :].reshape(-1, layers, top_k)
        mask = np.zeros((60, layers, experts), bool)
        np.put_along_axis(mask, flat.astype(np.int64), True, axis=2)
        masks.append(mask)
    long_run = load_shares(np.concatenate(masks)) * experts
    alone = np.mean([load_shares(mask).max(axis=1).mean() * experts for mask in masks])
    assert long_run.min() > 0
    assert long_run.max(axis=1).mean() - 1 < 0.6 * (alone - 1)
    if name == "mixtral-8x7b":
        assert long_run.max() < 2
        assert long_run.min() > 0.4


def test_prompts_of_a_topic_are_alike_in_embedding() -> None:
    preset = msgspec.structs.replace(load_preset("gpt-oss-20b"), embedding_coupling=0.0)
    made = SyntheticRouting(preset, 0)  # coupled topics could be near one another
    rows = [made.routing_for(i, 300, 1).embedding for i in range(120)]
    units = np.concatenate([np.asarray(row, dtype=np.float32) for row in rows])
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    cosines = (units @ units.T)[np.triu_indices(120, 1)]
    # 16 topics: about one pair in 16 shares one, and these stand apart from all others.
    alike = (cosines > 0.5).mean()
    assert alike == pytest.approx(1 / 16, abs=0.02)
    assert (cosines > 0.42).mean() < alike + 0.005


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_prompt_counts_add_up(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    experts = data.draw(st.integers(2, 12))
    top_k, layers = data.draw(st.integers(1, experts - 1)), data.draw(st.integers(1, 3))
    drawn = data.draw(st.integers(1, 8))
    tokens = drawn + data.draw(st.one_of(st.just(0), st.integers(1, 3), st.integers(100, 20_000)))
    # Tokens that nearly always choose the same experts press against the bound of one visit per token.
    chosen = top_k_mask(rng.random((drawn, layers, experts)) - 0.3 * np.arange(experts), top_k)
    sampled = chosen.sum(axis=0)
    long_run = sampled / sampled.sum(axis=1, keepdims=True)
    counts = prompt_counts(rng, sampled, long_run, tokens, top_k, 2.0)
    assert (counts.sum(axis=1) == tokens * top_k).all()
    assert (counts >= sampled).all()
    assert counts.max() <= tokens


def test_drift_has_unit_variance_and_the_stated_correlation() -> None:
    series = drift(np.random.default_rng(0), 20_000, 4, 0.6)
    assert series.std(axis=0) == pytest.approx(1, abs=0.05)
    for lag in (1, 2, 3):
        measured = (series[lag:] * series[:-lag]).mean()
        assert measured == pytest.approx(0.6**lag, abs=0.03)
    assert drift(np.random.default_rng(0), 0, 4, 0.6).shape == (0, 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(0, 20), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
def test_repeats_are_of_earlier_tokens_and_go_on_in_order(
    n: int, stock: int, repeat: float, run: float, seed: int
) -> None:
    draws = np.random.default_rng(seed).random((n, 3))
    expected = list(range(stock))
    last = None  # what the token before repeated, before it was followed to its origin
    for t, (goes_on, starts, where) in enumerate(draws, start=stock):
        if last is not None and goes_on < run:
            last += 1
        elif t > 0 and starts < repeat:
            last = int(where * t)
        else:
            last = None
        expected.append(t if last is None else expected[last])
    assert synthetic_repeats(draws, stock, repeat, run).tolist() == expected[stock:]
    assert all(source <= t for t, source in enumerate(expected))


def test_noise_differs_by_iteration_and_leaves_the_variance_alone() -> None:
    for share, concentration in ((0.1, 1.0), (0.3, 5.0)):
        read, noise = noise_strength(np.random.default_rng(0), 200_000, share, concentration)
        part = share * noise.astype(np.float64) ** 2
        assert np.allclose(part + (1 - share) * read.astype(np.float64) ** 2, 1, atol=1e-4)
        assert part.mean() == pytest.approx(share, abs=0.005)
        assert part.var() == pytest.approx(share * (1 - share) / (concentration + 1), rel=0.05)
    for share in (0.0, 1.0):
        read, noise = noise_strength(np.random.default_rng(0), 3, share, 1.0)
        assert read.tolist() == noise.tolist() == [1, 1, 1]


def test_repeated_tokens_are_found_in_the_request_itself() -> None:
    preset = load_preset("gpt-oss-20b")
    hits = []
    for repeat in (0.0, 0.5):
        tokens = msgspec.structs.replace(preset.tokens, repeat=repeat, stock=0)
        made = SyntheticRouting(msgspec.structs.replace(preset, tokens=tokens), 0)
        gates = [made.routing_for(i, 10, 181).gate[1:] for i in range(8)]
        hits.append(
            np.mean(
                [
                    nearest_map_hit(g[:150], g[150:], top_k_mask(g[150:], preset.top_k), distance=3)
                    for g in gates
                ]
            )
        )
    assert hits[1] > hits[0] + 0.1


@pytest.mark.parametrize(
    ("coupling", "least", "most"), [(0.0, -0.15, 0.15), (0.5, 0.5, 0.92), (1.0, 0.92, 1.0)]
)
def test_embeddings_follow_routing_as_far_as_they_are_coupled(
    coupling: float, least: float, most: float
) -> None:
    preset = msgspec.structs.replace(load_preset("gpt-oss-20b"), embedding_coupling=coupling)
    made = SyntheticRouting(preset, 0)
    kinds = made.kinds[:60].astype(np.float64)
    embeddings = made.kind_embeddings[:60].astype(np.float64)
    upper = np.triu_indices(60, 1)
    of_kinds, of_embeddings = ((vectors @ vectors.T)[upper] for vectors in (kinds, embeddings))
    assert least < np.asarray(np.corrcoef(of_kinds, of_embeddings))[0, 1] < most


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.integers(1, 130), st.floats(0.1, 12.0), st.data())
def test_gate_rows_are_the_softmax_and_their_top_k(
    rows: int, experts: int, spread: float, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = (spread * rng.standard_normal((rows, experts))).astype(np.float32)
    gate, chosen = synthetic_gate(logits, experts, top_k)
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum(axis=1, keepdims=True)
    assert np.allclose(
        gate.astype(np.float64), exact, rtol=6e-4, atol=4e-8
    )  # half a step of f16, subnormals too
    best = np.argsort(-gate.astype(np.float32), axis=1, kind="stable")[:, :top_k]
    assert np.array_equal(chosen, np.sort(best, axis=1))  # of equals the lower one


def test_every_gate_row_that_is_even_chooses_the_lowest_experts() -> None:
    for experts in (1, 8, 60):
        _, chosen = synthetic_gate(np.zeros((3, experts), np.float32), experts, (experts + 1) // 2)
        assert chosen.tolist() == [list(range((experts + 1) // 2))] * 3


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 150), st.integers(0, 1000))
def test_logits_are_the_product_with_bias_and_bounded_noise(n: int, size: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    latents, readout = (
        rng.standard_normal((n, size), np.float32),
        rng.standard_normal((size, width), np.float32),
    )
    bias, noise = rng.standard_normal(width, np.float32), rng.random(width, np.float32)
    strength = 2 * rng.random(n, np.float32)
    streams = rng.integers(1, 1 << 32, width, dtype=np.uint32)
    at_once, parts = streams.copy(), streams.copy()
    logits = synthetic_logits(latents, readout, bias, noise, strength, at_once)
    cut = n // 2
    halves = [
        synthetic_logits(latents[part], readout, bias, noise, strength[part], parts)
        for part in (slice(cut), slice(cut, None))
    ]
    assert np.concatenate(halves).tobytes() == logits.tobytes()  # whatever is made at a time
    assert at_once.tobytes() == parts.tobytes()
    error = logits - (latents.astype(np.float64) @ readout + bias)
    assert (np.abs(error) <= 0.5 * strength[:, None] * noise + 1e-4).all()


def test_bits_are_those_of_plain_f32_arithmetic() -> None:
    """On any processor: NumPy does here, one operation after another, what the kernels do."""
    rng = np.random.default_rng(3)
    n, size, experts, layers = 5, 3, 12, 9
    width = experts * layers
    latents, readout = (
        rng.standard_normal((n, size), np.float32),
        rng.standard_normal((size, width), np.float32),
    )
    bias, noise = rng.standard_normal(width, np.float32), rng.random(width, np.float32)
    strength = rng.random(n, np.float32)
    streams = rng.integers(1, 1 << 32, width, dtype=np.uint32)
    expected, mine = [], streams.copy()
    for latent, strong in zip(latents, strength, strict=True):
        row = bias + noise * strong * uniform(mine)
        for weight, column in zip(latent, readout, strict=True):
            row = row + weight * column
        expected.append(row)
    logits = synthetic_logits(latents, readout, bias, noise, strength, streams)
    assert logits.tobytes() == np.array(expected, np.float32).tobytes()
    assert streams.tobytes() == mine.tobytes()

    rounding = np.float32(1.5 * 2**23)
    t = np.clip(logits, np.float32(-80), np.float32(80)) * np.float32(1.44269504)
    whole = (t + rounding) - rounding
    f = t - whole
    p = np.full_like(f, 1.5337577e-4)
    for factor in (1.339986e-3, 9.61852e-3, 5.550329e-2, 2.4022646e-1, 6.931472e-1, 1.0):
        p = p * f + np.float32(factor)
    shares = np.ldexp(p, whole.astype(np.int32)).reshape(-1, experts)
    total = np.zeros(len(shares), np.float32)
    for column in shares.T:
        total += column
    gate, _ = synthetic_gate(logits, experts, 2)
    assert gate.tobytes() == (shares * (np.float32(1) / total)[:, None]).astype(np.float16).tobytes()

    kinds = rng.integers(0, 7, 20)
    table, mean = rng.standard_normal((7, 20), np.float32), rng.standard_normal(20, np.float32)
    streams = rng.integers(1, 1 << 32, 20, dtype=np.uint32)
    mine = streams.copy()
    rows = [table[kind] + mean + np.float32(0.3) * uniform(mine) for kind in kinds]
    made = synthetic_embeddings(kinds, table, mean, 0.3, streams)
    assert made.tobytes() == np.array(rows).astype(np.float16).tobytes()


def uniform(
    streams: np.ndarray[tuple[int, ...], np.dtype[np.uint32]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The streams' next numbers; they move on."""
    streams ^= streams << 13
    streams ^= streams >> 17
    streams ^= streams << 5
    return (streams >> 8).astype(np.float32) * np.float32(2**-24) - np.float32(0.5)


def test_noise_is_uniform_and_independent() -> None:
    rng = np.random.default_rng(0)
    streams = rng.integers(1, 1 << 32, 64, dtype=np.uint32)
    nothing, one = np.zeros((4000, 1), np.float32), np.ones(4000, np.float32)
    noise = synthetic_logits(
        nothing,
        np.zeros((1, 64), np.float32),
        np.zeros(64, np.float32),
        np.ones(64, np.float32),
        one,
        streams,
    )
    assert abs(noise.mean()) < 0.005
    assert noise.std() == pytest.approx(12**-0.5, abs=0.003)
    assert np.abs(noise).max() <= 0.5
    across = np.asarray(np.corrcoef(noise.T))[np.triu_indices(64, 1)]
    following = [np.corrcoef(column[1:], column[:-1])[0, 1] for column in noise.T]
    assert np.abs(across).max() < 0.08  # 2,016 pairs of 4,000: five standard deviations
    assert np.abs(following).max() < 0.08


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    row, streams, one = np.zeros(4, np.float32), np.ones(4, np.uint32), np.ones(1, np.float32)
    wide = np.zeros((2, 4), np.float32)
    with pytest.raises(CoreError, match=r"latents are not \[n, D\]"):
        synthetic_logits(np.zeros((1, 3), np.float32), wide, row, row, one, streams)
    with pytest.raises(CoreError, match="differ in columns"):
        synthetic_logits(wide.T.copy(), wide, row, row, one, streams[:2].copy())
    with pytest.raises(CoreError, match=r"strength is not \[n\]"):
        synthetic_logits(wide.T.copy(), wide, row, row, one, streams)
    with pytest.raises(CoreError, match=r"draws are not \[n, 3\]"):
        synthetic_repeats(np.zeros(4), 0, 0.1, 0.8)
    with pytest.raises(CoreError, match="not rows of J"):
        synthetic_gate(wide, 3, 1)
    with pytest.raises(CoreError, match="experts or top_k"):
        synthetic_gate(wide, 4, 5)
    with pytest.raises(CoreError, match="no such kind"):
        synthetic_embeddings(np.array([2]), wide, row, 0.1, streams)
    with pytest.raises(CoreError, match="correlation"):
        synthetic_drift(wide, 1.0)


def test_lengths_and_distances_out_of_range_are_refused() -> None:
    made = source("mixtral-8x7b")
    for lengths in ((0, 5), (5, 0), (-1, 5)):
        with pytest.raises(SettingError, match="both must be at least 1"):
            made.routing_for(0, *lengths)
    for distance in (0, 32):
        with pytest.raises(SettingError, match="choose from 1 … 31"):
            made.routing_for(0, 1, 1, (distance,))


def test_a_preset_of_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_bytes((Path(routing_preset.__file__).parent / "presets" / "mixtral-8x7b.toml").read_bytes())
    assert load_preset(own) == load_preset("mixtral-8x7b")
    own.write_text("layers = = 3")
    with pytest.raises(SettingError, match=r"own\.toml"):
        load_preset(own)
    with pytest.raises(SettingError, match="neither a file nor one of deepseek-v2-lite"):
        load_preset("mixtral-9x9b")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"layers = 32", "layers = 32\nshape = 3", "unknown field `shape`"),
        (r"topics = \d+", "topics = 16\ncolour = 1", "unknown field `colour`"),
        (r"layers = 32", 'layers = "many"', "Expected `int`"),
        (r"layers = 32", "", "missing required field `layers`"),
        (r"layers = 32", "layers = 0", "layers must be at least 1"),
        (r"top_k = 2", "top_k = 8", "top_k < experts"),
        (r"topic = [\d.]+", "topic = 0.5", "shares: sum to"),
        (r"request = [\d.]+", "request = -0.02", "no share may be negative"),
        (r"layer_width = [\d.]+", "layer_width = 0.0", "layer_width must be positive"),
        (r"context_layers = [\d.]+", "context_layers = 0.0", "context_layers must be positive"),
        (r"global_share = [\d.]+", "global_share = 1.5", "global_share must be in"),
        (r"drift_correlation = [\d.]+", "drift_correlation = 1.0", "drift_correlation must be in"),
        (r"kinds = \d+", "kinds = 1", "kinds ≥ 2"),
        (r"repeat = [\d.]+", "repeat = 1.5", "tokens.repeat must be in"),
        (r"run = [\d.]+", "run = -0.1", "tokens.run must be in"),
        (r"stock = \d+", "stock = -1", "tokens.stock must be in"),
        (r"bias = \[", "bias = [-0.1, ", "rows.bias needs values"),
        (
            r"noise_concentration = [\d.]+",
            "noise_concentration = 0.0",
            "noise_concentration must be positive",
        ),
        (r"embedding_coupling = [\d.]+", "embedding_coupling = 1.2", "embedding_coupling must be in"),
        (r"entropy_bits = \[[\d.]+\]", "entropy_bits = [3.0]", "entropy_bits must be between 0 and"),
        (r"recall = \[[\d.]+", "recall = [0.2", "above chance"),
        (r'label = "MEASURED"', 'label = "GUESSED"', "GUESSED"),
    ],
)
def test_presets_that_make_no_sense_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (Path(routing_preset.__file__).parent / "presets" / "mixtral-8x7b.toml").read_text()
    changed, times = re.subn(old, lambda _: new, text, count=1)
    assert times == 1
    (tmp_path / "own.toml").write_text(changed)
    with pytest.raises(SettingError, match=message):
        load_preset(tmp_path / "own.toml")


def test_rows_sharper_than_can_be_made_are_refused() -> None:
    preset = load_preset("mixtral-8x7b")
    sharp = msgspec.structs.replace(preset, rows=msgspec.structs.replace(preset.rows, entropy_bits=(0.01,)))
    with pytest.raises(SettingError, match="out of reach"):
        SyntheticRouting(sharp, 0)


def test_a_model_without_a_preset_gets_the_nearest_one_reshaped() -> None:
    """Its own preset, one of its shape, or one of about as many experts with everything ASSUMED."""
    assert preset_for("mixtral-8x7b", 32, 8, 2, 1).evidence["rows"].label == "CALIBRATED"
    same = preset_for("finetune", 24, 60, 4, 17)
    assert same.model.startswith("qwen1.5-moe, of the same shape as finetune")
    made = preset_for("other", 5, 16, 8, 17)
    assert made.model.startswith("phi-3.5-moe, reshaped as other")
    assert {entry.label for entry in made.evidence.values()} == {"ASSUMED"}
    routing = SyntheticRouting(made, 0).routing_for(0, 30, 12)
    assert routing.gate.shape == (12, 5, 16)
    assert routing.tokens(8).tolist() == [30] + [1] * 11
    with pytest.raises(SettingError, match="uses all 4 experts"):
        preset_for("dense", 2, 4, 4, 1)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(2, 130), st.data())
def test_every_shape_can_be_made_up(layers: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts - 1))
    routing = SyntheticRouting(preset_for("any", layers, experts, top_k, 1), 0).routing_for(0, 9, 3)
    assert routing.tokens(top_k).tolist() == [9, 1, 1]
    assert np.allclose(routing.gate.astype(np.float32).sum(axis=2), 1, atol=0.01)

"""The roofline against numbers worked by hand, against a slow loop, and its order properties."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest
from finemoe.calibration.profile import HardwareProfile, load_profile
from finemoe.errors import SettingError
from finemoe.policy.models import MODEL_NAMES, load_model_spec
from finemoe.sim.compute import ITERATION_LAUNCHES, LAYER_LAUNCHES, ComputeModel
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

# Round figures, so that the golden numbers can be checked on paper: 1e12 B/s, 1e14 FLOP/s, launches for free.
ROUND = msgspec.structs.replace(
    load_profile("a100-80gb"),
    memory_bandwidth=2e12,
    memory_efficiency=0.5,
    peak_flops=2e14,
    flops_efficiency=0.5,
    kernel_launch_s=1e-12,
)
MIXTRAL = load_model_spec("mixtral-8x7b")


def with_devices(devices: int) -> HardwareProfile:
    return msgspec.structs.replace(ROUND, devices=devices, peer_latency_s=1e-5, peer_bandwidth=5e10)


@cache
def model_on(name: str, devices: int) -> ComputeModel:
    return ComputeModel(load_model_spec(name), "bf16", with_devices(devices))


def test_mixtral_decode_without_offload_is_weights_read_over_bandwidth() -> None:
    compute = ComputeModel(MIXTRAL, "bf16", ROUND)
    counts = np.zeros((32, 8), np.int32)
    counts[:, :2] = 1
    tpot = (
        compute.expert_s(counts).sum()
        + 32 * compute.attention_s(1, 1)
        + compute.iteration_overhead_s(1, 1)
        + 32 * compute.exchange_s(1)
    )
    # 12.749e9 parameters without the input embedding, two bytes each, at 1e12 bytes/s.
    assert tpot == pytest.approx(12.748853248e9 * 2 / 1e12, rel=1e-4)


def test_experts_by_hand() -> None:
    compute = ComputeModel(MIXTRAL, "bf16", ROUND)
    counts = np.zeros((32, 8), np.int32)
    counts[0, 3] = 1  # memory bound: 352321536 bytes at 1e12 bytes/s
    counts[1, 3] = 1000  # compute bound: 2 · 176160768 · 1000 FLOPs at 1e14 FLOP/s
    counts[2, :2] = 100  # at the ridge, 2 · 176160768 · 100 / 1e14 = 352321536 / 1e12; two experts
    times = compute.expert_s(counts)
    assert times[0] == pytest.approx(0.352321536e-3, rel=1e-7)
    assert times[1] == pytest.approx(3.52321536e-3, rel=1e-7)
    assert times[2] == pytest.approx(2 * 0.352321536e-3, rel=1e-7)
    assert not times[3:].any()


def test_expert_dtype_scales_the_bytes_and_not_the_operations() -> None:
    one, many = np.zeros((32, 8), np.int32), np.zeros((32, 8), np.int32)
    one[0, 0], many[0, 0] = 1, 100_000
    bf16, mxfp4 = ComputeModel(MIXTRAL, "bf16", ROUND), ComputeModel(MIXTRAL, "mxfp4", ROUND)
    assert bf16.expert_s(one)[0] / mxfp4.expert_s(one)[0] == pytest.approx(16 / 4.25, rel=1e-6)
    assert bf16.expert_s(many)[0] == mxfp4.expert_s(many)[0]


def test_devices_work_side_by_side() -> None:
    counts = np.zeros((32, 8), np.int32)
    counts[1, [0, 1, 2, 4]] = 1
    # 8 experts a layer on 4 devices: layer 1 starts at device 0 again; experts 0 and 4 share it.
    assert model_on("mixtral-8x7b", 4).expert_s(counts)[1] == pytest.approx(2 * 0.352321536e-3, rel=1e-7)
    # On 3 devices expert 8 + j is on (8 + j) mod 3: experts 0, 1, 2, 4 on 2, 0, 1, 0.
    assert model_on("mixtral-8x7b", 3).expert_s(counts)[1] == pytest.approx(2 * 0.352321536e-3, rel=1e-7)
    counts[1, 4] = 0
    assert model_on("mixtral-8x7b", 3).expert_s(counts)[1] == pytest.approx(0.352321536e-3, rel=1e-7)


def test_attention_by_hand() -> None:
    compute = ComputeModel(MIXTRAL, "bf16", ROUND)
    layer = 4096 * 10240 + 2 * 4096 + 4096 * 8
    kv = 2 * 8 * 128 * 2
    # Decode, 8 requests with 8,000 context tokens in all: both parts memory bound.
    decode = layer * 2 / 1e12 + 8008 * kv / 1e12
    assert compute.attention_s(8, 8000) == pytest.approx(decode, rel=1e-6)
    # Prefill of 2,000 tokens: both parts compute bound.
    pairs = 2000 * 2001 // 2
    prefill = 2 * layer * 2000 / 1e14 + pairs * 4 * 32 * 128 / 1e14
    assert compute.attention_s(2000, 2000, score_pairs=pairs) == pytest.approx(prefill, rel=1e-6)


def test_iteration_overhead_by_hand() -> None:
    compute = ComputeModel(MIXTRAL, "bf16", ROUND)
    row = 4096 * 2 * 2  # read and written
    head = 32000 * 4096
    assert compute.iteration_overhead_s(1, 1) == pytest.approx((row + head * 2) / 1e12, rel=1e-6)
    many = 1000 * row / 1e12 + 2 * head * 1000 / 1e14
    assert compute.iteration_overhead_s(1000, 1000) == pytest.approx(many, rel=1e-6)
    # Mixtral has no layer without experts, DeepSeek-V2-Lite has one: attention and a feed-forward of 10944.
    assert compute.iteration_overhead_s(1, 1, 5000) == compute.iteration_overhead_s(1, 1)
    deepseek = load_model_spec("deepseek-v2-lite")
    compute = ComputeModel(deepseek, "bf16", ROUND)
    dense = (deepseek.dense_layer_parameters * 2 + 5001 * 576 * 2) / 1e12
    whole = dense + (2048 * 2 * 2 + 102400 * 2048 * 2) / 1e12
    assert compute.iteration_overhead_s(1, 1, 5000) == pytest.approx(whole, rel=1e-6)


def test_launches_are_charged_once_per_part() -> None:
    slow = ComputeModel(MIXTRAL, "bf16", msgspec.structs.replace(ROUND, kernel_launch_s=1.0))
    counts = np.zeros((32, 8), np.int32)
    counts[4] = 1
    assert int(slow.attention_s(1, 1)) == LAYER_LAUNCHES
    assert int(slow.iteration_overhead_s(1, 1)) == ITERATION_LAUNCHES
    assert [int(t) for t in slow.expert_s(counts)] == [0, 0, 0, 0, 1] + 27 * [0]
    assert int(slow.experts_time_s(4, [0, 1], [1, 1])) == 1
    assert slow.experts_time_s(4, [0, 1], [0, 0]) == slow.experts_time_s(4, [], []) == 0.0


def test_exchange_by_hand() -> None:
    assert ComputeModel(MIXTRAL, "bf16", ROUND).exchange_s(100) == 0.0
    # Both ways: 10 us and 100 tokens · 2 experts · 3/4 elsewhere · 8192 bytes at 5e10 bytes/s.
    expected = 2 * (1e-5 + 100 * 2 * 0.75 * 8192 / 5e10)
    assert model_on("mixtral-8x7b", 4).exchange_s(100) == pytest.approx(expected)


def test_exchange_over_pcie_takes_two_hops_by_hand() -> None:
    profile = msgspec.structs.replace(with_devices(4), link_latency_s=2e-5, link_bandwidth=2e10)
    compute = ComputeModel(MIXTRAL, "bf16", profile, peer_link="pcie")
    # Both ways, each up to the host and down again: 20 us and 100 · 2 · 3/4 rows of 8192 bytes at 2e10.
    hop = 2e-5 + 100 * 2 * 0.75 * 8192 / 2e10
    assert compute.exchange_s(100) == pytest.approx(2 * 2 * hop)
    # What devices say to one another over PCIe needs no peer figures; one device says nothing.
    alone = msgspec.structs.replace(profile, peer_latency_s=None, peer_bandwidth=None)
    assert ComputeModel(MIXTRAL, "bf16", alone, peer_link="pcie").exchange_s(100) == compute.exchange_s(100)
    assert ComputeModel(MIXTRAL, "bf16", ROUND, peer_link="pcie").exchange_s(100) == 0.0


def test_several_devices_need_peer_figures() -> None:
    with pytest.raises(SettingError, match="peer_bandwidth"):
        ComputeModel(MIXTRAL, "bf16", msgspec.structs.replace(ROUND, devices=2))


def test_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        ComputeModel(MIXTRAL, "bf16", ROUND).expert_s(np.zeros((8, 32), np.int32))


counts_seed = st.integers(0, 2**32 - 1)
settings = st.tuples(st.sampled_from(MODEL_NAMES), st.sampled_from([1, 2, 3, 6, 7, 11]))


def random_counts(name: str, seed: int) -> NDArray[np.int32]:
    spec = load_model_spec(name)
    rng = np.random.default_rng(seed)
    shape = (spec.layers, spec.experts)
    used = rng.random(shape) < rng.random()
    return (used * rng.integers(0, rng.choice([3, 300, 3000]), shape)).astype(np.int32)


@given(settings, counts_seed)
def test_whole_layers_equal_a_slow_loop(setting: tuple[str, int], seed: int) -> None:
    name, devices = setting
    spec, counts = load_model_spec(name), random_counts(name, seed)
    expected = np.zeros(spec.layers)
    for layer in range(spec.layers):
        per_device = [0.0] * devices
        for j in range(spec.experts):
            if n := int(counts[layer, j]):
                work = max(2 * spec.expert_parameters * n / 1e14, spec.expert_parameters * 2 / 1e12)
                per_device[(layer * spec.experts + j) % devices] += work
        expected[layer] = max(per_device) + (1e-12 if max(per_device) else 0.0)
    compute = model_on(name, devices)
    np.testing.assert_allclose(compute.expert_s(counts), expected, rtol=1e-12)
    every = range(spec.experts)
    chunks = [compute.experts_time_s(layer, every, counts[layer].tolist()) for layer in range(spec.layers)]
    np.testing.assert_allclose(chunks, expected, rtol=1e-12)


@given(settings, counts_seed, st.data())
def test_chunks_cost_no_less_together_and_no_more_each(
    setting: tuple[str, int], seed: int, data: st.DataObject
) -> None:
    name, devices = setting
    spec, compute = load_model_spec(name), model_on(name, devices)
    counts = random_counts(name, seed)[0].tolist()
    chosen = data.draw(st.sets(st.integers(0, spec.experts - 1)))
    parts = [sorted(chosen), sorted(set(range(spec.experts)) - chosen)]
    whole = compute.experts_time_s(0, range(spec.experts), counts)
    times = [compute.experts_time_s(0, part, [counts[j] for j in part]) for part in parts]
    assert max(times) <= whole * (1 + 1e-12)
    assert sum(times) >= whole * (1 - 1e-12)


@given(settings, counts_seed, st.integers(1, 500), st.integers(1, 9000), st.integers(1, 500))
def test_more_work_never_takes_less_time(
    setting: tuple[str, int], seed: int, tokens: int, context: int, more: int
) -> None:
    name, devices = setting
    compute, counts = model_on(name, devices), random_counts(name, seed)
    assert (compute.expert_s(counts + more) >= compute.expert_s(counts)).all()
    assert compute.attention_s(tokens + more, context) >= compute.attention_s(tokens, context)
    assert compute.attention_s(tokens, context + more) >= compute.attention_s(tokens, context)
    assert compute.iteration_overhead_s(tokens + more, 1) > compute.iteration_overhead_s(tokens, 1)
    assert compute.exchange_s(tokens + more) >= compute.exchange_s(tokens)
    assert compute.attention_s(tokens, context) > 0.0

"""Losslessness on a device: the resident model's bits, whatever was cached. On the CPU one case of each runs
too; test_load_model.py has all of them there."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
from cuda_case import DEVICES, NEEDS_CUDA, torch
from finemoe.policy.systems import find_system
from finemoe.realexec import devices, experts_kernel, handle
from finemoe.realexec.experts_kernel import LayerOutputs, launches
from finemoe.realexec.host_reader import HostReader, pack, unpack
from finemoe.realexec.load import load_model, model_options, read_checkpoint
from hypothesis import given as drawn
from hypothesis import strategies as st
from test_load_model import assert_same, logits, prompts, save
from tiny_models import VOCABULARY

pytestmark = pytest.mark.filterwarnings("ignore:.*expert slots are at or below one token cycle")
SYSTEMS = ("finemoe", "lru", "moe-infinity", "promoe", "mixtral-offloading", "deepspeed", "no-offload")


def check(folder: Path, resident: Any, given: dict[str, Any], policy: str, cache: str, device: Any) -> None:
    """The resident model's logits and the offloaded one's are the same bits, from host memory and files."""
    wanted = logits(resident, given)
    model = load_model(folder, policy, cache, device, "host", progress=False)
    model.generation_config.eos_token_id = None
    for _ in range(2):
        assert_same(wanted, logits(model, given))
        model.finemoe.reset()  # while the device may still compute
    model.finemoe.close()
    model = load_model(folder, policy, cache, device, "file")
    model.generation_config.eos_token_id = None
    assert_same(wanted, logits(model, given))
    model.finemoe.close()


def on(device: str, given: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.to(device) for name, tensor in given.items()}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("device", DEVICES)
def test_families_are_lossless(device: str, family: str, tmp_path: Path) -> None:
    if device == "cpu" and family != "mixtral":
        pytest.skip("in test_load_model.py")
    resident = save(tmp_path, family, torch.bfloat16).to(device)
    for batch in (1, 3):
        for cache in ("1slots", "0.4"):
            check(tmp_path, resident, on(device, prompts(batch)), "finemoe", cache, device)


@pytest.mark.parametrize("policy", SYSTEMS)
@pytest.mark.parametrize("device", DEVICES)
def test_systems_are_lossless(device: str, policy: str, tmp_path: Path) -> None:
    if device == "cpu" and policy != "promoe":
        pytest.skip("in test_load_model.py")
    resident = save(tmp_path, "mixtral", torch.bfloat16).to(device)
    for cache in ("2slots", "7slots"):
        check(tmp_path, resident, on(device, prompts(3)), policy, cache, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_long_prefill_is_lossless(device: str, tmp_path: Path) -> None:
    """So many rows per expert that CUDA's grouped product takes larger tiles for the resident model's 8
    groups than for a chunk's few rows in many slots."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 1024}
    resident = save(tmp_path, "mixtral", torch.bfloat16, **wide).to(device)
    generator = torch.Generator().manual_seed(0)
    rows, tokens = (3, 500) if device == "cuda" else (1, 40)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    given = on(device, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    for cache in ("3slots", "0.5", "1.0"):
        check(tmp_path, resident, given, "finemoe", cache, device)


@NEEDS_CUDA
def test_float32_is_lossless(tmp_path: Path) -> None:
    resident = save(tmp_path, "mixtral").to("cuda")
    check(tmp_path, resident, on("cuda", prompts(3)), "finemoe", "0.4", "cuda")


@NEEDS_CUDA
def test_pinned_memory_that_does_not_suffice_warns_and_computes_the_same(tmp_path: Path) -> None:
    resident = save(tmp_path, "mixtral", torch.bfloat16).to("cuda")
    given = on("cuda", prompts(1))
    with pytest.warns(UserWarning, match="are pinned"):
        model = load_model(tmp_path, "lru", "5slots", "cuda", "host", pinned_memory="100kB", progress=False)
    model.generation_config.eos_token_id = None
    assert_same(logits(resident, given), logits(model, given))
    model.finemoe.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_devices_are_lossless(tmp_path: Path) -> None:
    resident = save(tmp_path, "mixtral", torch.bfloat16).to("cuda:0")
    for policy in ("finemoe", "promoe"):
        check(tmp_path, resident, on("cuda:0", prompts(3)), policy, "0.5", ["cuda:0", "cuda:1"])


@pytest.mark.parametrize("device", DEVICES)
def test_another_system_on_the_same_model_is_lossless(device: str, tmp_path: Path) -> None:
    resident = save(tmp_path, "mixtral", torch.bfloat16).to(device)
    given = on(device, prompts(3))
    wanted = logits(resident, given)
    checkpoint = read_checkpoint(tmp_path)
    model = load_model(tmp_path, "lru", "3slots", device, "host", progress=False)
    model.generation_config.eos_token_id = None
    for policy, cache in (("finemoe", "9slots"), ("promoe", "5slots"), ("no-offload", "1.0")):
        system = find_system(policy)
        _, slots = checkpoint.cache(cache, 1, "expert_cache")
        options = model_options(system, checkpoint, 1, slots, prefetch_distance=2, store_capacity=10)
        model.finemoe.use(system, options, log_iterations=0, history=None)
        assert_same(wanted, logits(model, given))
    model.finemoe.close()


def test_another_system_takes_its_slots_when_the_old_ones_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "mixtral")
    model = load_model(tmp_path, "lru", "11slots")
    old = weakref.ref(model.finemoe.runtime.arenas[0].memory)
    left: list[Any] = []

    def make_arenas(*arguments: Any) -> Any:
        left.append(old())
        return devices.make_arenas(*arguments)

    monkeypatch.setattr(handle, "make_arenas", make_arenas)
    options = model_options(
        find_system("lru"), read_checkpoint(tmp_path), 1, 5, prefetch_distance=3, store_capacity=1
    )
    model.finemoe.use(find_system("lru"), options, log_iterations=0, history=None)
    model.finemoe.close()
    assert left == [None]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_gpus_way_of_computing_is_right_but_for_rounding_on_the_cpu(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = save(tmp_path, family)
    given = prompts(3)
    wanted = logits(resident, given)
    monkeypatch.setattr(LayerOutputs, "compute", LayerOutputs._compute_there)
    for most in (1, 3, 512):
        monkeypatch.setattr(experts_kernel, "MOST_GROUPS", most)
        model = load_model(tmp_path, "lru", "11slots")
        model.generation_config.eos_token_id = None
        for one, other in zip(wanted, logits(model, given), strict=True):
            assert torch.allclose(one, other, atol=1e-4)
        model.finemoe.close()


@drawn(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 9)), min_size=1, unique_by=lambda run: run[0]),
    st.integers(1, 600),
)
def test_launches_hold_every_run_once_and_few_slots(runs: list[tuple[int, int]], most: int) -> None:
    whole = [(slot, begin, begin + 1) for slot, begin in runs]
    parts = launches(whole, most)
    assert [run for _, part in parts for run in part] == sorted(whole)
    for slots, part in parts:
        assert 0 < slots.stop - slots.start <= most
        assert all(slots.start <= slot < slots.stop for slot, _, _ in part)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_reach_the_host_as_they_are(device: str) -> None:
    reader = HostReader()
    for size in (1, 3, 700, 5):
        rows = torch.rand(2, size, device=device)
        ids = torch.randint(0, 60, (size, 2), device=device)
        for got, wanted in zip(reader.read(rows, ids), (rows, ids), strict=True):
            assert torch.equal(torch.from_numpy(got.copy()), wanted.cpu())
        packed = pack([ids[:, :1], rows]).cpu().numpy()
        for got, wanted in zip(unpack(packed, [ids[:, :1], rows]), (ids[:, :1], rows), strict=True):
            assert torch.equal(torch.from_numpy(got.copy()), wanted.cpu())

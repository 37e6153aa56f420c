"""Losslessness: a model whose experts come and go gives the bits of the resident one, same kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from finemoe.errors import SettingError
from finemoe.policy.systems import SYSTEMS
from finemoe.realexec.load import load_model
from finemoe.realexec.runnable import why_not
from tiny_models import EXPERTS, FAMILIES, VOCABULARY, tiny_model, torch, transformers

RUNNABLE = [
    s.name for s in SYSTEMS.values() if s.group == "system" and not why_not(s) and s.preload != "popular"
]
STEPS = 16


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Same bits on any machine, and no contest between test processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def save(folder: Path, family: str, dtype: Any = torch.float32, **overrides: Any) -> Any:
    """A tiny model's checkpoint; returns the resident model under transformers' own grouped kernel."""
    tiny_model(family, **overrides).to(dtype).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.set_experts_implementation("grouped_mm")
    model.generation_config.eos_token_id = None
    return model


def prompts(batch: int) -> dict[str, Any]:
    """Token ids [batch, 9], padded on the left by different lengths."""
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(3, VOCABULARY, (batch, 9), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : 3 * row] = 0
    return {"input_ids": ids.where(mask.bool(), torch.zeros_like(ids)), "attention_mask": mask}


def logits(model: Any, given: dict[str, Any]) -> list[Any]:
    """Of the prefill, at tokens, and of each decode step of a greedy generation."""
    with torch.no_grad():
        first = model(**given).logits[given["attention_mask"].bool()]
    steps = model.generate(
        **given, max_new_tokens=STEPS + 1, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return [first, *steps.logits]


def assert_same(resident: list[Any], offloaded: list[Any]) -> None:
    assert len(resident) == len(offloaded) == STEPS + 2
    for step, (one, other) in enumerate(zip(resident, offloaded, strict=True)):
        assert torch.equal(one, other), f"step {step} differs by {(one - other).abs().max()}"


@pytest.mark.filterwarnings("ignore:.*expert slots are at or below one token cycle")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_lossless(family: str, dtype: str, tmp_path: Path) -> None:
    for top_k in (2, 4):
        folder = tmp_path / str(top_k)
        resident = save(folder, family, getattr(torch, dtype), num_experts_per_tok=top_k)
        for batch in (1, 3):
            given = prompts(batch)
            wanted = logits(resident, given)
            for cache in ("1slots", "0.4", "1.0"):
                model = load_model(folder, "finemoe", cache)
                model.generation_config.eos_token_id = None
                assert_same(wanted, logits(model, given))
                model.finemoe.close()


@pytest.mark.filterwarnings("ignore:.*expert slots are at or below one token cycle")
@pytest.mark.parametrize("policy", RUNNABLE)
def test_every_system_is_lossless_at_every_cache_size(policy: str, tmp_path: Path) -> None:
    resident = save(tmp_path, "mixtral")
    given = prompts(3)
    wanted = logits(resident, given)
    slots = len(resident.model.layers) * EXPERTS
    for count in (1, 2, 3, 5, 8, slots // 2, slots - 1, slots):
        model = load_model(tmp_path, policy, f"{count}slots")
        model.generation_config.eos_token_id = None
        assert_same(wanted, logits(model, given))
        statistics = model.finemoe.statistics()
        assert statistics["iterations"] == STEPS + 2
        model.finemoe.close()


def test_fused_and_split_checkpoints_from_files_and_from_host_memory(tmp_path: Path) -> None:
    resident = save(tmp_path / "split", "mixtral")
    resident.save_pretrained(tmp_path / "fused", save_original_format=False)
    resident.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    given = prompts(1)
    wanted = logits(resident, given)
    for folder in ("split", "fused", "shards"):
        for source in ("file", "host"):
            model = load_model(tmp_path / folder, "lru", "7slots", source=source, progress=False)
            model.generation_config.eos_token_id = None
            assert_same(wanted, logits(model, given))
            model.finemoe.close()


def test_systems_that_cannot_run_are_refused_by_name(tmp_path: Path) -> None:
    for policy in ("oracle", "mixtral-offloading+wb"):
        with pytest.raises(
            SettingError, match=f"policy {policy.replace('+', '.')} cannot run on a real model"
        ):
            load_model(tmp_path / "nowhere", policy)

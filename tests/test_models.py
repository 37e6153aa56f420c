"""Model descriptions: published totals, exact counts, expert bytes, and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from finemoe.errors import SettingError
from finemoe.policy.models import EXPERT_DTYPES, MODEL_NAMES, ExpertDtype, ModelSpec, load_model_spec
from hypothesis import given
from hypothesis import strategies as st
from shared_data import shared

# Published totals and active parameters in 10^9. The publishers of the last two leave the input embedding out
# of the active count. DeepSeek-V2-Lite's 2.451 is published as 2.4, cut off, not rounded: hence its 2.5 %.
PUBLISHED = [
    ("mixtral-8x7b", 46.7, 12.9, True, 0.02),
    ("qwen1.5-moe", 14.3, 2.7, True, 0.02),
    ("phi-3.5-moe", 42.0, 6.6, True, 0.02),
    ("deepseek-v2-lite", 15.7, 2.4, False, 0.025),
    ("gpt-oss-20b", 20.9, 3.6, False, 0.02),
]
# Parameters of the published checkpoints, as their files count them.
EXACT = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen1.5-moe": 14_315_784_192,
    "phi-3.5-moe": 41_873_153_344,
    "deepseek-v2-lite": 15_706_484_224,
    "gpt-oss-20b": 20_914_757_184,
}


@pytest.mark.parametrize(("name", "total", "active", "embedding", "tolerance"), PUBLISHED)
def test_parameters_are_the_published_ones(
    name: str, total: float, active: float, embedding: bool, tolerance: float
) -> None:
    spec = load_model_spec(name)
    assert spec.total_parameters() == EXACT[name]
    assert spec.total_parameters() / 1e9 == pytest.approx(total, rel=0.02)
    assert spec.active_parameters(input_embedding=embedding) / 1e9 == pytest.approx(active, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "layers", "experts", "top_k", "bf16_bytes", "kv_bytes", "distance"),
    [
        ("mixtral-8x7b", 32, 8, 2, 3 * 4096 * 14336 * 2, 32 * 2 * 8 * 128 * 2, 3),
        ("qwen1.5-moe", 24, 60, 4, 3 * 2048 * 1408 * 2, 24 * 2 * 16 * 128 * 2, 6),
        ("phi-3.5-moe", 32, 16, 2, 3 * 4096 * 6400 * 2, 32 * 2 * 8 * 128 * 2, 4),
        ("deepseek-v2-lite", 26, 64, 6, 3 * 2048 * 1408 * 2, 27 * (512 + 64) * 2, 3),
        ("gpt-oss-20b", 24, 32, 4, 3 * 2880 * 2880 * 2, 24 * 2 * 8 * 64 * 2, 3),
    ],
)
def test_shapes(
    name: str, layers: int, experts: int, top_k: int, bf16_bytes: int, kv_bytes: int, distance: int
) -> None:
    spec = load_model_spec(name)
    assert (spec.layers, spec.experts, spec.top_k) == (layers, experts, top_k)
    assert spec.expert_bytes("bf16") == bf16_bytes
    assert spec.kv_bytes_per_token == kv_bytes
    assert spec.prefetch_distance == distance


def test_expert_bytes_by_dtype() -> None:
    spec = load_model_spec("gpt-oss-20b")
    parameters = 3 * 2880 * 2880
    assert spec.expert_bytes("fp8") == parameters
    assert spec.expert_bytes("int4") == parameters // 2 + parameters // 128 * 2
    assert spec.expert_bytes("mxfp4") == parameters // 2 + parameters // 32 == 13_219_200
    with pytest.raises(SettingError, match="'fp4' is unknown"):
        spec.expert_bytes("fp4")  # type: ignore[arg-type]


@given(st.sampled_from(MODEL_NAMES), st.sampled_from(EXPERT_DTYPES))
def test_dense_and_expert_bytes_agree_with_the_totals(name: str, dtype: ExpertDtype) -> None:
    spec = load_model_spec(name)
    assert spec.dense_bytes() == 2 * (
        spec.total_parameters() - spec.routed_experts() * spec.expert_parameters
    )
    assert spec.expert_bytes(dtype) <= spec.expert_bytes("bf16")
    parts = (
        spec.layers * spec.moe_layer_parameters
        + (spec.decoder_layers - spec.layers) * spec.dense_layer_parameters
        + spec.embedding_parameters
        + spec.head_parameters
    )
    # What no pass reads as a whole is small: the final norm and gpt-oss's expert biases.
    assert 0 < spec.dense_parameters - parts < 0.005 * spec.dense_parameters


def test_mixtral_layer_by_hand() -> None:
    spec = load_model_spec("Mixtral")
    attention = 4096 * (4096 + 1024 + 1024 + 4096)
    assert spec.moe_layer_parameters == attention + 2 * 4096 + 4096 * 8
    assert spec.dense_parameters == 32 * spec.moe_layer_parameters + 2 * 32000 * 4096 + 4096
    assert spec.attention_pair_flops == 2 * 32 * (128 + 128)


def test_deepseek_layers_by_hand() -> None:
    spec = load_model_spec("deepseek-v2-lite")
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048
    assert spec.dense_layer_parameters == attention + 2 * 2048 + 3 * 2048 * 10944
    assert spec.moe_layer_parameters == attention + 2 * 2048 + 2048 * 64 + 2 * 3 * 2048 * 1408
    assert spec.decoder_layers - spec.layers == 1
    assert spec.attention_pair_flops == 2 * 16 * (192 + 128)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mixtral", "mixtral-8x7b"),
        ("qwen", "qwen1.5-moe"),
        ("phi", "phi-3.5-moe"),
        ("deepseek2", "deepseek-v2-lite"),
    ],
)
def test_named_models_equal_their_published_configs(file: str, name: str) -> None:
    told = load_model_spec(shared(f"model_configs/{file}.json"))
    named = load_model_spec(name)
    own = {"name", "source", "prefetch_distance", "prefetch_distance_evidence"}
    for field in set(ModelSpec.__struct_fields__) - own:
        assert getattr(told, field) == getattr(named, field), field
    assert told.prefetch_distance == 3
    assert told.prefetch_distance_evidence.startswith("ASSUMED")


@pytest.mark.parametrize(
    ("file", "total", "active", "experts"), [("olmoe", 6.9, 1.3, 64), ("qwen3", 30.5, 3.3, 128)]
)
def test_other_configs(file: str, total: float, active: float, experts: int) -> None:
    spec = load_model_spec(shared(f"model_configs/{file}.json"))
    assert spec.total_parameters() / 1e9 == pytest.approx(total, rel=0.01)
    assert spec.active_parameters() / 1e9 == pytest.approx(active, rel=0.02)
    assert spec.experts == experts
    assert spec.notes == ()


def test_switch_is_its_decoder_with_a_note() -> None:
    spec = load_model_spec(shared("model_configs/switch.json"))
    assert (spec.layers, spec.experts, spec.top_k, spec.decoder_layers) == (6, 128, 1, 12)
    assert spec.expert_parameters == 2 * 768 * 3072
    assert spec.total_parameters() / 1e9 == pytest.approx(7.4, rel=0.02)
    assert any("encoder-decoder" in note for note in spec.notes)


BASE: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}


def write(folder: Path, **changes: Any) -> Path:
    """BASE with `changes`; a value of None removes the key."""
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("changes", "moe_layers"),
    [
        ({}, 6),
        ({"first_k_dense_replace": 2}, 4),
        ({"moe_layer_freq": 2}, 3),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 2),
        ({"decoder_sparse_step": 2}, 3),
        ({"decoder_sparse_step": 4}, 1),
        ({"mlp_only_layers": [0, 5]}, 4),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 2),
    ],
)
def test_which_layers_have_experts(tmp_path: Path, changes: dict[str, Any], moe_layers: int) -> None:
    spec = load_model_spec(write(tmp_path, moe_intermediate_size=32, **changes))
    attention = 64 * 64 * 2 + 64 * 32 * 2 + 2 * 64
    dense_layers = 6 - moe_layers
    assert spec.layers == moe_layers
    assert spec.dense_layer_parameters == (attention + 3 * 64 * 128 if dense_layers else 0)
    assert spec.total_parameters() == (
        6 * attention
        + dense_layers * 3 * 64 * 128
        + moe_layers * (64 * 8 + 8 * 3 * 64 * 32)
        + 2 * 100 * 64
        + 64
    )


def test_shared_experts_count_as_dense(tmp_path: Path) -> None:
    plain = load_model_spec(write(tmp_path))
    by_count = load_model_spec(write(tmp_path, n_shared_experts=2))
    by_width = load_model_spec(write(tmp_path, shared_expert_intermediate_size=256))
    extra = 2 * 3 * 64 * 128
    assert by_count.moe_layer_parameters - plain.moe_layer_parameters == extra
    assert by_width.moe_layer_parameters - plain.moe_layer_parameters == extra
    assert by_count.total_parameters() - plain.total_parameters() == 6 * extra


def test_tied_head_is_counted_once_and_still_read(tmp_path: Path) -> None:
    untied, tied = (
        load_model_spec(write(tmp_path)),
        load_model_spec(write(tmp_path, tie_word_embeddings=True)),
    )
    assert untied.total_parameters() - tied.total_parameters() == 100 * 64
    assert tied.head_parameters == 100 * 64
    assert tied.active_parameters(input_embedding=False) == tied.active_parameters()


def test_low_rank_queries_are_counted(tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
    full = load_model_spec(write(tmp_path, **latent))
    low = load_model_spec(write(tmp_path, q_lora_rank=24, **latent))
    assert full.moe_layer_parameters - low.moe_layer_parameters == 64 * 80 - (64 * 24 + 24 + 24 * 80)
    assert full.kv_bytes_per_token == 6 * (16 + 8) * 2


def test_what_is_taken_as_given_is_noted(tmp_path: Path) -> None:
    spec = load_model_spec(write(tmp_path, model_type="brand_new", tie_word_embeddings=None))
    assert any("brand_new" in note for note in spec.notes)
    assert any("tie_word_embeddings" in note for note in spec.notes)


def test_text_part_of_a_multimodal_config_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "some-model").mkdir()
    path = tmp_path / "some-model" / "config.json"
    path.write_text(json.dumps({"model_type": "outer", "text_config": BASE}))
    spec = load_model_spec(tmp_path / "some-model")
    assert spec.name == "some-model"
    assert spec.total_parameters() == load_model_spec(write(tmp_path)).total_parameters()
    assert any("multimodal" in note for note in spec.notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_local_experts": None}, ["num_local_experts", "num_experts", "n_routed_experts"]),
        ({"num_experts_per_tok": None}, ["num_experts_per_tok", "num_selected_experts"]),
        ({"intermediate_size": None}, ["moe_intermediate_size or intermediate_size or d_ff"]),
        ({"num_key_value_heads": None}, ["num_key_value_heads"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"hidden_size": -4}, ["hidden_size is -4"]),
        ({"hidden_size": 64.5}, ["hidden_size is 64.5"]),
        ({"num_hidden_layers": 10**30}, ["num_hidden_layers is 1000", "at most 4096"]),
        ({"num_local_experts": 65_537}, ["num_local_experts is 65537", "at most 65536"]),
        ({"num_hidden_layers": 4096, "num_local_experts": 4097}, ["4096 layers of 4097 experts"]),
        ({"hidden_size": 2**31}, ["hidden_size is 2147483648", "at most 2147483647"]),
        ({"model_type": []}, ["model_type is []", "a text is needed"]),
        ({"layer_types": [["full_attention"]]}, ["layer_types is [["]),
        ({"layer_types": 5}, ["layer_types is 5"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers is True"]),
        ({"num_experts_per_tok": 9}, ["9 experts per token of 8"]),
        ({"num_attention_heads": 5}, ["no head_dim", "64 is no multiple of 5"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings is 'no'"]),
        ({"mlp_only_layers": 3}, ["mlp_only_layers is 3"]),
        ({"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, ["no layer has routed experts"]),
        ({"linear_num_value_heads": 4}, ["linear attention"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["'linear_attention'"]),
        ({"moe_intermediate_size": 32, "first_k_dense_replace": 1, "intermediate_size": None}, ["d_ff"]),
    ],
)
def test_refused_configs_name_file_and_keys(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(SettingError) as caught:
        load_model_spec(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not an object"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_unreadable_configs(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(SettingError, match=word):
        load_model_spec(path)


def test_a_pipe_is_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.json")
    with pytest.raises(SettingError, match=r"model\.json: this is a named pipe"):
        load_model_spec(tmp_path / "model.json")


def test_missing_file_and_unknown_names() -> None:
    with pytest.raises(SettingError, match=r"nowhere\.json: cannot be read"):
        load_model_spec("nowhere.json")
    with pytest.raises(SettingError, match="Did you mean mixtral"):
        load_model_spec("mixtrl")
    with pytest.raises(SettingError, match=r"'zzz' is unknown\. Known: mixtral-8x7b"):
        load_model_spec("zzz")


def test_aliases() -> None:
    for alias, name in {"mixtral": "mixtral-8x7b", "qwen": "qwen1.5-moe", "PHI": "phi-3.5-moe"}.items():
        assert load_model_spec(alias) == load_model_spec(name)

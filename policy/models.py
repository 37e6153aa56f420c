"""The models known by name, and `load_model_spec` for these and any Hugging Face MoE config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import SettingError, did_you_mean
from .hf_config import read_config, spec_from_config
from .model_spec import BF16_BYTES, EXPERT_DTYPES, ExpertDtype, ModelSpec

__all__ = ["BF16_BYTES", "EXPERT_DTYPES", "MODEL_NAMES", "ExpertDtype", "ModelSpec", "load_model_spec"]

# The keys of each model's published config.json that its description needs.
_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen1.5-moe": {
        "model_type": "qwen2_moe",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "phi-3.5-moe": {
        "model_type": "phimoe",
        "attention_bias": True,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "lm_head_bias": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "tie_word_embeddings": False,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
}
_ALIASES = {
    "mixtral": "mixtral-8x7b",
    "qwen": "qwen1.5-moe",
    "qwen1.5-moe-a2.7b": "qwen1.5-moe",
    "phi": "phi-3.5-moe",
    "deepseek": "deepseek-v2-lite",
    "gpt-oss": "gpt-oss-20b",
}
MODEL_NAMES: tuple[str, ...] = tuple(_CONFIGS)

# Paper §6.7 tunes the distance of its three models; any other model gets the paper's general value (§6.1).
_TUNED_DISTANCE = {"mixtral-8x7b": 3, "qwen1.5-moe": 6, "phi-3.5-moe": 4}
_DEFAULT_DISTANCE = 3


def load_model_spec(name_or_path: str | Path) -> ModelSpec:
    """The model of that name (or alias, case ignored), or of a config.json, or of the folder holding one.

    Raises SettingError: unknown name (with the nearest one), unreadable file, or a config that is not a MoE
    model's or lacks a key.
    """
    text = str(name_or_path)
    name = _ALIASES.get(text.lower(), text.lower())
    if name in _CONFIGS:
        distance = _TUNED_DISTANCE.get(name)
        return spec_from_config(
            _CONFIGS[name],
            name=name,
            where=f"model {name}",
            source="published config.json",
            prefetch_distance=distance or _DEFAULT_DISTANCE,
            prefetch_distance_evidence=_distance_evidence(tuned=distance is not None),
        )
    path = Path(name_or_path)
    if not (path.exists() or path.suffix == ".json" or "/" in text or "\\" in text):
        known = [*_CONFIGS, *_ALIASES]
        hint = did_you_mean(text.lower(), known, cutoff=0.4)
        raise SettingError(
            f"--model {text!r} is unknown.{hint} Known: {', '.join(_CONFIGS)}; or give a config.json's path."
        )
    if path.is_dir():
        path = path / "config.json"
    return spec_from_config(
        read_config(path),
        name=path.resolve().parent.name if path.stem == "config" else path.stem,
        where=str(path),
        source=f"config file {path.name}",
        prefetch_distance=_DEFAULT_DISTANCE,
        prefetch_distance_evidence=_distance_evidence(tuned=False),
    )


def _distance_evidence(*, tuned: bool) -> str:
    if tuned:
        return "MEASURED: tuned by the paper's authors for this model (§6.7)"
    return "ASSUMED: the paper's general value (§6.1); not tuned for this model"

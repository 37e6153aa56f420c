"""Tiny random models of many families, built from their configs: what the tests of realexec run on."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra `real`)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `real`)")

VOCABULARY = 96
EXPERTS = 8
TOP_K = 2

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MLA = {
    "moe_intermediate_size": 24,
    "intermediate_size": 48,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 4,
    "topk_group": 2,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": EXPERTS, "intermediate_size": 24}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": EXPERTS,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": EXPERTS, "intermediate_size": 48, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "phimoe": ("PhimoeConfig", {"num_local_experts": EXPERTS, "intermediate_size": 24}),
    "olmoe": ("OlmoeConfig", {"num_experts": EXPERTS, "intermediate_size": 24}),
    "deepseek_v2": ("DeepseekV2Config", _MLA | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3Config", _MLA),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": EXPERTS, "intermediate_size": 24, "head_dim": 8, "sliding_window": 8},
    ),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": EXPERTS, "intermediate_size": 24}),
}
FAMILIES = tuple(_FAMILIES)


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A random fp32 model of `family` in eval mode: 3 decoder layers of width 32, 8 experts, top 2 (the first
    layer of DeepSeek's is dense). Same seed, same weights.

    Routers are 15 times as wide as they are initialised, so that their distributions are not flat and choices
    do not hang on rounding.
    """
    name, own = _FAMILIES[family]
    config = getattr(transformers, name)(**(_COMMON | own | overrides))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in (
            p for n, p in model.named_parameters() if n.endswith(("gate.weight", "router.weight"))
        ):
            parameter.normal_(std=0.3)
        for n, buffer in model.named_buffers():
            if n.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1)
    return model

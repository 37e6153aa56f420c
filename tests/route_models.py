"""config.json of the models of the route CSVs, with the experts per token that the engine was told to use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared_data import shared

# Of the two models that have no file under shared/data, the keys that a description needs. Gemma's dense MLP
# beside the experts is named as a shared expert, and its two kinds of attention are counted as one.
_CONFIGS: dict[str, dict[str, Any]] = {
    "gptoss": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "gemma": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "shared_expert_intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "head_dim": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_experts": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 30,
        "tie_word_embeddings": True,
        "vocab_size": 262144,
    },
}


def route_model(name: str, path: Path) -> Path:
    """Write the model of NAME.route.csv to `path` and return that; skips where ../shared/data is absent."""
    config = _CONFIGS.get(name)
    if config is None:
        config = json.loads(shared("model_configs/qwen3.json").read_text("utf-8")) | {
            "num_experts_per_tok": 6
        }
    path.write_text(json.dumps(config), "utf-8")
    return path

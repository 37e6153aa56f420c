"""Count a Mixture-of-Experts model's parameters from the keys of its Hugging Face config.json.

Keys decide; the small table `_FAMILIES` adds only what a family's code does and its config does not say. A
needed key that is missing is an error, never a guess.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ..errors import SettingError
from ..traces.files import unreadable_kind
from .model_spec import BF16_BYTES, ModelSpec

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "num_selected_experts")
_EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size", "d_ff")
_DENSE_WIDTH = ("intermediate_size", "d_ff")
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")

# Bounds far above every model, so that a mistyped number is an error and not an endless loop.
_MAX_COUNT = 2**31 - 1
_MAX_LAYERS, _MAX_EXPERTS, _MAX_ROUTED_EXPERTS = 4096, 65_536, 2**24

# Keys of designs that the counts below do not cover: refused, as the result would look right and be wrong.
_NOT_COVERED = {
    "interleave_moe_layer_step": "interleaved dense layers with a width of their own",
    "linear_num_value_heads": "linear attention layers",
    "mamba_d_state": "state-space layers",
    "attn_layer_period": "attention in some layers only",
    "ffn_config": "nested expert settings",
}


class _Family(msgspec.Struct, frozen=True):
    """What a family's code has beyond its config's keys."""

    qkv_bias: bool = False  # where the config has no `attention_bias`/`qkv_bias`
    qk_norm: str = ""  # "head": over the head width, "full": over all heads
    norm_bias: bool = False  # LayerNorm instead of RMSNorm
    router_bias: bool = False
    expert_bias: bool = False
    sinks: bool = False  # one learned attention sink per head
    shared_gate: bool = False  # a scalar gate on the shared expert


_FAMILIES = {
    "mixtral": _Family(),
    "qwen2_moe": _Family(qkv_bias=True, shared_gate=True),
    "qwen3_moe": _Family(qk_norm="head"),
    "olmoe": _Family(qk_norm="full"),
    "phimoe": _Family(norm_bias=True),
    "deepseek_v2": _Family(),
    "deepseek_v3": _Family(router_bias=True),
    "gpt_oss": _Family(router_bias=True, expert_bias=True, sinks=True),
    "switch_transformers": _Family(),
}


def read_config(path: Path) -> dict[str, Any]:
    """The object in a config.json. Raises SettingError where it is unreadable or holds no JSON object."""
    kind = unreadable_kind(path)
    if kind is not None:
        raise SettingError(f"{path}: this is {kind}. Give the path of a config.json.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(
            f"{path}: cannot be read ({error.strerror}). Give the path of a config.json."
        ) from None
    except RecursionError:
        raise SettingError(
            f"{path}: nested too deeply for a config. Give the config.json of a Hugging Face model."
        ) from None
    except ValueError as error:
        raise SettingError(
            f"{path}: not JSON ({error}). Give the config.json of a Hugging Face model."
        ) from None
    if not isinstance(config, dict):
        raise SettingError(
            f"{path}: holds a {type(config).__name__}, not an object. Give a model's config.json."
        )
    return config


class _Keys:
    """Typed access to the keys of one config; every error names the file and the keys looked for."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def has(self, *keys: str) -> bool:
        return any(self.config.get(key) is not None for key in keys)

    def count(self, *keys: str, least: int = 1, most: int = _MAX_COUNT) -> int:
        """The first of `keys` that is present, a whole number of `least` to `most`."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingError(
                    f"{self.where}: {key} is {value!r}; a whole number of at least {least} is needed."
                )
            if value > most:
                raise SettingError(f"{self.where}: {key} is {value}; at most {most} is possible. Correct it.")
            return value
        raise SettingError(
            f"{self.where}: no key {' or '.join(keys)}. Add it; a missing count is never guessed."
        )

    def optional(self, *keys: str, absent: int) -> int:
        return self.count(*keys, least=0) if self.has(*keys) else absent

    def flag(self, key: str, *, absent: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return absent
        if not isinstance(value, bool):
            raise SettingError(f"{self.where}: {key} is {value!r}; true or false is needed.")
        return value


class _Attention(msgspec.Struct, frozen=True):
    """One layer's attention."""

    parameters: int
    pair_flops: int
    kv_values: int  # values cached per token


def spec_from_config(
    config: dict[str, Any],
    *,
    name: str,
    where: str,
    source: str,
    prefetch_distance: int,
    prefetch_distance_evidence: str,
) -> ModelSpec:
    """Describe the model of `config`; `where` (a file) opens every SettingError."""
    notes: list[str] = []
    nested = config.get("text_config")
    if isinstance(nested, dict) and not any(key in config for key in _EXPERTS):
        notes.append("only the text part of a multimodal model is described")
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **nested}
    keys = _Keys(config, where)
    if not keys.has(*_EXPERTS):
        raise SettingError(
            f"{where}: not a Mixture-of-Experts model: none of the keys {', '.join(_EXPERTS)}. "
            "FineMoE offloads routed experts; give the config of a model that has some."
        )
    for key, what in _NOT_COVERED.items():
        if keys.has(key):
            raise SettingError(
                f"{where}: {key} means {what}, which this description does not cover. Use another model."
            )
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise SettingError(f"{where}: layer_types is {layer_types!r}; a list of texts is needed.")
    if other := sorted(set(layer_types) - {"full_attention", "sliding_attention"}):
        raise SettingError(f"{where}: layer_types has {other[0]!r}, which is not covered. Use another model.")
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise SettingError(f"{where}: model_type is {model_type!r}; a text is needed.")
    if model_type not in _FAMILIES:
        notes.append(
            f"model_type {model_type!r} is not known: biases and norms beyond the config's keys not counted"
        )
    family = _FAMILIES.get(str(model_type), _Family())
    if "tie_word_embeddings" not in config or config["tie_word_embeddings"] is None:
        notes.append("tie_word_embeddings is absent: taken as true, the library's base value")

    layers_total, hidden, heads, head_width = _sizes(keys)
    experts, top_k = keys.count(*_EXPERTS, most=_MAX_EXPERTS), keys.count(*_TOP_K)
    if layers_total * experts > _MAX_ROUTED_EXPERTS:
        raise SettingError(
            f"{where}: {layers_total} layers of {experts} experts; at most {_MAX_ROUTED_EXPERTS} in all "
            "are possible. Correct one of them."
        )
    if top_k > experts:
        raise SettingError(f"{where}: {top_k} experts per token of {experts}. Correct {' or '.join(_TOP_K)}.")
    width = keys.count(*_EXPERT_WIDTH)
    matrices = 3 if keys.flag("is_gated_act", absent=True) else 2
    expert_bias = (matrices - 1) * width + hidden if family.expert_bias else 0
    moe_layers = _moe_layers(keys, layers_total)
    dense_layers = layers_total - moe_layers

    attention = _attention(keys, family, hidden, heads, head_width)
    norm = hidden * (2 if family.norm_bias else 1)
    blocks = attention.parameters + 2 * norm
    encoder = 0
    if keys.flag("is_encoder_decoder", absent=False):
        cross = 4 * hidden * heads * head_width + norm
        encoder = _encoder_parameters(keys, blocks, hidden, matrices * hidden * width, experts)
        blocks += cross
        notes.append(
            f"encoder-decoder: layers are the decoder's; the encoder's {encoder:,} parameters count as "
            "resident dense weights and a prompt is charged as a pass through the decoder"
        )
    router = hidden * experts + (experts if family.router_bias else 0)
    moe_layer = blocks + router + _shared_parameters(keys, family, hidden, width)
    dense_layer = blocks + matrices * hidden * keys.count(*_DENSE_WIDTH) if dense_layers else 0

    if "sliding_attention" in layer_types:
        notes.append(
            "KV is counted in full for every layer, also for those with a sliding window: an upper bound"
        )
    vocabulary = keys.count("vocab_size")
    tied = keys.flag("tie_word_embeddings", absent=True)
    head = vocabulary * hidden + (vocabulary if keys.flag("lm_head_bias", absent=False) else 0)
    return ModelSpec(
        name=name,
        layers=moe_layers,
        experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        expert_intermediate_size=width,
        expert_parameters=matrices * hidden * width,
        dense_parameters=moe_layers * (moe_layer + experts * expert_bias)
        + dense_layers * dense_layer
        + vocabulary * hidden
        + (0 if tied else head)
        + norm
        + encoder,
        decoder_layers=layers_total,
        moe_layer_parameters=moe_layer,
        dense_layer_parameters=dense_layer,
        embedding_parameters=vocabulary * hidden,
        head_parameters=head,
        tied_head=tied,
        attention_pair_flops=attention.pair_flops,
        kv_bytes_per_token=layers_total * attention.kv_values * BF16_BYTES,
        prefetch_distance=min(prefetch_distance, moe_layers),
        prefetch_distance_evidence=prefetch_distance_evidence,
        source=source,
        notes=tuple(notes),
    )


def _sizes(keys: _Keys) -> tuple[int, int, int, int]:
    """Decoder layers, hidden size, attention heads, head width (hidden / heads where no key states it)."""
    layers = keys.count("num_decoder_layers", "num_hidden_layers", most=_MAX_LAYERS)
    hidden = keys.count("hidden_size", "d_model")
    heads = keys.count("num_attention_heads", "num_heads")
    if keys.has("head_dim", "d_kv"):
        return layers, hidden, heads, keys.count("head_dim", "d_kv")
    if hidden % heads and not keys.has("kv_lora_rank"):
        raise SettingError(
            f"{keys.where}: no head_dim, and hidden_size {hidden} is no multiple of {heads} heads. Add it."
        )
    return layers, hidden, heads, hidden // heads


def _moe_layers(keys: _Keys, layers: int) -> int:
    """How many decoder layers have routed experts; DeepSeek, Qwen and Switch each have their own keys."""
    first = keys.optional("first_k_dense_replace", absent=0)
    every = keys.count("moe_layer_freq") if keys.has("moe_layer_freq") else 1
    step = keys.count("decoder_sparse_step") if keys.has("decoder_sparse_step") else 1
    plain = keys.config.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise SettingError(f"{keys.where}: mlp_only_layers is {plain!r}; a list of layer numbers is needed.")
    found = sum(
        i >= first and i % every == 0 and (i + 1) % step == 0 and i not in plain for i in range(layers)
    )
    if keys.has("num_sparse_decoder_layers") and found != keys.count("num_sparse_decoder_layers"):
        raise SettingError(
            f"{keys.where}: num_sparse_decoder_layers is {keys.count('num_sparse_decoder_layers')}, but "
            f"decoder_sparse_step {step} gives {found}. Correct one of them."
        )
    if found == 0:
        raise SettingError(
            f"{keys.where}: no layer has routed experts by first_k_dense_replace, moe_layer_freq, "
            "decoder_sparse_step and mlp_only_layers. Correct them, or give the config of a MoE model."
        )
    return found


def _attention(keys: _Keys, family: _Family, hidden: int, heads: int, head_width: int) -> _Attention:
    if keys.has("kv_lora_rank"):
        return _latent_attention(keys, hidden, heads)
    # T5-style models have one key-value head per query head and no key for it.
    kv_heads = heads if keys.has("d_kv") else keys.count("num_key_value_heads")
    q_width, kv_width = heads * head_width, kv_heads * head_width
    bias = keys.flag("attention_bias", absent=False)
    qkv_bias = keys.flag("qkv_bias", absent=bias or family.qkv_bias)
    parameters = 2 * hidden * q_width + 2 * hidden * kv_width
    parameters += (q_width + 2 * kv_width if qkv_bias else 0) + (hidden if bias else 0)
    parameters += {"": 0, "head": 2 * head_width, "full": q_width + kv_width}[family.qk_norm]
    parameters += heads if family.sinks else 0
    return _Attention(parameters, 4 * q_width, 2 * kv_width)


def _latent_attention(keys: _Keys, hidden: int, heads: int) -> _Attention:
    """Multi-head latent attention: one compressed row and one rotary key are cached per token."""
    rank, rope = keys.count("kv_lora_rank"), keys.count("qk_rope_head_dim")
    nope, value = keys.count("qk_nope_head_dim"), keys.count("v_head_dim")
    q_width = heads * (nope + rope)
    q_rank = keys.optional("q_lora_rank", absent=0)
    parameters = hidden * q_rank + q_rank + q_rank * q_width if q_rank else hidden * q_width
    parameters += hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * hidden
    if keys.flag("attention_bias", absent=False):
        parameters += q_rank + rank + rope + hidden
    return _Attention(parameters, 2 * heads * (nope + rope + value), rank + rope)


def _shared_parameters(keys: _Keys, family: _Family, hidden: int, width: int) -> int:
    if keys.has("shared_expert_intermediate_size"):
        shared_width = keys.optional("shared_expert_intermediate_size", absent=0)
        return 3 * hidden * shared_width + (hidden if family.shared_gate and shared_width else 0)
    return 3 * hidden * width * keys.optional(*_SHARED_COUNT, absent=0)


def _encoder_parameters(keys: _Keys, block: int, hidden: int, feed_forward: int, experts: int) -> int:
    """All of a T5-style encoder, its experts included."""
    layers, sparse = keys.count("num_layers"), keys.count("num_sparse_encoder_layers", least=0)
    if sparse > layers:
        raise SettingError(
            f"{keys.where}: {sparse} sparse of {layers} encoder layers. Correct num_sparse_encoder_layers."
        )
    experts_total = sparse * (experts * feed_forward + hidden * experts)
    return layers * block + (layers - sparse) * feed_forward + experts_total + hidden

"""A transformers model without its routed experts: built, renamed, cast and tied by transformers itself.

`from_pretrained` would materialise every expert. Here the model's class loses its experts' parameters as soon
as they are declared, on `meta`, so that transformers reads all other weights and none of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import SettingError
from .gates import MoeModel, find_moe
from .stock_model import check_filled, one_error

#: what transformers' experts functions read of an experts module; a module without them has no such function
_REGISTRY_FIELDS = ("has_gate", "has_bias", "is_transposed")


@dataclass(frozen=True)
class Skeleton:
    """A model whose experts have no weights, and what these were: `shapes` by parameter, [J, …]."""

    model: Any
    moe: MoeModel
    blocks: tuple[str, ...]  # names of the experts modules, in layer order
    shapes: dict[str, tuple[int, ...]]
    parameter_names: frozenset[str]  # of the whole model


def read_config(folder: Path) -> Any:
    """The checkpoint's transformers config; SettingError for none, a quantised one, or remote code."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise SettingError(f"{folder} has no config.json. Give the folder of a transformers checkpoint.")
    with one_error(folder, "config.json"):
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise SettingError(
            f"{folder} is quantised ({config.model_type}). Give a checkpoint in float32, float16 or bfloat16."
        )
    return config


def inspect(folder: Path, config: Any) -> Skeleton:
    """The model of a folder on `meta`, whole: what it is made of, before any weight is read. SettingError
    where config.json makes none, or one that is not supported."""
    kind = _model_class(config)
    with one_error(folder, "config.json"), torch.device("meta"):
        whole = _describe(kind(config))
    if not 1 <= whole.moe.top_k <= whole.moe.num_experts:
        raise SettingError(
            f"{folder}/config.json: a token takes {whole.moe.top_k} of {whole.moe.num_experts} experts. "
            "Correct it."
        )
    return whole


def load_skeleton(folder: Path, config: Any, dtype: torch.dtype) -> Skeleton:
    """The model with all weights but the experts', on the CPU, in `dtype`. SettingError for weights that
    cannot be loaded or do not fill it."""
    kind = _model_class(config)
    kept: list[Skeleton] = []

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        whole = _describe(self)
        for layer in whole.moe.layers:
            for name in whole.shapes:
                delattr(layer.experts, name)
            layer.experts._is_hf_initialized = True  # nothing there for transformers to fill in
        kept.append(whole)

    names = {"__init__": init, "_keys_to_ignore_on_load_unexpected": [r"."]}
    without_experts: Any = type(kind.__name__, (kind,), names | {"__module__": kind.__module__})
    with one_error(folder, "the weights"):
        model, info = without_experts.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    check_filled(folder, info)
    model.__class__ = kind
    model.eval()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # of our own: it may be a view of the file, which can change
    whole = kept[-1]
    return Skeleton(model, whole.moe, whole.blocks, whole.shapes, whole.parameter_names)


def renaming(whole: Skeleton) -> Any:
    """Checkpoint name → (name in the model, converter or None, its pattern), by transformers' own rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(whole.model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known = dict.fromkeys(whole.parameter_names, True)

    def rename(source: str) -> tuple[str, Any, str]:
        if source in known:
            return source, None, ""
        name, pattern = rename_source_key(source, renamings, converters, whole.model.base_model_prefix, known)
        return name, by_pattern.get(pattern), pattern or ""

    return rename


def _model_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise SettingError(
            f"{config.model_type} models are not causal language models of transformers. Take another model."
        ) from None


def _describe(model: Any) -> Skeleton:
    moe = find_moe(model)
    names = {id(module): name for name, module in model.named_modules()}
    experts = [layer.experts for layer in moe.layers]
    for module in experts:
        lacking = [field for field in _REGISTRY_FIELDS if not hasattr(module, field)]
        if lacking:
            raise SettingError(
                f"{moe.family} models are not supported: transformers lets no other function compute their "
                "experts. Take another model."
            )
    if any(getattr(module, "has_post_expert_norm", False) for module in experts):
        raise SettingError(f"{moe.family} models are not supported: their experts have a norm of their own.")
    shapes = [
        {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)} for module in experts
    ]
    if any(shape != shapes[0] for shape in shapes):
        raise SettingError(
            f"{moe.family} models are not supported: the experts of their layers differ in size."
        )
    return Skeleton(
        model,
        moe,
        tuple(names[id(module)] for module in experts),
        shapes[0],
        frozenset(name for name, _ in model.named_parameters()),
    )

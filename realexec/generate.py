"""Greedy generation of a batch, iteration by iteration, with what the gates say in each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from ..traces.routing import RequestRouting
from .batch import left_padded
from .recorder import GateRecorder, Iteration, routing_of
from .versions import cache_argument, last_logits_only


def generate_recorded(
    model: Any,
    recorder: GateRecorder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: frozenset[int],
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[list[RequestRouting], list[list[int]]]:
    """The routing and the new tokens of each prompt (token ids), decoded greedily in one batch.

    A request ends with one of `ends` or after `max_new_tokens` tokens, each of which is an iteration; its
    first token is none of `ends`, so that a request has a decode iteration wherever two tokens may be made.
    Prompts are padded on the left; rows that have ended compute on until all have, and are not recorded.
    `progress` is told the number of tokens made by each iteration.
    """
    device = model.get_input_embeddings().weight.device
    tokens, mask, positions = left_padded(prompts, device)
    options = {cache_argument(model): DynamicCache(config=model.config), **last_logits_only(model)}
    last = torch.tensor(sorted(ends), dtype=torch.long, device=device)
    new: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    iterations: list[Iteration] = []
    while running:
        recorder.begin(mask[:, -tokens.shape[1] :])
        with torch.no_grad():
            output = model(
                input_ids=tokens,
                attention_mask=mask.long(),
                position_ids=positions,
                use_cache=True,
                **options,
            )
            scores = output.logits[:, -1].float()
            if not iterations and max_new_tokens > 1:
                scores[:, last] = -torch.inf
            tokens = scores.argmax(dim=-1, keepdim=True)
        iterations.append(recorder.end())
        made = tokens[:, 0].tolist()
        progress(len(running))
        for row in sorted(running):
            new[row].append(made[row])
            if made[row] in ends or len(new[row]) == max_new_tokens:
                running.remove(row)
        positions = positions[:, -1:] + 1
        mask = torch.nn.functional.pad(mask, (0, 1), value=True)
    return [routing_of(iterations[: len(made)], row) for row, made in enumerate(new)], new

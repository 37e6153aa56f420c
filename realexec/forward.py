"""Forward passes of a batch that requests join and leave, decoded greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import SettingError
from .batch import Batch, left_padded
from .batch_cache import BatchCache
from .versions import cache_argument, last_logits_only

_ATTENTION = {"full_attention", "sliding_attention"}


class BatchForward:
    """The running requests of a model of `load_model`: `prefill` adds some, `decode` steps all, `finish`
    drops one."""

    def __init__(self, model: Any, most_rows: int) -> None:
        config = model.config.get_text_config()
        self._model = model
        self._runtime = model.finemoe.runtime
        self._layers = int(config.num_hidden_layers)
        self._running = BatchCache(self._layers, most_rows)
        self._device = model.get_input_embeddings().weight.device
        self._requests: list[int] = []  # by row
        self._newest = torch.zeros(0, 1, dtype=torch.long, device=self._device)
        self._cache_name = cache_argument(model)
        self._options = last_logits_only(model)
        self._answers: dict[int, list[int]] = {}  # of running requests
        self.peak_kv_bytes = 0
        self.dense_bytes = sum(
            t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()) if not t.is_meta
        )

    def prefill(self, prompts: Sequence[tuple[int, list[int]]]) -> None:
        """Compute these requests' prompts in one pass; each has its first token then."""
        lengths = [len(ids) for _, ids in prompts]
        joining = BatchCache(self._layers, len(prompts), room=0)
        joining.begin(lengths)
        tokens, mask, positions = left_padded([ids for _, ids in prompts], self._device)
        longest = tokens.shape[1]
        requests = tuple(request for request, _ in prompts)
        even = min(lengths) == longest
        batch = Batch(requests, True, longest, None if even else mask, skip_pads=True)
        newest = self._compute(batch, tokens, mask, positions, joining)
        joining.advance(longest)
        joining.trim()
        self._running.join(joining)
        self.peak_kv_bytes = max(self.peak_kv_bytes, self._running.bytes() + joining.bytes())
        self._requests += requests
        self._newest = torch.cat([self._newest, newest])
        self._note(requests, newest)

    def decode(self) -> None:
        """One more token for every running request."""
        cache = self._running
        cache.before_step()
        mask = cache.mask(1, self._device)
        positions = torch.tensor(cache.lengths, device=self._device)[:, None]
        batch = Batch(tuple(self._requests), False, 1)
        self._newest = self._compute(batch, self._newest, mask, positions, cache)
        cache.step_done()
        self.peak_kv_bytes = max(self.peak_kv_bytes, cache.bytes())
        self._note(self._requests, self._newest)

    def finish(self, request: int) -> list[int]:
        """A request has all its tokens: they are returned."""
        row = self._requests.index(request)
        last = self._requests.pop()
        if row < len(self._requests):
            self._requests[row] = last
            self._newest[row] = self._newest[-1]
        self._newest = self._newest[:-1]
        self._running.leave(row)
        return self._answers.pop(request)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _compute(
        self, batch: Batch, tokens: Tensor, mask: Tensor, positions: Tensor, cache: BatchCache
    ) -> Tensor:
        """The next token [rows, 1] after `tokens` [rows, T]."""
        self._runtime.expect(batch)
        output = self._model(
            input_ids=tokens,
            attention_mask=mask.long(),
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache.cache},
            **self._options,
        )
        newest: Tensor = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        return newest

    def _note(self, requests: Sequence[int], newest: Tensor) -> None:
        for request, token in zip(requests, newest[:, 0].tolist(), strict=True):
            self._answers.setdefault(request, []).append(token)


def check_attention(config: Any) -> None:
    """Raise SettingError for a model whose layers keep something else than keys and values."""
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
    if kinds:
        raise SettingError(
            f"{config.model_type} models cannot be served in batches: they have layers of "
            f"{', '.join(sorted(kinds))}. Take another model."
        )

"""Made-up routing for small worlds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...traces.routing import RequestRouting, RoutingMeta, RoutingSource
from ..models import ModelSpec


class MadeRouting:
    """Random routing: the same for a request's number and lengths, whoever asks and in whatever order."""

    def __init__(self, model: ModelSpec, *, embedding_width: int = 0, seed: int = 0) -> None:
        self._seed = seed
        self.meta = RoutingMeta(
            model=model.name,
            layers=model.layers,
            experts=model.experts,
            top_k=model.top_k,
            expert_bytes=model.expert_bytes("bf16"),
            embedding_width=embedding_width,
            source="synthetic",
            gate_content="full",
            speculation=tuple(range(1, model.layers)),
        )

    def remarks(self) -> tuple[str, ...]:
        return ()

    def afresh(self) -> MadeRouting:
        return self

    def others(self, served: Iterable[int], count: int) -> list[int]:
        """Numbers beyond those served."""
        first = max(served) + 1
        return list(range(first, first + count))

    def routing_for(
        self, request: int, prompt_tokens: int, output_tokens: int, speculation: tuple[int, ...] = ()
    ) -> RequestRouting:
        """Peaked rows; a decode iteration activates its top K, the prompt's tokens K random experts each."""
        meta = self.meta
        rng = np.random.default_rng([self._seed, request])
        gate = np.exp(2.0 * rng.standard_normal((output_tokens, meta.layers, meta.experts)))
        gate = (gate / gate.sum(axis=2, keepdims=True)).astype(np.float16)
        draws = rng.random((prompt_tokens, meta.layers, meta.experts)).argsort(axis=2)[:, :, : meta.top_k]
        prompt = [
            np.bincount(draws[:, layer].ravel(), minlength=meta.experts) for layer in range(meta.layers)
        ]
        width = meta.embedding_width
        embedding = rng.standard_normal((output_tokens, width)).astype(np.float16) if width else None
        made = routing_of(gate, prompt, meta.top_k, embedding)
        return replace(made, speculation={d: self._guesses(request, gate, d) for d in speculation})

    def _guesses(self, request: int, gate: NDArray[np.float16], distance: int) -> NDArray[np.float16]:
        """Rows of `distance` layers ahead, a third of each drawn at random; 0 for the last layers."""
        rng = np.random.default_rng([self._seed, request, distance])
        guesses = np.zeros_like(gate)
        ahead = gate[:, distance:].astype(np.float32)
        guesses[:, : gate.shape[1] - distance] = (ahead * 2 + rng.random(ahead.shape) / gate.shape[2]) / 3
        return guesses


class ListedRouting:
    """Routing written out: one `RequestRouting` per request, whatever its lengths."""

    def __init__(
        self, meta: RoutingMeta, routings: Sequence[RequestRouting], rest: RoutingSource | None = None
    ) -> None:
        self.meta = meta
        self._routings = routings
        self._rest = rest  # where requests come from that are not served

    def remarks(self) -> tuple[str, ...]:
        return ()

    def afresh(self) -> ListedRouting:
        return self

    def others(self, served: Iterable[int], count: int) -> list[int]:
        return [] if self._rest is None else self._rest.others(served, count)

    def routing_for(
        self, request: int, prompt_tokens: int, output_tokens: int, speculation: tuple[int, ...] = ()
    ) -> RequestRouting:
        """The request's own."""
        if request >= len(self._routings) and self._rest is not None:
            return self._rest.routing_for(request, prompt_tokens, output_tokens, speculation)
        return self._routings[request]


def routing_of(
    gate: NDArray[np.float16],
    prompt_counts: Sequence[NDArray[np.int64]],
    top_k: int,
    embedding: NDArray[np.float16] | None,
) -> RequestRouting:
    """Gate rows [n, L, J] with the prompt's token counts per layer [J]; decode activates each row's top K."""
    iterations, layers, _ = gate.shape
    top = np.sort(np.argsort(-gate[1:], axis=2, kind="stable")[:, :, :top_k], axis=2)
    experts = [np.flatnonzero(counts) for counts in prompt_counts] + list(top.reshape(-1, top_k))
    counts = [c[c > 0] for c in prompt_counts] + [np.ones(top_k, np.int64)] * ((iterations - 1) * layers)
    return RequestRouting(
        gate=gate,
        experts=np.concatenate(experts).astype(np.uint16),
        token_counts=np.concatenate(counts).astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum([len(part) for part in experts]))).astype(np.int64),
        embedding=embedding,
        speculation={},
    )


def spliced(head: RequestRouting, tail: RequestRouting, first: int) -> RequestRouting:
    """Iterations before `first` of one, the others of the other."""
    cells = first * head.gate.shape[1]
    a, b = head.offsets[cells], tail.offsets[cells]
    return RequestRouting(
        gate=np.concatenate((head.gate[:first], tail.gate[first:])),
        experts=np.concatenate((head.experts[:a], tail.experts[b:])),
        token_counts=np.concatenate((head.token_counts[:a], tail.token_counts[b:])),
        offsets=np.concatenate((head.offsets[:cells], tail.offsets[cells:] - b + a)),
        embedding=None
        if head.embedding is None or tail.embedding is None
        else np.concatenate((head.embedding[:first], tail.embedding[first:])),
        speculation={
            distance: np.concatenate((rows[:first], tail.speculation[distance][first:]))
            for distance, rows in head.speculation.items()
        },
    )

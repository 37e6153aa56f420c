"""Synthetic routing: what a model of a preset's shape might route, with the statistics that the preset
states.

Every token has a latent vector: a sum of its request's topic, the request, a slow drift, the kind of the
token (Zipf distributed, partly in the topic's own order) and noise; some tokens repeat an earlier one of
their request. All layers read this one vector, each through a matrix of its own, which is why early layers
tell about later ones; softmax of what they read and of noise of their own is the gate's row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .._core import synthetic_embeddings, synthetic_gate, synthetic_logits, synthetic_prompt
from ..errors import SettingError
from .routing import Half, RequestRouting, RoutingMeta
from .routing_preset import RoutingPreset, load_preset
from .synthetic_math import (
    Floats,
    drift,
    evenly_spaced,
    noise_strength,
    prompt_counts,
    readout,
    recall_at,
    repeats,
    scale_for_entropy,
    standardised,
)

__all__ = ["RoutingPreset", "SyntheticRouting", "load_preset"]

CHUNK_LOGITS = 16384  # made at a time: they stay in the cache
FIT_ITERATIONS = 192
LONG_RUN_WEIGHT = 32.0  # prompt tokens
NOISE_LEVELS = (0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3, 1.7, 2.2, 3.0, 5.0, 10.0)

_WORLD, _FIT, _PREFILL, _DECODE, _SPECULATION = range(5)

Chosen = npt.NDArray[np.uint16]
Streams = npt.NDArray[np.uint32]


class SyntheticRouting:
    """A routing source that makes request i up from (preset, seed, i, lengths): the same bytes in any order.

    What is made for each iteration has the same bits on every machine; the few constants that the generator
    starts from are NumPy's, whose last bit may differ between processors. Raises `SettingError` for lengths
    below 1 and distances outside 1 … L − 1.
    """

    def __init__(self, preset: RoutingPreset, seed: int) -> None:
        self.preset = preset
        self.seed = seed
        self.meta = RoutingMeta(
            model=preset.model,
            layers=preset.layers,
            experts=preset.experts,
            top_k=preset.top_k,
            expert_bytes=preset.expert_bytes,
            embedding_width=preset.embedding_width,
            source="synthetic",
            gate_content="full",
            generator_seed=seed,
            prefill="recorded",
            speculation=tuple(range(1, preset.layers)),
            notes=f"made up by FineMoE's generator from the preset {preset.model}",
        )
        latent, tokens, width = preset.latent, preset.tokens, preset.layers * preset.experts
        draws = [self._stream(_WORLD, 0, part) for part in range(7)]
        chance = np.arange(1.0, tokens.kinds + 1) ** -tokens.zipf
        self._kind_cdf = np.cumsum(chance / chance.sum())
        self.kinds = standardised(draws[0].standard_normal((tokens.kinds, latent.dimensions)), chance)
        self._topics = standardised(draws[1].standard_normal((tokens.topics, latent.dimensions)))
        self._projection = draws[6].standard_normal((latent.dimensions, preset.embedding_width), np.float32)
        self._projection /= np.sqrt(np.square(self._projection).sum(axis=0))
        self.kind_embeddings = self._embedding_of(draws[2], self.kinds)
        self.kind_embeddings *= np.float32(np.sqrt(preset.embedding.token))
        self._topic_embeddings = self._embedding_of(draws[3], self._topics)
        self._topic_embeddings *= np.float32(np.sqrt(preset.embedding.topic))
        self._stock = [self._stock_of(topic) for topic in range(tokens.topics)]
        # In logit units until the sample has told the factor that gives the rows their entropy.
        self._readout = readout(draws[4], preset)
        popular = standardised(draws[5].random((preset.experts, preset.layers)))
        spread = evenly_spaced(preset.rows.bias, preset.layers)
        self._bias = (popular * spread).T.reshape(-1).astype(np.float32)
        # Uniform noise: its share is small, and a normal one would take half of the generator's time.
        self._layer_noise = np.full(width, np.sqrt(12 * preset.shares.layer), np.float32)
        self._unit = np.ones(width, np.float32)
        sample = self._sample()
        factor = np.repeat(scale_for_entropy(sample, preset), preset.experts)
        for part in (self._readout, self._bias, self._layer_noise, self._unit):
            part *= factor
        self.sample_logits = (sample.reshape(len(sample), -1) * factor).astype(np.float32)
        # Half a token for experts that the sample never chose: a long prompt can reach every expert.
        chosen = synthetic_prompt(*self._gate(self.sample_logits))[1] + 0.5
        self._long_run = chosen / chosen.sum(axis=1, keepdims=True)
        self._recall_curve: list[float] = []

    def afresh(self) -> SyntheticRouting:
        """See `RoutingSource`."""
        return self

    def others(self, served: Iterable[int], count: int) -> list[int]:
        """See `RoutingSource`."""
        first = max(served, default=-1) + 1
        return list(range(first, first + count))

    def remarks(self) -> tuple[str, ...]:
        """Nothing: every request is made to measure."""
        return ()

    def routing_for(
        self, request: int, prompt_tokens: int, output_tokens: int, speculation: tuple[int, ...] = ()
    ) -> RequestRouting:
        """See `RoutingSource`."""
        preset, layers, top_k = self.preset, self.preset.layers, self.preset.top_k
        if min(prompt_tokens, output_tokens) < 1:
            raise SettingError(
                f"request {request}: {prompt_tokens} prompt and {output_tokens} output tokens, "
                "both must be at least 1."
            )
        noise = {distance: self.speculation_noise(distance) for distance in speculation}
        gate = np.empty((output_tokens, layers, preset.experts), np.float16)
        guesses = {distance: np.zeros_like(gate) for distance in speculation}
        draws = {distance: self._stream(_SPECULATION, request, distance) for distance in speculation}

        rng = self._stream(_PREFILL, request)
        topic = int(rng.integers(preset.tokens.topics))
        own, lasting = self._request(rng, topic)
        sample = min(prompt_tokens, preset.prefill_sample)
        latents, strength, prompt_kinds = self._latents(rng, topic, lasting, sample, follow=False)
        logits = self._logits(self._streams(rng), latents, strength)
        for distance in speculation:
            rows, chosen = self._guess(draws[distance], logits, distance, noise[distance])
            guesses[distance][0, : layers - distance], _ = synthetic_prompt(rows, chosen)
        gate[0], sampled = synthetic_prompt(*self._gate(logits))
        counts = prompt_counts(rng, sampled, self._long_run, prompt_tokens, top_k, LONG_RUN_WEIGHT)
        _, head = np.nonzero(counts)

        rng = self._stream(_DECODE, request)
        latents, strength, kinds = self._latents(rng, topic, lasting, output_tokens - 1, follow=True)
        streams = self._streams(rng)
        tail = np.empty((output_tokens - 1, layers, top_k), np.uint16)
        chunk = max(1, CHUNK_LOGITS // len(self._bias))
        for start in range(0, output_tokens - 1, chunk):
            together = slice(start, start + chunk)
            logits = self._logits(streams, latents[together], strength[together])
            part = slice(1 + start, 1 + start + len(logits))
            for distance in speculation:
                rows, _ = self._guess(draws[distance], logits, distance, noise[distance])
                guesses[distance][part, : layers - distance] = rows
            gate[part], tail[together] = self._gate(logits)
        experts = np.concatenate((head.astype(np.uint16), tail.reshape(-1)))
        ones = np.ones(tail.size, np.int32)
        offsets = np.empty(1 + output_tokens * layers, np.int64)
        offsets[0] = 0
        offsets[1 : layers + 1] = np.cumsum(np.count_nonzero(counts, axis=1))
        offsets[layers:] = np.arange(len(head), len(experts) + 1, top_k)
        return RequestRouting(
            gate=gate,
            experts=experts,
            token_counts=np.concatenate((counts[counts > 0].astype(np.int32), ones)),
            offsets=offsets,
            embedding=self._embed(rng, topic, own, prompt_kinds, kinds),
            speculation=guesses,
        )

    def topic(self, request: int) -> int:
        """The topic of a request, from 0."""
        return int(self._stream(_PREFILL, request).integers(self.preset.tokens.topics))

    def speculation_noise(self, distance: int) -> float:
        """Noise on the logits, in their standard deviations, that gives the preset's recall at `distance`."""
        preset = self.preset
        if not 1 <= distance < preset.layers:
            raise SettingError(f"speculation distance {distance}: choose from 1 … {preset.layers - 1}.")
        stated = preset.speculation_recall
        recall = stated[min(distance, len(stated)) - 1]
        if distance > len(stated) > 1:
            recall *= (stated[-1] / stated[-2]) ** (distance - len(stated))
        if not self._recall_curve:
            error = self._stream(_FIT, 1).standard_normal(self.sample_logits.shape, np.float32)
            shape = (preset.layers, preset.experts)
            self._recall_curve = recall_at(
                self.sample_logits, self._unit, error, NOISE_LEVELS, shape, preset.top_k
            )
        return float(np.interp(-recall, -np.array(self._recall_curve), NOISE_LEVELS))

    def _stream(self, purpose: int, request: int = 0, part: int = 0) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(purpose, request, part)))

    def _sample(self) -> Floats:
        """Logits [n, L, J] of decode iterations, each of another request."""
        rng, rows, strengths = self._stream(_FIT), [], []
        for topic in rng.integers(self.preset.tokens.topics, size=FIT_ITERATIONS):
            _, lasting = self._request(rng, int(topic))
            latents, strength, _ = self._latents(rng, int(topic), lasting, 1, follow=False)
            rows.append(latents)
            strengths.append(strength)
        logits = self._logits(self._streams(rng), np.concatenate(rows), np.concatenate(strengths))
        return logits.reshape(FIT_ITERATIONS, self.preset.layers, self.preset.experts)

    def _stock_of(self, topic: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """Kinds [stock] and drift [stock, D], of unit variance, of what all requests of a topic know."""
        tokens, rng = self.preset.tokens, self._stream(_WORLD, 1, topic)
        series = drift(rng, tokens.stock, self.preset.latent.dimensions, tokens.drift_correlation)
        return self._draw_kinds(rng, topic, tokens.stock), series

    def _request(self, rng: np.random.Generator, topic: int) -> tuple[Floats, Floats]:
        """What a request has of its own, of unit variance, and with its topic's part what lasts in it [D]."""
        shares = self.preset.shares
        own = rng.standard_normal((self._topics.shape[1],), np.float32)
        topical = np.float32(np.sqrt(shares.topic)) * self._topics[topic]
        return own, np.asarray(topical + np.float32(np.sqrt(shares.request)) * own)

    def _latents(
        self, rng: np.random.Generator, topic: int, lasting: Floats, n: int, *, follow: bool
    ) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
        """Latent vectors [n, 2·D] of n tokens, the token's beside the context's, the strength of the layers'
        noise and the kinds, [n] both. Tokens that do not `follow` one another are not alike either."""
        shares, tokens = self.preset.shares, self.preset.tokens
        kinds = self._draw_kinds(rng, topic, n)
        context = drift(rng, n, len(lasting), tokens.drift_correlation if follow else 0.0)
        if follow:
            source = repeats(rng, n, tokens)
            stock_kinds, stock_context = self._stock[topic]
            kinds = np.concatenate((stock_kinds, kinds))[source]
            context = np.concatenate((stock_context, context))[source]
        latents = np.empty((n, 2 * len(lasting)), np.float32)
        latents[:, : len(lasting)] = self.kinds[kinds]
        context *= np.float32(np.sqrt(shares.drift))
        context += lasting
        fresh = rng.standard_normal(context.shape, np.float32)
        fresh *= np.float32(np.sqrt(shares.iteration))
        np.add(context, fresh, out=latents[:, len(lasting) :])
        read, strength = noise_strength(rng, n, shares.layer, self.preset.rows.noise_concentration)
        latents *= read[:, None]
        return latents, strength, kinds

    def _draw_kinds(self, rng: np.random.Generator, topic: int, n: int) -> npt.NDArray[np.int64]:
        tokens = self.preset.tokens
        drawn = rng.random((2, n))
        kinds = np.searchsorted(self._kind_cdf, drawn[0])
        # A topic's own order of kinds: the common one, turned by another step for each topic.
        kinds[drawn[1] < tokens.topical] += (topic + 1) * (tokens.kinds // (tokens.topics + 1))
        return np.asarray(kinds % tokens.kinds)

    def _streams(self, rng: np.random.Generator) -> Streams:
        return rng.integers(1, 1 << 32, len(self._bias), dtype=np.uint32)

    def _logits(self, streams: Streams, latents: Floats, strength: Floats) -> Floats:
        return synthetic_logits(latents, self._readout, self._bias, self._layer_noise, strength, streams)

    def _gate(self, logits: Floats) -> tuple[Half, Chosen]:
        """f16 rows [n, L, J] and the top K of each, ascending, [n, L, K]."""
        rows, chosen = synthetic_gate(logits, self.preset.experts, self.preset.top_k)
        n = len(logits)
        return rows.reshape(n, -1, self.preset.experts), chosen.reshape(n, -1, self.preset.top_k)

    def _guess(
        self, rng: np.random.Generator, logits: Floats, distance: int, noise: float
    ) -> tuple[Half, Chosen]:
        skipped = distance * self.preset.experts
        guess = rng.standard_normal((len(logits), logits.shape[1] - skipped), np.float32)
        guess *= self._unit[skipped:] * np.float32(noise)
        guess += logits[:, skipped:]
        guess /= np.float32(np.hypot(1, noise))
        return self._gate(guess)

    def _embedding_of(self, rng: np.random.Generator, latents: Floats) -> Floats:
        """Embeddings [n, h] of unit variance that follow `latents` [n, D] as far as they are coupled."""
        # Products by elements: a matrix product's last bit depends on the processor.
        followed = (latents[:, :, None] * self._projection).sum(axis=1)
        own = rng.standard_normal(followed.shape, np.float32)
        coupling = self.preset.embedding_coupling
        return np.asarray(np.float32(np.sqrt(coupling)) * followed + np.float32(np.sqrt(1 - coupling)) * own)

    def _embed(
        self,
        rng: np.random.Generator,
        topic: int,
        own: Floats,
        prompt_kinds: npt.NDArray[np.int64],
        kinds: npt.NDArray[np.int64],
    ) -> Half:
        """Mean over the prompt's tokens, then each decode iteration's token: [1 + len(kinds), h]."""
        shares, width = self.preset.embedding, self.preset.embedding_width
        mean = np.float32(np.sqrt(shares.request)) * self._embedding_of(rng, own[None])[0]
        mean += self._topic_embeddings[topic]
        prompt = mean + self.kind_embeddings[prompt_kinds].mean(axis=0)
        spread = np.float32(np.sqrt(shares.noise / len(prompt_kinds)))
        prompt += spread * rng.standard_normal(width, np.float32)
        streams = rng.integers(1, 1 << 32, width, dtype=np.uint32)
        rows = synthetic_embeddings(kinds, self.kind_embeddings, mean, np.sqrt(12 * shares.noise), streams)
        return np.concatenate((prompt.astype(np.float16)[None], rows))

"""How semantic embeddings follow routing: shares of their variance and their coupling, from a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from .fit_sample import SampledRequest
from .fit_statistics import RoutingFigures
from .routing_preset import RoutingPreset

COUPLINGS = (0.0, 0.25, 0.5, 0.75, 1.0)


def with_embedding_shares(
    preset: RoutingPreset, requests: Sequence[SampledRequest], width: int
) -> RoutingPreset:
    """Embeddings of the recording's width, with its shares of variance between and within requests.

    Topic and request divide the one, token and noise the other, as they do in `preset`.
    """
    rows = [request.embedding.astype(np.float64) for request in requests if request.embedding is not None]
    total = np.concatenate(rows).var(axis=0).sum()
    within = sum(row.var(axis=0, ddof=1).sum() * len(row) for row in rows) / sum(len(row) for row in rows)
    if not total > 0:
        return preset
    between = float(np.clip(1 - within / total, 0.01, 0.99))
    old = preset.embedding
    lasting, changing = old.topic + old.request, old.token + old.noise
    topic = round(between * (old.topic / lasting if lasting else 0.5), 3)
    request = round(between - topic, 3)
    noise = round((1 - between) * (old.noise / changing if changing else 0.0), 3)
    shares = type(old)(topic=topic, request=request, token=round(1 - topic - request - noise, 3), noise=noise)
    return msgspec.structs.replace(preset, embedding=shares, embedding_width=width)


def with_coupling(
    preset: RoutingPreset, recorded: RoutingFigures, generate: Callable[[RoutingPreset], RoutingFigures]
) -> RoutingPreset:
    """The preset whose nearest embedding predicts the first layers as well as the recorded one does."""
    goal = recorded.values["semantic_hit"]
    tried = [msgspec.structs.replace(preset, embedding_coupling=coupling) for coupling in COUPLINGS]
    hits = np.maximum.accumulate([generate(one).values["semantic_hit"] for one in tried])
    coupling = round(float(np.interp(goal, hits, COUPLINGS)), 2)
    return msgspec.structs.replace(preset, embedding_coupling=coupling)

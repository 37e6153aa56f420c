"""Requests whose routing is measured for a fit: recorded ones, and generated ones with the same content.

n is a number of decode iterations, L of layers, J of experts per layer, K of experts activated per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .routing import Half, RequestRouting, RoutingMeta
from .routing_analysis_patterns import first_decode
from .routing_file import RoutingFile
from .routing_stats import Chosen, chosen_experts
from .synthetic import SyntheticRouting

PROMPT_TOKENS = 64  # of a generated request; only decode iterations are measured


@dataclass(frozen=True, slots=True, eq=False)
class SampledRequest:
    """Decode iterations of one request.

    gate         f16 [n, L, J]; where only the chosen experts were recorded, the others' share is that of the
                 recording
    chosen       bool [n, L, J]
    embedding    f16 [n, h], or None
    speculation  distance → f16 [n, L, J]
    category     what it is about, or None where nobody said
    """

    gate: Half
    chosen: Chosen
    embedding: Half | None
    speculation: dict[int, Half]
    category: str | None


def recorded_requests(
    file: RoutingFile, numbers: Sequence[int], categories: Sequence[str] | None, longest: int
) -> list[SampledRequest]:
    """Those of the file with at least two decode iterations; no more than `longest` iterations of each."""
    first = first_decode(file.meta.prefill)
    found = []
    for number in numbers:
        routing = file.recorded(number, file.meta.speculation)
        category = None if categories is None else categories[number]
        request = _sampled(routing, first, longest, category)
        if len(request.gate) >= 2:
            found.append(request)
    return found


def generated_requests(
    source: SyntheticRouting, lengths: Sequence[int], recording: RoutingMeta, *, first: int = 0
) -> list[SampledRequest]:
    """Requests of so many decode iterations each, numbered from `first`, in the content of `recording`."""
    found = []
    for number, length in enumerate(lengths, start=first):
        routing = source.routing_for(number, PROMPT_TOKENS, length + 1, recording.speculation)
        request = _sampled(routing, 1, length, str(source.topic(number)))
        found.append(
            SampledRequest(
                as_recorded(request.gate, request.chosen, recording),
                request.chosen,
                request.embedding if recording.embedding_width else None,
                request.speculation,
                request.category,
            )
        )
    return found


def as_recorded(gate: npt.NDArray[np.floating], chosen: Chosen, recording: RoutingMeta) -> Half:
    """Rows [..., J] with the content of a recording: of chosen ones, what the other experts got there."""
    if recording.unchosen_mass == "recorded":
        return gate.astype(np.float16)
    rows = np.where(chosen, gate, 0).astype(np.float32)
    mass = rows.sum(axis=-1, keepdims=True)
    if recording.unchosen_mass == "zero":
        return np.asarray(rows / mass, dtype=np.float16)
    others = recording.experts - recording.top_k
    return np.where(chosen, rows, (1 - mass) / max(1, others)).astype(np.float16)


def _sampled(routing: RequestRouting, first: int, longest: int, category: str | None) -> SampledRequest:
    part = slice(first, first + longest)
    return SampledRequest(
        gate=routing.gate[part],
        chosen=chosen_experts(routing, first)[:longest],
        embedding=None if routing.embedding is None else routing.embedding[part],
        speculation={distance: rows[part] for distance, rows in routing.speculation.items()},
        category=category,
    )

"""Routing of known parameters, written as a trace, for tests of the fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
from finemoe.traces.fit import starting_preset
from finemoe.traces.fit_sample import as_recorded
from finemoe.traces.routing import RequestRouting, RoutingMeta
from finemoe.traces.routing_file import write_routing
from finemoe.traces.routing_preset import RoutingPreset
from finemoe.traces.routing_stats import chosen_experts
from finemoe.traces.synthetic import SyntheticRouting
from routing_samples import small_meta

REQUESTS, ITERATIONS = 40, 64


def fit_meta(**changes: object) -> RoutingMeta:
    """Six layers of eight experts, top-2."""
    fields: dict[str, object] = {
        "layers": 6,
        "experts": 8,
        "embedding_width": 16,
        "speculation": (1, 3),
        "prefill": "recorded",
    }
    return small_meta(**{**fields, **changes})


def known_preset(meta: RoutingMeta) -> RoutingPreset:
    """Not what a fit starts from: more drift, fewer repeats, other popularity and entropy by layer."""
    start, replace = starting_preset(meta), msgspec.structs.replace
    return replace(
        start,
        embedding_coupling=0.8,
        speculation_recall=(0.8, 0.75, 0.7),
        shares=replace(start.shares, topic=0.3, request=0.05, drift=0.4, token=0.19, layer=0.05),
        tokens=replace(start.tokens, drift_correlation=0.8, repeat=0.05, topics=4),
        rows=replace(start.rows, entropy_bits=(1.6, 2.4), bias=(0.2, 0.6), noise_concentration=4.0),
    )


def write_known(path: Path, meta: RoutingMeta, *, requests: int = REQUESTS) -> list[str]:
    """A trace of `known_preset`; the requests' topics."""
    source = SyntheticRouting(known_preset(meta), 7)
    numbers = range(requests)
    made = (source.routing_for(i, 20, ITERATIONS + 1, meta.speculation) for i in numbers)
    write_routing(path, meta, (_cut(routing, meta) for routing in made))
    return [str(source.topic(i)) for i in numbers]


def _cut(routing: RequestRouting, meta: RoutingMeta) -> RequestRouting:
    """What a recording of that content would have of it."""
    rows = as_recorded(routing.gate, chosen_experts(routing, 0), meta)
    embedding = routing.embedding if meta.embedding_width else None
    return dataclasses.replace(routing, gate=rows, embedding=embedding)

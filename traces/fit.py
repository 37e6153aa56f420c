"""Fit a preset of the synthetic generator to a routing trace, and compare the two on requests held out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ..errors import SettingError, TraceError
from .fit_embedding import with_coupling, with_embedding_shares
from .fit_sample import SampledRequest, recorded_requests
from .fit_search import Goal, generated_figures, search
from .fit_statistics import RoutingFigures, mean_figures, measure
from .routing import RoutingMeta
from .routing_file import RoutingFile
from .routing_preset import (
    EmbeddingShares,
    Evidence,
    Latent,
    RoutingPreset,
    Rows,
    Shares,
    Tokens,
)
from .routing_stats import summarise
from .synthetic import SyntheticRouting

TRAINING_SHARE = 0.7
FIT_REQUESTS = (120, 60)  # stored and served in the search
FIT_ITERATIONS = 320  # of a request in the search: recordings may begin unlike they go on
MOST_REQUESTS = 600
LONGEST = 512
SEARCHES = 1000
LEAST_REQUESTS = 10
MOST_TOPICS = 16
STATED = (
    "static_hit",
    "overlap_1",
    "nearest_1K_d3",
    "nearest_10K_d3",
    "blend_1K_d3",
    "blend_10K_d3",
    "own_request_hit",
    "cosine_within",
    "cosine_across",
    "cosine_requests",
)
SPECULATION_RECALL = (0.84, 0.80, 0.76, 0.73, 0.71, 0.67)


class PresetFit(msgspec.Struct, frozen=True):
    """A fitted preset; figures of the held-out requests against a store of the training requests, recorded
    and generated, the latter mean over `seeds`."""

    path: str
    meta: RoutingMeta
    preset: RoutingPreset
    training_requests: int
    held_out_requests: int
    seeds: tuple[int, ...]
    recorded: RoutingFigures
    generated: RoutingFigures


def fit_preset(
    path: str | Path,
    *,
    categories: Sequence[str] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> PresetFit:
    """Fit to 70 % of the requests of the routing trace `path`, drawn by `seed`; compare on the others.

    `categories` names what each request is about, which tells topics from requests. Minutes of work. Raises
    `TraceError` for a trace with too few requests or layers, `SettingError` for categories that are not one
    per request.
    """
    file = RoutingFile(path)
    meta = file.meta
    if categories is not None and len(categories) != file.requests:
        raise SettingError(
            f"categories: {len(categories)} for {file.requests} requests of {path}. "
            "Give one for each request, in the trace's order."
        )
    if meta.layers < 2:
        raise TraceError(path, "one layer: nothing is ahead of it.", remedy="Fit to a deeper model.")
    order = np.random.default_rng(seed).permutation(file.requests)[:MOST_REQUESTS].tolist()
    progress("reading")
    requests = recorded_requests(file, order, categories, LONGEST)
    if len(requests) < LEAST_REQUESTS:
        raise TraceError(
            path,
            f"{len(requests)} requests with two decode iterations or more; {LEAST_REQUESTS} are needed.",
            remedy="Record more.",
        )
    cut = int(TRAINING_SHARE * len(requests))
    training, held_out = requests[:cut], requests[cut:]
    start = starting_preset(meta, topics=None if categories is None else len(set(categories)))
    fitted = _fit(start, training, meta, seed, progress)
    progress("comparing on requests held out")
    recorded = measure(training, held_out, meta.top_k, searches=SEARCHES, rng=np.random.default_rng(seed))
    seeds = (seed, seed + 1, seed + 2)
    generated = mean_figures(
        [
            generated_figures(fitted, meta, (_lengths(training), _lengths(held_out)), s, SEARCHES)
            for s in seeds
        ]
    )
    fitted = msgspec.structs.replace(
        fitted, measured=measured(fitted), evidence=_evidence(fitted, meta, recorded, generated)
    )
    return PresetFit(str(path), meta, fitted, len(training), len(held_out), seeds, recorded, generated)


def starting_preset(meta: RoutingMeta, *, topics: int | None = None) -> RoutingPreset:
    """Where every fit of a model of this shape starts; what no recording tells stays so, and is ASSUMED.

    As many `topics` as there are categories, at most `MOST_TOPICS`, which is also their number where nobody
    said what requests are about.

    Raises `SettingError` where no routing can be made up: a model whose tokens use every expert needs none.
    """
    if meta.top_k >= meta.experts:
        raise SettingError(
            f"{meta.model} uses all {meta.experts} experts of a layer for every token: "
            "there is nothing to fit. Use the recording itself with --routing FILE."
        )
    chance = meta.top_k / meta.experts
    assumed = "the generator's start; a fit does not change it"
    return RoutingPreset(
        model=meta.model,
        layers=meta.layers,
        experts=meta.experts,
        top_k=meta.top_k,
        expert_bytes=meta.expert_bytes,
        embedding_width=meta.embedding_width or 64,
        embedding_coupling=0.5,
        prefill_sample=64,
        speculation_recall=tuple(max(recall, (1 + chance) / 2) for recall in SPECULATION_RECALL),
        latent=Latent(dimensions=6, layer_width=4.0, global_share=0.2, context_layers=1.0),
        shares=Shares(topic=0.17, request=0.12, drift=0.23, iteration=0.01, token=0.32, layer=0.15),
        tokens=Tokens(
            topics=min(topics or MOST_TOPICS, MOST_TOPICS),
            kinds=400,
            zipf=1.0,
            topical=0.12,
            drift_correlation=0.5,
            repeat=0.2,
            run=0.8,
            stock=200,
        ),
        rows=Rows(
            entropy_bits=(0.85 * math.log2(meta.experts),),
            bias=(0.35,),
            noise_concentration=1.5,
        ),
        embedding=EmbeddingShares(topic=0.2, request=0.1, token=0.6, noise=0.1),
        evidence={
            "speculation_recall": Evidence(
                label="ASSUMED",
                source="measured on a small real MoE (gates of later layers on the hidden state, distances 1 "
                "to 6) and taken over for this model",
            ),
            "embedding, prefill_sample, tokens.topics, tokens.kinds, tokens.run": Evidence(
                label="ASSUMED", source=assumed
            ),
        },
        measured={},
    )


def _fit(
    start: RoutingPreset,
    training: list[SampledRequest],
    meta: RoutingMeta,
    seed: int,
    progress: Callable[[str], None],
) -> RoutingPreset:
    stored_most, served_most = FIT_REQUESTS
    store = min(stored_most, 2 * len(training) // 3)
    stored = [_shortened(request) for request in training[:store]]
    served = [_shortened(request) for request in training[store : store + served_most]]
    lengths = (_lengths(stored), _lengths(served))
    recorded = measure(stored, served, meta.top_k, searches=SEARCHES, rng=np.random.default_rng(seed))
    if meta.embedding_width:
        start = with_embedding_shares(start, stored, meta.embedding_width)
    if meta.speculation:
        start = msgspec.structs.replace(start, speculation_recall=_recall(recorded, meta))
    goal = Goal(recorded, meta, lengths, seed)
    fitted = search(start, goal, progress).preset
    if "semantic_hit" in recorded.values:
        progress("coupling of the embeddings")
        fitted = with_coupling(
            fitted, recorded, lambda one: generated_figures(one, meta, lengths, seed, SEARCHES)
        )
    return fitted


def _lengths(requests: Sequence[SampledRequest]) -> list[int]:
    return [len(request.gate) for request in requests]


def _shortened(request: SampledRequest) -> SampledRequest:
    part = slice(0, FIT_ITERATIONS)
    return SampledRequest(
        request.gate[part],
        request.chosen[part],
        None if request.embedding is None else request.embedding[part],
        {distance: rows[part] for distance, rows in request.speculation.items()},
        request.category,
    )


def _recall(recorded: RoutingFigures, meta: RoutingMeta) -> tuple[float, ...]:
    """Recall at distances 1, 2, … up to the furthest recorded; those between are interpolated."""
    known = sorted(meta.speculation)
    recalls = [recorded.values[f"speculation_recall_{distance}"] for distance in known]
    least = meta.top_k / meta.experts + 1e-3
    every = np.interp(range(1, known[-1] + 1), known, recalls).clip(least, 1)
    return tuple(round(float(recall), 3) for recall in every)


def measured(preset: RoutingPreset) -> dict[str, float]:
    """What a preset states of its own routing (`summary`), seed 0."""
    return {name: round(value, 3) for name, value in summary(preset, 0).items()}


def summary(preset: RoutingPreset, seed: int) -> dict[str, float]:
    """`summarise` of 100 requests of 80 decode iterations: 70 fill a store of 1,000 maps, 30 are served."""
    source = SyntheticRouting(preset, seed)
    distances = tuple(d for d in range(1, len(preset.speculation_recall) + 1) if d < preset.layers)
    requests = [source.routing_for(i, 80, 81, () if i < 70 else distances) for i in range(100)]
    distance = min(3, preset.layers - 1)
    rng = np.random.default_rng(0)
    return summarise(requests, preset.top_k, distance=distance, stored=1000, served=300, rng=rng)


def _evidence(
    preset: RoutingPreset, meta: RoutingMeta, recorded: RoutingFigures, generated: RoutingFigures
) -> dict[str, Evidence]:
    source = f"finemoe trace fit, on {meta.notes or meta.model}"
    entropy = "" if meta.gate_content == "full" else f"; unrecorded probability {meta.unchosen_mass}"
    found = {
        "shape": Evidence(label="MEASURED", source="metadata of the recording"),
        "latent, shares, tokens": Evidence(label="CALIBRATED", source=source),
        "rows": Evidence(label="CALIBRATED", source=source + entropy),
    }
    assumed = {name: entry for name, entry in preset.evidence.items() if name not in found}
    if meta.speculation:
        assumed.pop("speculation_recall", None)
        found["speculation_recall"] = Evidence(label="CALIBRATED", source=source)
    if meta.embedding_width:
        found["embedding"] = Evidence(label="CALIBRATED", source=source)
    return found | assumed | {"how far off": differences(recorded, generated)}


def differences(recorded: RoutingFigures, generated: RoutingFigures) -> Evidence:
    """What a preset says of its distance from the recording."""
    figures = [
        f"{name} {recorded.values[name]:.3f} / {generated.values[name]:.3f}"
        for name in STATED
        if name in recorded.values and name in generated.values
    ]
    layers = zip(recorded.entropy, generated.entropy, strict=True)
    worst = max(abs(made / max(found, 1e-9) - 1) for found, made in layers)
    return Evidence(
        label="MEASURED",
        source="recorded / generated, mean of three seeds, on requests held out: "
        + ", ".join(figures)
        + f"; entropy by layer within {worst:.1%}",
    )

"""How a fitted preset is compared with its recording."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .formats import console

if TYPE_CHECKING:
    from ..traces.fit import PresetFit

_MEANING = {
    "static_hit": "most popular experts",
    "overlap_1": "previous iteration's experts",
    "early_overlap": "the same, first layers",
    "own_request_hit": "nearest map of the same request, d = 3",
    "entropy_1": "entropy of a row, bits",
    "entropy_8": "entropy of the mean of 8 rows",
    "entropy_request": "entropy of a request's mean row",
    "load_skew": "skew of the load (1: even)",
    "cosine_within": "cosine of requests, one category",
    "cosine_across": "cosine of requests, two categories",
    "cosine_requests": "cosine of requests, any two",
    "pearson_trajectory": "Pearson, similarity of rows to hits",
    "pearson_semantic": "Pearson, similarity of embeddings to hits",
    "semantic_hit": "nearest embedding, first 3 layers",
}


def print_fit(fit: PresetFit) -> None:
    """Statistic by statistic, recorded against generated on the requests held out."""
    from rich.table import Table

    meta = fit.meta
    print(
        f"{fit.path}: {meta.model}, {meta.layers} layers x {meta.experts} experts, top-{meta.top_k}; "
        f"{meta.source.upper()}"
    )
    print(f"fitted to     {fit.training_requests} requests; their maps are the store below")
    print(f"held out      {fit.held_out_requests} requests")
    names = ", ".join(str(seed) for seed in fit.seeds)
    print(f"generated     as many requests, as long; mean over the generator's seeds {names}")
    if meta.gate_content == "chosen":
        print("gate rows     of both: those of the chosen experts, as recorded")
    print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("statistic", "recorded", "generated", "difference"):
        table.add_column(name, justify="left" if name == "statistic" else "right", no_wrap=True)
    for name, value in fit.recorded.values.items():
        other = fit.generated.values.get(name)
        if other is not None:
            table.add_row(meaning(name), f"{value:.3f}", f"{other:.3f}", f"{other - value:+.3f}")
    pairs = list(zip(fit.recorded.entropy, fit.generated.entropy, strict=True))
    worst = max(range(len(pairs)), key=lambda layer: abs(pairs[layer][1] - pairs[layer][0]))
    table.add_row(
        f"entropy of the worst layer, {worst}", *(f"{v:.3f}" for v in pairs[worst]), _relative(*pairs[worst])
    )
    console().print(table)


def meaning(name: str) -> str:
    """A statistic's name in words."""
    if name in _MEANING:
        return _MEANING[name]
    first, _, rest = name.partition("_")
    if first == "overlap":
        return f"experts of {rest} iterations before"
    if first in ("nearest", "blend"):
        capacity, _, distance = rest.partition("_d")
        return f"{'nearest' if first == 'nearest' else '32 nearest'} of {capacity} maps, d = {distance}"
    if first == "spread":
        return f"its spread over iterations, {rest} maps"
    return f"recall of speculation, distance {name.rpartition('_')[2]}"


def _relative(recorded: float, generated: float) -> str:
    return f"{(generated - recorded) / recorded:+.1%}" if recorded else "n/a"

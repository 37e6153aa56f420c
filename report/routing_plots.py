"""Pictures of a routing analysis, one PNG for each figure of the paper's motivation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .figures import draw, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..traces.routing_analysis import RoutingAnalysis
    from ..traces.routing_analysis_patterns import Likeness


def plot_routing(analysis: RoutingAnalysis, folder: str | Path) -> list[Path]:
    """Write the pictures into `folder`, made where it is absent, and return their paths.

    entropy_layers.png, entropy_aggregated.png (Fig. 3), similarity_SEARCH_LEVEL.png (Fig. 8, 9),
    hits_distance.png (Fig. 4), score_capacity.png (Fig. 16a), load.png. Raises `SettingError` without
    matplotlib.
    """
    require_matplotlib()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = analysis.meta.model
    layers = range(analysis.meta.layers)
    entropy = analysis.entropy

    def by_layer(axes: Axes) -> None:
        axes.plot(layers, entropy.coarse, marker="s", label="coarse: a request's mean row")
        axes.plot(layers, entropy.fine, marker="o", label="fine: an iteration's row")
        axes.axhline(entropy.most, linestyle=":", color="grey", label="even over all experts")
        axes.set_ylim(0)

    def aggregated(axes: Axes) -> None:
        found = entropy.aggregated
        axes.plot([a.iterations for a in found], [a.bits for a in found], marker="o")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0)

    def load(axes: Axes) -> None:
        axes.bar(list(layers), analysis.busiest)
        axes.axhline(1, linestyle=":", color="grey")

    bits, layer = "entropy, bits", "layer"
    return [
        draw(folder / "entropy_layers.png", f"{name}: entropy per layer", layer, bits, by_layer),
        draw(
            folder / "entropy_aggregated.png",
            f"{name}: entropy of averaged iterations",
            "iterations averaged",
            bits,
            aggregated,
        ),
        *(_similarity(item, name, folder) for item in analysis.likeness),
        _distances(analysis, folder),
        _capacities(analysis, folder),
        draw(folder / "load.png", f"{name}: busiest expert over an even share", layer, "factor", load),
    ]


def _similarity(item: Likeness, name: str, folder: Path) -> Path:
    def paint(axes: Axes) -> None:
        axes.scatter(
            [p[0] for p in item.points], [p[1] for p in item.points], s=8, alpha=0.5, label="request"
        )
        axes.plot([p[0] for p in item.curve], [p[1] for p in item.curve], "k.-", label="tenths of all pairs")

    return draw(
        folder / f"similarity_{item.search}_{item.level}.png",
        f"{name}: {item.search}, {item.level}; Pearson {item.pairs:.2f} pairs, {item.requests:.2f} requests",
        "similarity",
        "share of experts in common",
        paint,
    )


def _distances(analysis: RoutingAnalysis, folder: Path) -> Path:
    def mean(rows: list[dict[int, float]]) -> tuple[list[int], list[float]]:
        return list(rows[0]), [sum(row[d] for row in rows) / len(rows) for d in rows[0]]

    def paint(axes: Axes) -> None:
        seeds = analysis.seeds
        for place, store in enumerate(seeds[0].stores):
            found = mean([seed.stores[place].hits for seed in seeds])
            axes.plot(*found, marker="o", label=f"fine: nearest of {store.maps:,} maps")
        axes.plot(*mean([seed.coarse for seed in seeds]), marker="s", label="coarse: request-level counts")
        if seeds[0].speculation:
            axes.plot(*mean([seed.speculation for seed in seeds]), marker="^", label="speculation")
        popular = sum(seed.popular for seed in seeds) / len(seeds)
        axes.axhline(popular, linestyle=":", color="grey", label="most popular experts")
        axes.set_ylim(0, 1)

    top_k = analysis.meta.top_k
    title = f"{analysis.meta.model}: {top_k} prefetched experts per layer"
    return draw(folder / "hits_distance.png", title, "prefetch distance", "hit rate", paint)


def _capacities(analysis: RoutingAnalysis, folder: Path) -> Path:
    def paint(axes: Axes) -> None:
        sizes = [store.maps for store in analysis.seeds[0].stores]
        count = len(analysis.seeds)

        def means(field: str) -> list[float]:
            each = [[getattr(store, field) for store in seed.stores] for seed in analysis.seeds]
            return [sum(values) / count for values in zip(*each, strict=True)]

        axes.plot(sizes, means("mean_score"), marker="o", label="mean of all searches")
        axes.plot(sizes, means("whole_mean"), marker="s", label="mean of whole maps")
        axes.plot(sizes, means("whole_least"), marker="v", label="least of whole maps")
        for bound in analysis.bounds:
            axes.plot(bound.maps, bound.claimed, "kx")
            axes.annotate(f" {bound.rule}", (bound.maps, bound.claimed), fontsize=8)
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)

    title = f"{analysis.meta.model}: score of the nearest map (x: claimed)"
    return draw(folder / "score_capacity.png", title, "maps in the store", "score", paint)

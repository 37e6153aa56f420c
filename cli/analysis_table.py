"""How a routing analysis is printed."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

from .formats import console

if TYPE_CHECKING:
    from rich.table import Table

    from ..traces.routing_analysis import RoutingAnalysis


def print_analysis(analysis: RoutingAnalysis) -> None:
    """Everything as text; figures are MEASURED on the trace, means over the seeds unless a seed is named."""
    meta, seeds = analysis.meta, analysis.seeds
    print(
        f"{analysis.path}: {meta.model}, {meta.layers} layers x {meta.experts} experts, top-{meta.top_k}; "
        f"{analysis.requests:,} requests, {analysis.iterations:,} decode iterations; {meta.source.upper()}"
    )
    if analysis.requests < analysis.recorded_requests:
        drawn = f"drawn by seed {seeds[0].seed}, or without decode iterations and left out"
        print(f"requests      {analysis.requests:,} of {analysis.recorded_requests:,} ({drawn})")
    if meta.gate_content == "chosen":
        print(f"gate rows     chosen experts only, the others' probability {meta.unchosen_mass}")
    first = seeds[0]
    where = f"all {first.training_requests} requests of {analysis.store_path}"
    if analysis.store_path is None:
        where = (
            f"{first.training_requests} requests drawn by the seed ({first.training_iterations:,} iterations)"
        )
    rule = "a random sample" if analysis.fill == "sample" else "all offered in file order, redundancy rule"
    print(f"store         {where}; filled by {rule}")
    names = ", ".join(str(seed.seed) for seed in seeds)
    print(f"served        {first.served_iterations:,} iterations of the other requests; seeds {names}")
    _print_entropy(analysis)
    _print_likeness(analysis)
    _print_hits(analysis)
    _print_capacities(analysis)
    print("\nload balance")
    print(
        f"  busiest expert {mean(analysis.busiest):.2f}x an even share (mean over layers), "
        f"{max(analysis.busiest):.2f}x in layer {analysis.busiest.index(max(analysis.busiest))}; "
        f"entropy of the loads {mean(analysis.balance):.3f} of even ones"
    )
    _print_layers(analysis)


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def _print_entropy(analysis: RoutingAnalysis) -> None:
    entropy = analysis.entropy
    fine, coarse = mean(entropy.fine), mean(entropy.coarse)
    print(f"\nentropy, bits, mean over layers; {entropy.most:.2f} is even (Fig. 3)")
    print(
        f"  fine (iteration) {fine:.2f}, coarse (request) {coarse:.2f}: fine is {1 - fine / coarse:.0%} lower"
    )
    table = _table("  iterations averaged", *(str(a.iterations) for a in entropy.aggregated))
    table.add_row("  bits", *(f"{a.bits:.2f}" for a in entropy.aggregated))
    table.add_row("  windows", *(f"{a.windows:,}" for a in entropy.aggregated))
    console().print(table)


def _print_likeness(analysis: RoutingAnalysis) -> None:
    print("\nsimilarity against share of experts in common, all pairs of requests, Pearson (Fig. 8, 9)")
    table = _table(
        "  search", "level", "pairs", "requests", "hit of the least to the most similar tenth of the pairs"
    )
    for item in analysis.likeness:
        curve = " ".join(f"{hit:.2f}" for _, hit in item.curve)
        table.add_row(f"  {item.search}", item.level, f"{item.pairs:.3f}", f"{item.requests:.3f}", curve)
    console().print(table)
    if not any(item.search == "semantic" for item in analysis.likeness):
        print("  semantic: none, the trace has no embeddings")


def _print_hits(analysis: RoutingAnalysis) -> None:
    seeds, top_k = analysis.seeds, analysis.meta.top_k
    distances = list(seeds[0].coarse)
    print(f"\nhit rate by prefetch distance, {top_k} prefetched experts per layer (Fig. 4)")
    table = _table("  predictor", *(f"d = {distance}" for distance in distances))

    def row(name: str, found: list[dict[int, float]], *, each: bool = False) -> None:
        cells = [mean(one[d] for one in found) if all(d in one for one in found) else None for d in distances]
        if any(cell is not None for cell in cells):
            table.add_row(f"  {name}", *("" if cell is None else f"{cell:.3f}" for cell in cells))
        if each and len(seeds) > 1:
            for seed, one in zip(seeds, found, strict=True):
                table.add_row(f"    seed {seed.seed}", *(f"{one[d]:.3f}" for d in distances))

    for place, store in enumerate(seeds[0].stores):
        found = [seed.stores[place] for seed in seeds]
        row(f"fine: nearest of {store.maps:,} maps", [one.hits for one in found], each=True)
    for place, store in enumerate(seeds[0].stores):
        found = [seed.stores[place] for seed in seeds]
        row(f"semantic, layers 0 … d − 1, {store.maps:,} maps", [one.semantic for one in found])
    row("coarse: request-level counts", [seed.coarse for seed in seeds])
    row("speculation", [seed.speculation for seed in seeds])
    console().print(table)
    print(f"  without a distance: most popular experts {mean(s.popular for s in seeds):.3f}", end="")
    print("" if analysis.previous is None else f", previous iteration's experts {analysis.previous:.3f}")


def _print_capacities(analysis: RoutingAnalysis) -> None:
    seeds = analysis.seeds
    claims = {bound.maps: bound for bound in analysis.bounds}
    print("\nscore of the nearest map by capacity (Fig. 16a); whole: after all layers but the last")
    distance = min(3, max(seeds[0].coarse))
    table = _table(
        "  maps", "mean", "whole, mean", "whole, least", "claimed", f"δ changes the set (d = {distance})"
    )
    for place, store in enumerate(seeds[0].stores):
        same = [seed.stores[place] for seed in seeds]
        bound = claims.pop(store.maps, None)
        claimed = "" if bound is None else f"≥ {bound.claimed:.2f} at {bound.rule}"
        table.add_row(
            f"  {store.maps:,}",
            f"{mean(one.mean_score for one in same):.3f}",
            f"{mean(one.whole_mean for one in same):.3f}",
            f"{min(one.whole_least for one in same):.3f}",
            claimed,
            f"{mean(one.delta[distance] for one in same):.1%} of layers",
        )
    console().print(table)
    for bound in claims.values():
        most = min(seed.training_iterations for seed in seeds)
        print(f"  {bound.rule} = {bound.maps:,} maps: not measured, the store's requests have {most:,}")


def _print_layers(analysis: RoutingAnalysis) -> None:
    print()
    table = _table("layer", "fine, bits", "coarse, bits", "busiest expert", "entropy of loads")
    for layer in range(analysis.meta.layers):
        table.add_row(
            str(layer),
            f"{analysis.entropy.fine[layer]:.2f}",
            f"{analysis.entropy.coarse[layer]:.2f}",
            f"{analysis.busiest[layer]:.2f}x",
            f"{analysis.balance[layer]:.3f}",
        )
    console().print(table)

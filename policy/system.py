"""What a named system is: a composition of predictor, selector, eviction and timing over one core.

The rows stand in `systems`; to add one, see docs/adding-a-system.md.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Predictor = Literal["none", "map", "speculate", "activation", "oracle", "plugin"]
Eviction = Literal["finemoe", "lru", "lfu", "lfru", "activation", "belady", "plugin"]


class System(msgspec.Struct, frozen=True, kw_only=True):
    """One row: what the core is configured to do, and how the world times it."""

    name: str
    description: str
    #: where the mechanism is written down
    source: str
    #: `ablation`: a variant for study; `plugin`: a user's. Neither is part of `--policy all`
    group: Literal["system", "ablation", "plugin"] = "system"
    predictor: Predictor = "none"
    #: map searches that run (predictor `map`)
    semantic: bool = False
    trajectory: bool = False
    #: layers that a search after layer l's gate predicts: l + d, or all later ones (predictor `activation`)
    targets: Literal["distance", "later"] = "distance"
    #: popular experts of the first d layers are prefetched when an iteration begins (predictor `activation`)
    popular_start: bool = False
    #: layers ahead that the speculated gates are of; None: the prefetch distance (predictor `speculate`)
    distance: int | None = None
    #: layer 0 speculates on all layers up to that distance
    first_window: bool = False
    #: prefetch set of a predicted row: δ set, top K, or every expert with a positive value
    selector: Literal["delta", "top_k", "positive"] = "top_k"
    #: order of the prefetch queue: p / (l − l_now), p · (1 − (l − l_now) / L), or the lowest layer first
    priority: Literal["distance", "depth", "layer"] = "distance"
    eviction: Eviction = "lru"
    #: whose predictions and eviction keys `plugin` stands for: "path.py:Class", or the name of an entry point
    policy: str | None = None
    #: `layer`: every gate loads all experts of its layer
    load_shape: Literal["expert", "layer"] = "expert"
    #: every layer has the same number of slots, and prefetches are staged beside them
    layer_cache: bool = False
    #: resident from the start for good: nothing, the most popular experts, or all
    preload: Literal["none", "popular", "all"] = "none"
    #: the forward pass waits for each search, or for the next layer's prefetches
    search_blocks: bool = False
    prefetch_blocks: bool = False
    #: `as_ready`: resident experts are computed while others are loaded; `all`: one grouped kernel per chunk
    compute_order: Literal["all", "as_ready"] = "all"
    #: each load copies an expert back to the host first
    write_back: bool = False
    #: False where the system has no hits by definition
    hit_rate_defined: bool = True

    def speculated(self, layer: int, layers: int, prefetch_distance: int) -> range:
        """Layers whose gates are applied to the hidden state of `layer`."""
        if self.predictor != "speculate":
            return range(0)
        last = layer + (self.distance or prefetch_distance)
        first = 1 if self.first_window and layer == 0 else last
        return range(first, min(last, layers - 1) + 1)

    def speculated_distances(self, layers: int, prefetch_distance: int) -> tuple[int, ...]:
        """Distances at which the system needs speculated rows, ascending."""
        found = {
            target - layer
            for layer in range(layers)
            for target in self.speculated(layer, layers, prefetch_distance)
        }
        return tuple(sorted(found))

    def inactive(self, *, recorded: tuple[int, ...], layers: int, prefetch_distance: int) -> str:
        """Why the system cannot run on a routing trace that has speculated rows at the distances `recorded`.

        Empty where it can. A system without its signal would run as another one.
        """
        if self.predictor != "speculate":
            return ""
        needed = self.speculated_distances(layers, prefetch_distance)
        if not needed:
            return f"no layer lies {self.distance or prefetch_distance} layers ahead of another"
        missing = [str(distance) for distance in needed if distance not in recorded]
        if not missing:
            return ""
        has = f"them at {', '.join(map(str, recorded))} only" if recorded else "none"
        return f"it needs speculated gates at distance {', '.join(missing)}; the routing has {has}"

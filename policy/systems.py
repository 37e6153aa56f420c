"""The table of named systems: compositions of predictor, selector, eviction and timing over one core.

To add one, add a row (docs/adding-a-system.md).
"""

from __future__ import annotations

import difflib
from typing import Literal

import msgspec

from ..errors import SettingError

Predictor = Literal["none", "map", "speculate", "oracle"]
Eviction = Literal["finemoe", "lru", "lfu", "belady"]


class System(msgspec.Struct, frozen=True, kw_only=True):
    """One row: what the core is configured to do, and how the world times it."""

    name: str
    description: str
    #: where the mechanism is written down
    source: str
    predictor: Predictor = "none"
    #: map searches that run (predictor `map`)
    semantic: bool = False
    trajectory: bool = False
    eviction: Eviction = "lru"
    #: `layer`: every gate loads all experts of its layer
    load_shape: Literal["expert", "layer"] = "expert"
    #: `as_ready`: resident experts are computed while others are loaded; `all`: one grouped kernel per chunk
    compute_order: Literal["all", "as_ready"] = "all"
    #: every expert is resident from the start, whatever the cache size says
    preloaded: bool = False
    #: False where the system has no hits by definition
    hit_rate_defined: bool = True


_ROWS = (
    System(
        name="finemoe",
        description="expert maps: semantic and trajectory search, δ sets; smallest p·freq evicted",
        source="FineMoE, EuroSys '26, arXiv 2502.05370",
        predictor="map",
        semantic=True,
        trajectory=True,
        eviction="finemoe",
    ),
    System(
        name="lru",
        description="demand loads only, least recently required evicted",
        source="common practice",
    ),
    System(
        name="lfu",
        description="demand loads only, least frequently required evicted (counts kept across evictions)",
        source="common practice",
        eviction="lfu",
    ),
    System(
        name="deepspeed",
        description="every layer loads all its non-resident experts, blocking; LRU cache (ours to state)",
        source="DeepSpeed-Inference as evaluated in arXiv 2502.05370 §6.1",
        load_shape="layer",
        hit_rate_defined=False,
    ),
    System(
        name="no-offload",
        description="all experts resident; an error if they do not fit",
        source="lower bound of every time",
        preloaded=True,
    ),
    System(
        name="oracle",
        description="knows the remaining routing of running requests: prefetch in order of need, Belady",
        source="lower bound of what a policy can reach; Belady 1966",
        predictor="oracle",
        eviction="belady",
        compute_order="as_ready",
    ),
)

SYSTEMS: dict[str, System] = {system.name: system for system in _ROWS}


def find_system(name: str) -> System:
    """The row of that name; SettingError with the nearest name otherwise."""
    if name in SYSTEMS:
        return SYSTEMS[name]
    near = difflib.get_close_matches(name, SYSTEMS, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise SettingError(f"--policy {name} is no known system. {hint}Known: {', '.join(SYSTEMS)}, or all.")

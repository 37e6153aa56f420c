"""The table of named systems. Each row's source says where its mechanism is written down."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import SettingError, did_you_mean
from .system import Eviction, System

_PAPER = "FineMoE, EuroSys '26, arXiv 2502.05370"

_FINEMOE = System(
    name="finemoe",
    description="expert maps: semantic and trajectory search, δ sets; smallest p·freq evicted",
    source=_PAPER,
    predictor="map",
    semantic=True,
    trajectory=True,
    selector="delta",
    eviction="finemoe",
)

_SYSTEMS = (
    _FINEMOE,
    System(
        name="moe-infinity",
        description="request-level activation matrices, searched and waited for at every gate; all later "
        "layers queued; smallest share of tokens evicted",
        source="MoE-Infinity, arXiv 2401.14361, and its public code",
        predictor="activation",
        targets="later",
        popular_start=True,
        selector="positive",
        priority="depth",
        eviction="activation",
        search_blocks=True,
    ),
    System(
        name="promoe",
        description="predicts 5 layers ahead (proxy: that layer's gate on this layer's hidden state), lowest "
        "layer first; resident experts computed first; LRU",
        source="ProMoE, arXiv 2410.22134",
        predictor="speculate",
        distance=5,
        first_window=True,
        priority="layer",
        compute_order="as_ready",
    ),
    System(
        name="mixtral-offloading",
        description="the next layer's gate on this layer's hidden state, top K staged and waited for; LRU "
        "per layer",
        source="Mixtral-Offloading, arXiv 2312.17238, and its public code",
        predictor="speculate",
        distance=1,
        layer_cache=True,
        prefetch_blocks=True,
    ),
    System(
        name="deepspeed",
        description="every layer loads all its non-resident experts, blocking; LRU cache (ours to state)",
        source="DeepSpeed-Inference as evaluated in arXiv 2502.05370 §6.1",
        load_shape="layer",
        hit_rate_defined=False,
    ),
    System(
        name="static",
        description="the most popular experts stay on the device for the whole run, the others pass through",
        source="common practice in llama.cpp and KTransformers",
        preload="popular",
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
        name="lfru",
        description="demand loads only; experts hit while resident are privileged (LRU, half of the slots), "
        "of the others the least frequently required is evicted",
        source="least frequent recently used, Bilal and Kang 2017, arXiv 1702.04078",
        eviction="lfru",
    ),
    System(
        name="no-offload",
        description="all experts resident; an error if they do not fit",
        source="lower bound of every time",
        preload="all",
    ),
    System(
        name="oracle",
        description="knows the remaining routing of running requests: prefetch in order of need, Belady",
        source="lower bound of what a policy that starts cold can reach; Belady 1966",
        predictor="oracle",
        eviction="belady",
        compute_order="as_ready",
    ),
)

# Fig. 14a's ways to predict, each under Fig. 14b's ways to evict. `map-tsd` is `finemoe` itself.
_TRACKING: dict[str, tuple[str, dict[str, Any]]] = {
    "speculate": (
        "the gate of layer l + d on the hidden state of layer l",
        {"predictor": "speculate", "semantic": False, "trajectory": False, "selector": "top_k"},
    ),
    "hit-count": (
        "the nearest request-level activation matrix",
        {"predictor": "activation", "semantic": False, "trajectory": False, "selector": "top_k"},
    ),
    "map-t": ("trajectory search, top K", {"semantic": False, "selector": "top_k"}),
    "map-ts": ("trajectory and semantic search, top K", {"selector": "top_k"}),
    "map-tsd": ("trajectory and semantic search, δ sets", {}),
}
_CACHES: dict[str, Eviction] = {"": "finemoe", "+lru": "lru", "+lfu": "lfu"}

_ABLATIONS = (
    *(
        msgspec.structs.replace(
            _FINEMOE,
            name=f"{name}{ending}",
            description=f"{what}; {eviction} eviction",
            source=f"{_PAPER}, Fig. 14",
            group="ablation",
            eviction=eviction,
            **changes,
        )
        for name, (what, changes) in _TRACKING.items()
        for ending, eviction in _CACHES.items()
    ),
    msgspec.structs.replace(
        next(row for row in _SYSTEMS if row.name == "mixtral-offloading"),
        name="mixtral-offloading+wb",
        description="mixtral-offloading whose loads each copy an expert back to the host, as its code does",
        group="ablation",
        write_back=True,
    ),
)

#: names that stand for several systems
_GROUPS = {"all": "system", "ablations": "ablation"}

SYSTEMS: dict[str, System] = {system.name: system for system in (*_SYSTEMS, *_ABLATIONS)}


def find_system(name: str) -> System:
    """The row of that name, or that of a user's policy: `path.py:Class`, or the name of an entry point.

    Raises SettingError, with the nearest name, where there is none, and PolicyError where a policy's own code
    fails.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    from .plugin_load import plugin_names, plugin_system, policy_system

    if ":" in name:
        return _not_ours(name, policy_system(name))
    plugins = plugin_names()
    if name in plugins:
        return _not_ours(name, plugin_system(name))
    if name.endswith(".py"):
        raise SettingError(f"--policy {name} names no class. Write {name}:Class.")
    known = [*SYSTEMS, *plugins]
    raise SettingError(
        f"--policy {name} is no known system.{did_you_mean(name, known)} "
        f"Known: {', '.join(known)}; or all, ablations, path.py:Class."
    )


def is_group(name: str) -> bool:
    """Whether the name stands for several systems."""
    return name in _GROUPS


def find_systems(names: tuple[str, ...]) -> list[System]:
    """The rows of these names; `all`: every system of ours but the ablations, `ablations`: those.

    Errors as of `find_system`; SettingError where two users' policies have the same name.
    """
    found: list[System] = []
    for name in names:
        if name in _GROUPS:
            rows = [row for row in SYSTEMS.values() if row.group == _GROUPS[name]]
        else:
            rows = [find_system(name)]
        for row in rows:
            twin = next((other for other in found if other.name == row.name), row)
            if twin != row:
                raise SettingError(
                    f"--policy: {twin.source} and {row.source} are both named {row.name}. "
                    "Give the classes names of their own."
                )
            if row not in found:
                found.append(row)
    return found


def _not_ours(given: str, system: System) -> System:
    """Refuse a user's policy that would stand in the results as one of ours."""
    if system.name in SYSTEMS or system.name in _GROUPS:
        raise SettingError(
            f"--policy {given} is named {system.name}, like a system of ours. Give it another name."
        )
    return system

"""Turn settings into everything a grid of runs needs, and refuse what cannot run before anything is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..calibration.profile import HardwareProfile, load_machine
from ..errors import CapacityError, SettingError
from ..policy.cache_size import parse_cache_size
from ..policy.models import ModelSpec, load_model_spec
from ..policy.system import System
from ..policy.systems import find_systems
from ..serving.grid import Cell, named_cells, refuse_unless_any_runs
from ..serving.selection import check_warmup, describe_trace, select
from ..serving.settings import RunSettings
from ..traces.requests import RequestSelection, open_requests
from ..traces.routing import RoutingSource
from ..traces.routing_file import RoutingFile
from ..traces.routing_preset import load_preset, preset_for
from ..traces.synthetic import SyntheticRouting
from .evidence import evidence_of
from .memory import MemoryPlan, plan_memory, whole_model_bytes
from .popularity import sample_of

if TYPE_CHECKING:
    from ..serving.selection import Requests

TRAINING_SHARE = 0.7  # paper §6.1: 70 % of the data fill the store, 30 % are served
_SPLIT_STREAM = 1  # keeps the offline split's draws apart from other uses of the run's seed


@dataclass(frozen=True, kw_only=True)
class SimulatedCell(Cell):
    """One run of a simulated grid."""

    profile: HardwareProfile
    memory: MemoryPlan | None = None

    def sizes(self) -> dict[str, int]:
        """See `Cell`."""
        memory = self.memory
        if memory is None:
            return {}
        shares = memory.devices
        return {
            "slots": memory.slots,
            "per\ndevice": memory.slots_per_device,
            "expert\nGB": sum(share.expert_slot_bytes for share in shares),
            "dense\nGB": sum(share.dense_bytes for share in shares),
            "reserve\nGB": sum(share.reserve_bytes for share in shares),
            "KV cache\nGB": memory.kv_budget_bytes,
            "KV\ntokens": memory.max_kv_tokens,
        }


@dataclass(frozen=True)
class Plan:
    """A grid of runs, ready to go. `settings` are resolved: the model's own defaults are filled in."""

    settings: RunSettings
    model: ModelSpec
    profiles: tuple[HardwareProfile, ...]
    training: Requests
    routing: RoutingSource
    cells: tuple[SimulatedCell, ...]
    trace: Mapping[str, Any]  # what the results say of the request trace
    evidence: Mapping[str, Any]
    warnings: tuple[str, ...]

    @property
    def requests(self) -> RequestSelection:
        """Those of the first cell: all cells serve the same ones, each at its rate."""
        return self.cells[0].requests

    @property
    def machines(self) -> Mapping[str, str]:
        """Name of each machine → what it is."""
        return {profile.name: profile.description for profile in self.profiles}


def make_plan(settings: RunSettings) -> Plan:
    """Read model, profile, traces and systems, and split the memory of every cell.

    Raises InputError for what cannot be used, and CapacityError when no cell fits.
    """
    systems = find_systems(settings.policy)
    model = load_model_spec(settings.model)
    profiles = _profiles(settings)
    if settings.prefetch_distance is None:
        settings = msgspec.structs.replace(settings, prefetch_distance=model.prefetch_distance)
    experts, expert_bytes = model.routed_experts(), model.expert_bytes(settings.expert_dtype)
    sizes = {text: parse_cache_size(text, experts, expert_bytes) for text in settings.expert_cache}
    trace = open_requests(settings.trace, sort=settings.sort)
    selected = select(trace, settings)
    requests, training = _split(next(iter(selected.values())), settings)
    served = dict.fromkeys(selected, requests) if settings.offline else selected
    check_warmup(settings, len(requests))
    routing = _routing(settings, model)
    inactive = {system.name: _inactive(system, routing, requests, settings) for system in systems}
    cells = named_cells(
        [
            cell
            for system in systems
            for text, size in _sizes(system, sizes, model, settings).items()
            for profile in profiles
            for cell in _cells(system, text, size, profile, served, model, settings, inactive)
        ]
    )
    refuse_unless_any_runs(cells, "with this routing")
    return Plan(
        settings=settings,
        model=model,
        profiles=profiles,
        training=training,
        routing=routing,
        cells=cells,
        trace=describe_trace(trace, served, training),
        evidence=evidence_of(settings, trace, routing, profiles, model),
        warnings=tuple(dict.fromkeys(text for cell in cells if cell.memory for text in cell.memory.warnings)),
    )


def _profiles(settings: RunSettings) -> tuple[HardwareProfile, ...]:
    """The machines, each with the same figures changed."""
    profiles: dict[str, HardwareProfile] = {}
    for name in settings.hardware:
        profile = load_machine(
            name,
            settings.set,
            host_memory=settings.host_memory,
            peer_needed=settings.peer_link == "nvlink",
        )
        if profile.name in profiles:
            raise SettingError(
                f"--hardware {','.join(settings.hardware)} has two profiles that are named {profile.name}. "
                "Give one of them another name, or leave it out."
            )
        profiles[profile.name] = profile
    return tuple(profiles.values())


def _split(selected: RequestSelection, settings: RunSettings) -> tuple[RequestSelection, Requests]:
    """Requests that are served, and those that fill the store first; both in order of the trace."""
    count = int(TRAINING_SHARE * len(selected)) if settings.offline else 0
    if not count:
        return selected, ()
    rng = np.random.default_rng([settings.seed, _SPLIT_STREAM])
    stored = np.zeros(len(selected), np.bool_)
    stored[rng.permutation(len(selected))[:count]] = True
    return selected.part(~stored), selected.part(stored)


def _routing(settings: RunSettings, model: ModelSpec) -> RoutingSource:
    source: RoutingSource
    if settings.routing == "synthetic":
        shape = (model.layers, model.experts, model.top_k, model.expert_bytes("bf16"))
        source = SyntheticRouting(preset_for(model.name, *shape), settings.seed)
    elif settings.routing.endswith(".toml"):
        source = SyntheticRouting(load_preset(Path(settings.routing)), settings.seed)
    else:
        source = RoutingFile(settings.routing)
    meta = source.meta
    found = {"layers": meta.layers, "experts": meta.experts, "top_k": meta.top_k}
    wanted = {"layers": model.layers, "experts": model.experts, "top_k": model.top_k}
    if found != wanted:
        differing = ", ".join(
            f"{name} {found[name]} against {wanted[name]}" for name in found if found[name] != wanted[name]
        )
        raise SettingError(
            f"--routing {settings.routing} is of {meta.model}, whose shape is not that of --model "
            f"{model.name}: {differing}. Give routing and model that belong together."
        )
    return source


def _sizes(
    system: System, sizes: Mapping[str, int], model: ModelSpec, settings: RunSettings
) -> Mapping[str, int]:
    """The cache sizes that a system runs with: one that holds all experts does so anyway, and runs once."""
    return {"all": whole_model_bytes(model, settings.expert_dtype)} if system.preload == "all" else sizes


def _cells(
    system: System,
    expert_cache: str,
    expert_cache_bytes: int,
    profile: HardwareProfile,
    served: Mapping[float | None, RequestSelection],
    model: ModelSpec,
    settings: RunSettings,
    inactive: Mapping[str, str],
) -> list[SimulatedCell]:
    """One system, cache size and machine at every rate."""
    memory = None
    longest = next(iter(served.values())).longest_tokens  # rates change no length
    problem = f"INACTIVE: {inactive[system.name]}" if inactive[system.name] else ""
    try:
        if not problem:
            memory = plan_memory(
                model,
                settings.expert_dtype,
                profile,
                expert_cache_bytes,
                min_kv_tokens=longest,
                dense=settings.dense,
            )
    except CapacityError as error:
        problem = f"DOES NOT FIT: {error}"
    return [
        SimulatedCell(
            system=system,
            expert_cache=expert_cache,
            expert_cache_bytes=expert_cache_bytes,
            hardware=profile.name,
            profile=profile,
            rate_per_s=rate,
            requests=requests,
            memory=memory,
            problem=problem,
        )
        for rate, requests in served.items()
    ]


def _inactive(system: System, routing: RoutingSource, served: Requests, settings: RunSettings) -> str:
    """Why the system cannot run with this routing; empty where it can."""
    meta = routing.meta
    if system.preload == "popular" and not settings.offline and not sample_of(routing, served):
        return "every request of the routing is served, so there is none to measure popularity on beforehand"
    return system.inactive(
        recorded=meta.speculation, layers=meta.layers, prefetch_distance=settings.prefetch_distance or 1
    )

"""Turn settings into everything a grid of runs needs, and refuse what cannot run before anything is run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..calibration.profile import HardwareProfile, load_machine
from ..errors import CapacityError, SettingError
from ..policy.models import ModelSpec, load_model_spec
from ..policy.system import System
from ..policy.systems import find_systems
from ..serving.results import cell_name
from ..traces.requests import Request, RequestTrace, open_requests, select_requests
from ..traces.routing import RoutingSource
from ..traces.routing_file import RoutingFile
from ..traces.routing_preset import load_preset, preset_for
from ..traces.synthetic import SyntheticRouting
from .memory import MemoryPlan, parse_cache_size, plan_memory, whole_model_bytes
from .popularity import sample_of
from .settings import RunSettings

TRAINING_SHARE = 0.7  # paper §6.1: 70 % of the data fill the store, 30 % are served
_SPLIT_STREAM = 1  # keeps the offline split's draws apart from other uses of the run's seed


@dataclass(frozen=True)
class Cell:
    """One run of the grid. `memory` is None, and `problem` is its status, where it cannot run."""

    system: System
    expert_cache: str
    expert_cache_bytes: int
    memory: MemoryPlan | None
    problem: str = ""

    @property
    def name(self) -> str:
        """Name of the cell's folder."""
        return cell_name(self.system.name, self.expert_cache)


@dataclass(frozen=True)
class Plan:
    """A grid of runs, ready to go. `settings` are resolved: the model's own defaults are filled in."""

    settings: RunSettings
    model: ModelSpec
    profile: HardwareProfile
    requests: list[Request]
    training: list[Request]
    routing: RoutingSource
    cells: tuple[Cell, ...]
    trace: Mapping[str, Any]  # what the results say of the request trace
    evidence: Mapping[str, Any]
    warnings: tuple[str, ...]


def make_plan(settings: RunSettings) -> Plan:
    """Read model, profile, traces and systems, and split the memory of every cell.

    Raises InputError for what cannot be used, and CapacityError when no cell fits.
    """
    systems = find_systems(settings.policy)
    model = load_model_spec(settings.model)
    profile = load_machine(
        settings.hardware,
        settings.set,
        host_memory=settings.host_memory,
        peer_needed=settings.peer_link == "nvlink",
    )
    if settings.prefetch_distance is None:
        settings = msgspec.structs.replace(settings, prefetch_distance=model.prefetch_distance)
    sizes = {text: parse_cache_size(text, model, settings.expert_dtype) for text in settings.expert_cache}
    trace = open_requests(settings.trace, sort=settings.sort)
    selected = _select(trace, settings)
    requests, training = _split(selected, settings)
    if settings.warmup >= len(requests):
        raise SettingError(
            f"--warmup is {settings.warmup}, but {len(requests)} requests are served: none would be counted. "
            "Give a smaller number."
        )
    routing = _routing(settings, model)
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    inactive = {
        system.name: _inactive(system, routing, {request.index for request in requests}, settings)
        for system in systems
    }
    cells = _cells(systems, sizes, model, profile, settings, longest, inactive)
    return Plan(
        settings=settings,
        model=model,
        profile=profile,
        requests=requests,
        training=training,
        routing=routing,
        cells=cells,
        trace=_describe(trace, requests, training),
        evidence=_evidence(settings, trace, routing, profile, model),
        warnings=tuple(dict.fromkeys(text for cell in cells if cell.memory for text in cell.memory.warnings)),
    )


def _select(trace: RequestTrace, settings: RunSettings) -> list[Request]:
    return list(
        select_requests(
            trace,
            num_requests=None if settings.num_requests == "all" else settings.num_requests,
            start=settings.start,
            time_scale=settings.time_scale,
            rate=settings.rate,
            prompt_tokens=settings.prompt_tokens,
            output_tokens=settings.output_tokens,
        )
    )


def _split(selected: list[Request], settings: RunSettings) -> tuple[list[Request], list[Request]]:
    """Requests that are served, and those that fill the store first; both in order of the trace."""
    if not settings.offline:
        return selected, []
    count = int(TRAINING_SHARE * len(selected))
    rng = np.random.default_rng([settings.seed, _SPLIT_STREAM])
    chosen = set(rng.permutation(len(selected))[:count].tolist())
    served = [request for place, request in enumerate(selected) if place not in chosen]
    return served, [request for place, request in enumerate(selected) if place in chosen]


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


def _cells(
    systems: list[System],
    sizes: Mapping[str, int],
    model: ModelSpec,
    profile: HardwareProfile,
    settings: RunSettings,
    longest: int,
    inactive: Mapping[str, str],
) -> tuple[Cell, ...]:
    whole = whole_model_bytes(model, settings.expert_dtype)
    cells = []
    for system in systems:
        # A system that holds all experts does so whatever the cache size, so it runs once.
        caches = {"all": whole} if system.preload == "all" else sizes
        for text, size in caches.items():
            if inactive[system.name]:
                cells.append(Cell(system, text, size, None, f"INACTIVE: {inactive[system.name]}"))
                continue
            try:
                memory = plan_memory(
                    model, settings.expert_dtype, profile, size, min_kv_tokens=longest, dense=settings.dense
                )
                cells.append(Cell(system, text, size, memory))
            except CapacityError as error:
                cells.append(Cell(system, text, size, None, f"DOES NOT FIT: {error}"))
    by_folder: dict[str, Cell] = {}
    for cell in cells:
        other = by_folder.setdefault(cell.name, cell)
        if other is not cell:
            raise SettingError(
                f"--expert-cache {other.expert_cache!r} and {cell.expert_cache!r} would both be kept in the "
                f"folder {cell.name}. Write one of them differently, or leave it out."
            )
    if not any(cell.memory for cell in cells):
        what, _, why = cells[0].problem.partition(": ")
        if what == "INACTIVE":
            raise SettingError(f"--policy {cells[0].system.name} is INACTIVE with this routing: {why}.")
        raise CapacityError(why)
    return tuple(cells)


def _inactive(system: System, routing: RoutingSource, served: set[int], settings: RunSettings) -> str:
    """Why the system cannot run with this routing; empty where it can."""
    meta = routing.meta
    if system.preload == "popular" and not settings.offline and not sample_of(routing, served):
        return "every request of the routing is served, so there is none to measure popularity on beforehand"
    return system.inactive(
        recorded=meta.speculation, layers=meta.layers, prefetch_distance=settings.prefetch_distance or 1
    )


def _describe(trace: RequestTrace, requests: list[Request], training: list[Request]) -> dict[str, Any]:
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    count = len(requests)
    return {
        "path": str(trace.path),
        "format": trace.format,
        "synthetic": trace.synthetic,
        "requests": count,
        "training_requests": len(training),
        "first_request": requests[0].index,
        "span_s": span_s,
        "rate_per_s": (count - 1) / span_s if span_s > 0 else None,
        "prompt_tokens_mean": sum(request.prompt_tokens for request in requests) / count,
        "output_tokens_mean": sum(request.output_tokens for request in requests) / count,
    }


def _evidence(
    settings: RunSettings,
    trace: RequestTrace,
    routing: RoutingSource,
    profile: HardwareProfile,
    model: ModelSpec,
) -> dict[str, Any]:
    """Where the figures come from: the labels of every input."""
    changed = [
        name for name in ("rate", "prompt_tokens", "output_tokens") if getattr(settings, name) is not None
    ]
    if settings.time_scale != 1:
        changed.append("time_scale")
    hardware = defaultdict(list)
    for name, (_, _, label, _) in profile.evidence().items():
        hardware[label].append(name)
    prefill = {"derived": "DERIVED", "none": "absent"}.get(routing.meta.prefill)
    return {
        "figures": "SIMULATED",
        "trace": "SYNTHETIC" if trace.synthetic else "RECORDED",
        "trace_changed_by": changed,
        "routing": routing.meta.source.upper(),
        "routing_notes": routing.meta.notes,
        "routing_prefill": prefill or routing.meta.source.upper(),
        "hardware": dict(sorted(hardware.items())),
        "hardware_sources": {
            profile.name: {
                name: f"{value:g}{'' if unit == '1' else ' ' + unit} {label}: {source}"
                for name, (value, unit, label, source) in profile.evidence().items()
            }
        },
        "prefetch_distance": model.prefetch_distance_evidence
        if "prefetch_distance" in settings.assumed
        else "given",
        "model_notes": list(model.notes),
        "assumed": list(settings.assumed),
    }

"""Turn settings into a grid of real runs, and refuse what cannot run before any weight is read."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import transformers

from ..errors import SettingError
from ..policy.core import Options, total_slots
from ..policy.systems import find_systems, is_group
from ..serving.grid import Cell, named_cells, refuse_unless_any_runs
from ..serving.selection import check_warmup, describe_trace, select, trace_evidence
from ..traces.requests import RequestSelection, open_requests
from .devices import parse_devices
from .forward import check_attention
from .history import open_history
from .load import DEFAULT_DISTANCE, Checkpoint, cache_warning, model_options, read_checkpoint
from .prompt_tokens import PromptTokens
from .runnable import why_not

if TYPE_CHECKING:
    from ..policy.system import System
    from ..serving.selection import Requests
    from ..serving.settings import RunSettings


class RealMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell takes for experts, and the tokens that its KV cache may grow to."""

    expert_bytes: int
    slots_per_device: int
    slots: int  #: over all devices
    expert_slot_bytes: int
    max_kv_tokens: int


@dataclass(frozen=True, kw_only=True)
class RealCell(Cell):
    """One run of a real grid. `options` of its core are None where it cannot run."""

    memory: RealMemory | None = None
    options: Options | None = None

    def sizes(self) -> dict[str, int]:
        """See `Cell`."""
        memory = self.memory
        if memory is None:
            return {}
        return {
            "slots": memory.slots,
            "per\ndevice": memory.slots_per_device,
            "expert\nGB": memory.expert_slot_bytes,
            "KV\ntokens": memory.max_kv_tokens,
        }


@dataclass(frozen=True)
class RealPlan:
    """A grid of real runs, ready to go."""

    settings: RunSettings
    checkpoint: Checkpoint
    devices: list[torch.device]
    prompts: PromptTokens
    cells: tuple[RealCell, ...]
    trace: Mapping[str, Any]
    evidence: Mapping[str, Any]
    warnings: tuple[str, ...]
    training: Requests = ()

    @property
    def machines(self) -> Mapping[str, str]:
        """Name of the backend → what it runs on."""
        return {self.settings.backend: self.evidence["machine"]}


def make_plan(settings: RunSettings) -> RealPlan:
    """Read trace, prompts, systems and the checkpoint's index.

    Raises InputError for what cannot be used.
    """
    devices = parse_devices(settings.backend)
    systems = _systems(settings)
    checkpoint = read_checkpoint(Path(settings.model))
    check_attention(checkpoint.config.get_text_config())
    if settings.prefetch_distance is None:
        settings = msgspec.structs.replace(settings, prefetch_distance=DEFAULT_DISTANCE)
    trace = open_requests(settings.trace, sort=settings.sort)
    served = select(trace, settings)
    requests = next(iter(served.values()))
    check_warmup(settings, len(requests))
    _check_lengths(requests, checkpoint)
    if settings.offline:
        served = dict.fromkeys(served, requests)
    if settings.history is not None:
        moe = checkpoint.moe
        open_history(settings.history, (len(moe.layers), moe.num_experts, moe.top_k), checkpoint.hidden_size)
    prompts = PromptTokens.read(
        checkpoint.folder,
        None if settings.prompts is None else Path(settings.prompts),
        len(requests),
        int(checkpoint.config.get_text_config().vocab_size),
    )
    cells = named_cells(
        [
            _cell(system, text, rate, chosen, checkpoint, len(devices), settings, systems[system.name][1])
            for system in (system for system, _ in systems.values())
            for text in _sizes(system, settings)
            for rate, chosen in served.items()
        ]
    )
    refuse_unless_any_runs(cells, "on a real model")
    warnings = dict.fromkeys(text for cell in cells if cell.options for text in cache_warning(cell.options))
    return RealPlan(
        settings=settings,
        checkpoint=checkpoint,
        devices=devices,
        prompts=prompts,
        cells=cells,
        trace=describe_trace(trace, served, ()),
        evidence=_evidence(settings, checkpoint, devices) | trace_evidence(settings, trace),
        warnings=tuple(warnings),
    )


def _systems(settings: RunSettings) -> dict[str, tuple[System, str]]:
    """The systems by name, each with the reason why it is INACTIVE. SettingError for one that is asked for by
    name and cannot run on any real model."""
    found = {}
    for name in settings.policy:
        for system in find_systems((name,)):
            reason = why_not(system)
            if reason and not is_group(name):
                raise SettingError(f"--policy {system.name} cannot run on a real model: {reason}.")
            if not reason and system.preload == "popular" and settings.history is None:
                reason = "it must know which experts are popular; give --history"
            found[system.name] = (system, reason)
    find_systems(settings.policy)  # two policies of one name
    return found


def _sizes(system: System, settings: RunSettings) -> tuple[str, ...]:
    """The cache sizes that a system runs with: one that holds all experts does so anyway, and runs once."""
    return ("all",) if system.preload == "all" else settings.expert_cache


def _cell(
    system: System,
    expert_cache: str,
    rate: float | None,
    requests: RequestSelection,
    checkpoint: Checkpoint,
    devices: int,
    settings: RunSettings,
    reason: str,
) -> RealCell:
    layers, experts = len(checkpoint.moe.layers), checkpoint.moe.num_experts
    slab_bytes = checkpoint.layout.slab_bytes
    size = "1.0" if expert_cache == "all" else expert_cache
    cache_bytes, slots = checkpoint.cache(size, devices, "--expert-cache")
    distance = settings.prefetch_distance or DEFAULT_DISTANCE
    reason = reason or system.inactive(
        recorded=tuple(range(1, layers)), layers=layers, prefetch_distance=distance
    )
    options = memory = None
    if not reason:
        options = model_options(
            system,
            checkpoint,
            devices,
            slots,
            prefetch_distance=distance,
            store_capacity=settings.store_capacity,
            frequency=settings.frequency,
            frequency_decay=settings.frequency_decay,
            rank_prefill_by_tokens=settings.rank_prefill_by_tokens,
            preempt_scope=settings.preempt_scope,
            seed=settings.seed,
        )
        held = total_slots(layers, experts, devices, slots)
        memory = RealMemory(
            expert_bytes=slab_bytes,
            slots_per_device=slots,
            slots=held,
            expert_slot_bytes=held * slab_bytes,
            max_kv_tokens=requests.longest_tokens * (1 if settings.offline else settings.max_num_seqs),
        )
    return RealCell(
        system=system,
        expert_cache=expert_cache,
        expert_cache_bytes=cache_bytes,
        hardware=settings.backend,
        rate_per_s=rate,
        requests=requests,
        memory=memory,
        options=options,
        problem=f"INACTIVE: {reason}" if reason else "",
    )


def _check_lengths(requests: RequestSelection, checkpoint: Checkpoint) -> None:
    """Raise SettingError for a request beyond the positions that the model knows."""
    most = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
    if most is None or requests.longest_tokens - 1 <= most:
        return
    index = next(r.index for r in requests if r.prompt_tokens + r.output_tokens - 1 > most)
    raise SettingError(
        f"request {index} of {requests.trace.path} has more tokens than the {most} positions of "
        f"{checkpoint.folder}. Choose others with --start and --num-requests, or give --prompt-tokens and "
        "--output-tokens."
    )


def _evidence(settings: RunSettings, checkpoint: Checkpoint, devices: list[torch.device]) -> dict[str, Any]:
    prompts = settings.prompts or "our own"
    return {
        "figures": "MEASURED",
        "routing": "RECORDED",
        "routing_notes": f"by this run, with prompts {prompts}, cut or repeated to the trace's lengths",
        "routing_prefill": "RECORDED",
        "hardware": {},
        "machine": _machine(devices),
        "prefetch_distance": "ASSUMED" if "prefetch_distance" in settings.assumed else "given",
        "model": f"{checkpoint.folder.resolve().name}: {checkpoint.moe.family}, {checkpoint.layout.dtype}",
        "assumed": list(settings.assumed),
    }


def _machine(devices: list[torch.device]) -> str:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if devices[0].type == "cuda":
        names = ", ".join(torch.cuda.get_device_name(device) for device in devices)
        return f"{names}; {versions}"
    return f"{_processor()}, {torch.get_num_threads()} threads of torch; {versions}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

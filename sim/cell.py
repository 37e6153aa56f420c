"""One cell of a simulated grid: what it is made of, its memory split and core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SettingError
from ..policy.core import Options, core_options
from .memory import plan_memory, whole_model_bytes

if TYPE_CHECKING:
    from ..calibration.profile import HardwareProfile
    from ..policy.models import ExpertDtype, ModelSpec
    from ..policy.system import System
    from ..serving.selection import Requests
    from ..serving.settings import RunSettings
    from ..traces.routing import RoutingSource
    from .memory import MemoryPlan


@dataclass(frozen=True)
class CellInputs:
    """Everything one cell of the grid is made of. `training` fills the store of an offline run."""

    model: ModelSpec
    expert_dtype: ExpertDtype
    profile: HardwareProfile
    system: System
    expert_cache_bytes: int
    requests: Requests
    training: Requests
    routing: RoutingSource
    settings: RunSettings
    longest_tokens: int | None = None  # prompt and output of one request at most; None: look


def plan_cell(inputs: CellInputs) -> MemoryPlan:
    """The cell's memory split; CapacityError or SettingError where it cannot run."""
    cache = (
        whole_model_bytes(inputs.model, inputs.expert_dtype)
        if inputs.system.preload == "all"
        else inputs.expert_cache_bytes
    )
    longest = inputs.longest_tokens
    if longest is None:
        longest = max((r.prompt_tokens + r.output_tokens for r in inputs.requests), default=1)
    return plan_memory(
        inputs.model,
        inputs.expert_dtype,
        inputs.profile,
        cache,
        min_kv_tokens=longest,
        dense=inputs.settings.dense,
    )


def cell_options(inputs: CellInputs, plan: MemoryPlan) -> Options:
    """The policy core's configuration for the cell."""
    model, settings = inputs.model, inputs.settings
    meta = inputs.routing.meta
    if (meta.layers, meta.experts, meta.top_k) != (model.layers, model.experts, model.top_k):
        raise SettingError(
            f"the routing is of {meta.model} ({meta.layers} layers x {meta.experts} experts, "
            f"top-{meta.top_k}), the model is {model.name} ({model.layers} x {model.experts}, "
            f"top-{model.top_k}). "
            "Give --model or --routing that belong together."
        )
    return core_options(
        inputs.system,
        layers=model.layers,
        experts=model.experts,
        top_k=model.top_k,
        devices=inputs.profile.devices,
        slots_per_device=plan.slots_per_device,
        expert_bytes=plan.expert_bytes,
        prefetch_distance=settings.prefetch_distance or model.prefetch_distance,
        store_capacity=settings.store_capacity,
        embedding_width=meta.embedding_width,
        embedding_work=model.hidden_size,
        frequency=settings.frequency,
        frequency_decay=settings.frequency_decay,
        rank_prefill_by_tokens=settings.rank_prefill_by_tokens,
        preempt_scope=settings.preempt_scope,
        seed=settings.seed,
    )


def inactive_notes(inputs: CellInputs, slots: int, layer_quota: int) -> tuple[str, ...]:
    """Mechanisms of the system that the routing gives no signal for, or the cache no room."""
    notes = []
    if inputs.system.semantic and inputs.routing.meta.embedding_width == 0:
        notes.append("semantic: INACTIVE (the routing has no embeddings)")
    if inputs.system.layer_cache and layer_quota == 0:
        model = inputs.model
        notes.append(
            f"layer cache: INACTIVE ({slots} expert slots are fewer than one for each of {model.layers} "
            f"layers and {model.top_k} to stage in: one LRU for all layers instead). "
            f"Give {model.layers + model.top_k}slots or more."
        )
    if inputs.system.preload == "popular":
        notes.append("static: its experts are on the devices before the run; other systems start cold")
    return tuple(notes)

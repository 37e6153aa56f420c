"""Small models, machines and requests, and random worlds of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...calibration.profile import HardwareProfile, load_profile
from ...serving.outcome import CellOutcome
from ...serving.settings import RunSettings
from ...sim.cell import CellInputs
from ...sim.world import run_cell
from ...traces.requests import Request
from ..models import ModelSpec
from ..system import System
from ..systems import find_system
from .routing import ListedRouting, MadeRouting, spliced

if TYPE_CHECKING:
    import pyarrow as pa

_BASE = load_profile("rtx3090")


def small_model(layers: int, experts: int, top_k: int) -> ModelSpec:
    """A model whose experts have 1,000,000 bytes in bf16."""
    return ModelSpec(
        name="small",
        layers=layers,
        experts=experts,
        top_k=top_k,
        hidden_size=16,
        expert_intermediate_size=8,
        expert_parameters=500_000,
        dense_parameters=1_000_000,
        decoder_layers=layers,
        moe_layer_parameters=200_000,
        dense_layer_parameters=0,
        embedding_parameters=10_000,
        head_parameters=10_000,
        tied_head=False,
        attention_pair_flops=64,
        kv_bytes_per_token=100 * layers,
        prefetch_distance=1,
        prefetch_distance_evidence="ASSUMED",
        source="made for tests",
    )


def small_machine(devices: int = 1, **changes: float | None) -> HardwareProfile:
    """A machine whose link takes 0.11 ms for one of `small_model`'s experts; so do its layers."""
    figures: dict[str, float | None] = {
        "devices": devices,
        "memory_bandwidth": 1e10,
        "memory_efficiency": 1.0,
        "peak_flops": 1e13,
        "flops_efficiency": 1.0,
        "kernel_launch_s": 1e-6,
        "link_latency_s": 1e-5,
        "link_bandwidth": 1e10,
        "link_chunk_bytes": 100_000,
        "copy_slowdown": 1.0,
        "host_bandwidth": None,
        "search_latency_s": 1e-5,
        "search_rate": 1e9,
    }
    if devices > 1:
        figures |= {"peer_latency_s": 1e-5, "peer_bandwidth": 1e10}
    return msgspec.structs.replace(_BASE, **(figures | changes))


def cell(
    system: str | System,
    model: ModelSpec,
    profile: HardwareProfile,
    routing: MadeRouting | ListedRouting,
    requests: Sequence[Request],
    *,
    slots: int,
    training: Sequence[Request] = (),
    settings: Mapping[str, object],
) -> CellInputs:
    """One cell with `slots` expert slots over all devices; all decisions are logged by default."""
    chosen = {"trace": "made", "decisions": "all", "prefetch_distance": 1, "store_capacity": 8}
    return CellInputs(
        model=model,
        expert_dtype="bf16",
        profile=profile,
        system=find_system(system) if isinstance(system, str) else system,
        expert_cache_bytes=slots * model.expert_bytes("bf16"),
        requests=requests,
        training=training,
        routing=routing,
        settings=msgspec.convert({**chosen, **settings}, RunSettings),
    )


def serve(inputs: CellInputs) -> CellOutcome:
    """Run the cell."""
    return run_cell(inputs, lambda progress: None)


def decisions_of(outcome: CellOutcome) -> pa.Table:
    """The outcome's decision log."""
    assert outcome.decisions is not None
    return outcome.decisions


def with_another_future(inputs: CellInputs, request: int, first: int) -> CellInputs:
    """The same cell, but iteration `first` of a request and those after it are routed otherwise."""
    routings = []
    for served in inputs.requests:
        distances = inputs.routing.meta.speculation
        lengths = served.prompt_tokens, served.output_tokens
        routing = inputs.routing.routing_for(served.index, *lengths, distances)
        if served.index == request:
            model = inputs.model
            other = MadeRouting(model, embedding_width=inputs.routing.meta.embedding_width, seed=12345)
            routing = spliced(routing, other.routing_for(request, *lengths, distances), first)
        routings.append(routing)
    return replace(inputs, routing=ListedRouting(inputs.routing.meta, routings, inputs.routing))


@dataclass(frozen=True)
class World:
    """Everything about a cell but its system."""

    layers: int
    experts: int
    top_k: int
    devices: int
    slots: int
    distance: int
    capacity: int
    embedding_width: int
    max_num_seqs: int
    token_budget: int
    offline: bool
    frequency: str
    frequency_decay: float
    preempt_scope: str
    bandwidth: float
    search_rate: float
    copy_slowdown: float
    host_slots: int | None  # experts that host memory holds, the others being on an SSD; None: all
    host_bandwidth: float | None
    dense: str
    peer_link: str
    requests: tuple[Request, ...]
    seed: int

    def cell(self, system: str | System) -> CellInputs:
        """With that system."""
        model = small_model(self.layers, self.experts, self.top_k)
        host: dict[str, float | None] = {"host_bandwidth": self.host_bandwidth}
        if self.host_slots is not None:
            host["host_memory_bytes"] = self.host_slots * model.expert_bytes("bf16")
            host |= {"ssd_latency_s": 2e-5, "ssd_bandwidth": 2e9}
        return cell(
            system,
            model,
            small_machine(
                self.devices,
                link_bandwidth=self.bandwidth,
                search_rate=self.search_rate,
                copy_slowdown=self.copy_slowdown,
                **host,
            ),
            MadeRouting(model, embedding_width=self.embedding_width, seed=self.seed),
            self.requests,
            slots=self.slots,
            settings={
                "prefetch_distance": self.distance,
                "store_capacity": self.capacity,
                "max_num_seqs": self.max_num_seqs,
                "token_budget": self.token_budget,
                "offline": self.offline,
                "frequency": self.frequency,
                "frequency_decay": self.frequency_decay,
                "preempt_scope": self.preempt_scope,
                "dense": self.dense,
                "peer_link": self.peer_link,
            },
        )


def random_world(rng: np.random.Generator) -> World:
    """A world that runs in a few milliseconds."""

    def choice(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    def between(least: int, most: int) -> int:
        return int(rng.integers(least, most + 1))

    layers, experts = between(1, 4), between(2, 8)
    devices = between(1, min(3, layers * experts))
    arrivals = sorted(choice(0.0, float(rng.uniform(0.0, 0.01))) for _ in range(between(1, 4)))
    return World(
        layers=layers,
        experts=experts,
        top_k=between(1, experts),
        devices=devices,
        slots=between(devices, layers * experts),
        distance=between(1, layers + 1),
        capacity=between(1, 6),
        embedding_width=choice(0, 3),
        max_num_seqs=between(1, 3),
        token_budget=choice(1, 10, 1000),
        offline=choice(False, True),
        frequency=choice("run", "residency"),
        frequency_decay=choice(1.0, 0.9),
        preempt_scope=choice("device", "all"),
        bandwidth=choice(1e9, 1e10, 1e11),
        search_rate=choice(1e5, 1e9),
        copy_slowdown=choice(1.0, 1.25),
        host_slots=choice(None, between(devices, layers * experts)),
        host_bandwidth=choice(None, 1.5e10),
        dense=choice("device0", "replicated"),
        peer_link=choice("nvlink", "pcie"),
        requests=tuple(
            Request(index, arrival_s - arrivals[0], between(1, 12), between(1, 6))
            for index, arrival_s in enumerate(arrivals)
        ),
        seed=between(0, 99),
    )

"""Small models, machines, routing and requests for tests of the simulated world."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from finemoe.calibration.profile import HardwareProfile, load_profile
from finemoe.policy.core import Options
from finemoe.policy.models import ModelSpec
from finemoe.policy.systems import find_system
from finemoe.sim.settings import RunSettings
from finemoe.sim.world import CellInputs, CellOutcome, run_cell
from finemoe.traces.requests import Request
from finemoe.traces.routing import RequestRouting, RoutingMeta, RoutingSource
from hypothesis import strategies as st

_BASE = load_profile("rtx3090")


def plain_options(
    *, layers: int, experts: int, top_k: int, slots_per_device: int, **others: int | float | str | bool
) -> Options:
    """A core's options: one device, experts of one byte, demand loads only, LRU; `others` wins."""
    return {
        "layers": layers,
        "experts": experts,
        "top_k": top_k,
        "devices": 1,
        "slots_per_device": slots_per_device,
        "expert_bytes": 1,
        "predictor": "none",
        "semantic": False,
        "trajectory": False,
        "targets": "distance",
        "popular_start": False,
        "selector": "delta",
        "priority": "distance",
        "prefetch_distance": 1,
        "store_capacity": 1,
        "embedding_width": 0,
        "embedding_work": 0,
        "eviction": "lru",
        "frequency": "run",
        "frequency_decay": 1.0,
        "rank_prefill_by_tokens": False,
        "load_shape": "expert",
        "layer_quota": 0,
        "search_blocks": False,
        "prefetch_blocks": False,
        "preempt_scope": "device",
        **others,
    }


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


class MadeRouting:
    """Random routing: the same for a request's number and lengths, whoever asks and in whatever order."""

    def __init__(self, model: ModelSpec, *, embedding_width: int = 0, seed: int = 0) -> None:
        self._seed = seed
        self.meta = RoutingMeta(
            model=model.name,
            layers=model.layers,
            experts=model.experts,
            top_k=model.top_k,
            expert_bytes=model.expert_bytes("bf16"),
            embedding_width=embedding_width,
            source="synthetic",
            gate_content="full",
            speculation=tuple(range(1, model.layers)),
        )

    def remarks(self) -> tuple[str, ...]:
        return ()

    def others(self, served: Collection[int], count: int) -> list[int]:
        """Numbers beyond those served."""
        return list(range(max(served) + 1, max(served) + 1 + count))

    def routing_for(
        self, request: int, prompt_tokens: int, output_tokens: int, speculation: tuple[int, ...] = ()
    ) -> RequestRouting:
        """Peaked rows; a decode iteration activates its top K, the prompt's tokens K random experts each."""
        meta = self.meta
        rng = np.random.default_rng([self._seed, request])
        gate = np.exp(2.0 * rng.standard_normal((output_tokens, meta.layers, meta.experts)))
        gate = (gate / gate.sum(axis=2, keepdims=True)).astype(np.float16)
        draws = rng.random((prompt_tokens, meta.layers, meta.experts)).argsort(axis=2)[:, :, : meta.top_k]
        prompt = [
            np.bincount(draws[:, layer].ravel(), minlength=meta.experts) for layer in range(meta.layers)
        ]
        width = meta.embedding_width
        embedding = rng.standard_normal((output_tokens, width)).astype(np.float16) if width else None
        made = routing_of(gate, prompt, meta.top_k, embedding)
        return replace(made, speculation={d: self._guesses(request, gate, d) for d in speculation})

    def _guesses(self, request: int, gate: npt.NDArray[np.float16], distance: int) -> npt.NDArray[np.float16]:
        """Rows of `distance` layers ahead, a third of each drawn at random; 0 for the last layers."""
        rng = np.random.default_rng([self._seed, request, distance])
        guesses = np.zeros_like(gate)
        ahead = gate[:, distance:].astype(np.float32)
        guesses[:, : gate.shape[1] - distance] = (ahead * 2 + rng.random(ahead.shape) / gate.shape[2]) / 3
        return guesses


class ListedRouting:
    """Routing written out: one `RequestRouting` per request, whatever its lengths."""

    def __init__(
        self, meta: RoutingMeta, routings: Sequence[RequestRouting], rest: RoutingSource | None = None
    ) -> None:
        self.meta = meta
        self._routings = routings
        self._rest = rest  # where requests come from that are not served

    def remarks(self) -> tuple[str, ...]:
        return ()

    def others(self, served: Collection[int], count: int) -> list[int]:
        return [] if self._rest is None else self._rest.others(served, count)

    def routing_for(
        self, request: int, prompt_tokens: int, output_tokens: int, speculation: tuple[int, ...] = ()
    ) -> RequestRouting:
        """The request's own."""
        if request >= len(self._routings) and self._rest is not None:
            return self._rest.routing_for(request, prompt_tokens, output_tokens, speculation)
        return self._routings[request]


def routing_of(
    gate: npt.NDArray[np.float16],
    prompt_counts: Sequence[npt.NDArray[np.int64]],
    top_k: int,
    embedding: npt.NDArray[np.float16] | None,
) -> RequestRouting:
    """Gate rows [n, L, J] with the prompt's token counts per layer [J]; decode activates each row's top K."""
    iterations, layers, _ = gate.shape
    top = np.sort(np.argsort(-gate[1:], axis=2, kind="stable")[:, :, :top_k], axis=2)
    experts = [np.flatnonzero(counts) for counts in prompt_counts] + list(top.reshape(-1, top_k))
    counts = [c[c > 0] for c in prompt_counts] + [np.ones(top_k, np.int64)] * ((iterations - 1) * layers)
    return RequestRouting(
        gate=gate,
        experts=np.concatenate(experts).astype(np.uint16),
        token_counts=np.concatenate(counts).astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum([len(part) for part in experts]))).astype(np.int64),
        embedding=embedding,
        speculation={},
    )


def cell(
    system: str,
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
        system=find_system(system),
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


@dataclass(frozen=True)
class Shape:
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

    def cell(self, system: str) -> CellInputs:
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


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Shapes that run in a few milliseconds."""
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    devices = draw(st.integers(1, min(3, layers * experts)))
    arrivals = sorted(draw(st.lists(st.floats(0.0, 0.01), min_size=1, max_size=4)))
    return Shape(
        layers=layers,
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        devices=devices,
        slots=draw(st.integers(devices, layers * experts)),
        distance=draw(st.integers(1, layers + 1)),
        capacity=draw(st.integers(1, 6)),
        embedding_width=draw(st.sampled_from([0, 3])),
        max_num_seqs=draw(st.integers(1, 3)),
        token_budget=draw(st.sampled_from([1, 10, 1000])),
        offline=draw(st.booleans()),
        frequency=draw(st.sampled_from(["run", "residency"])),
        frequency_decay=draw(st.sampled_from([1.0, 0.9])),
        preempt_scope=draw(st.sampled_from(["device", "all"])),
        bandwidth=draw(st.sampled_from([1e9, 1e10, 1e11])),
        search_rate=draw(st.sampled_from([1e5, 1e9])),
        copy_slowdown=draw(st.sampled_from([1.0, 1.25])),
        host_slots=draw(st.none() | st.integers(devices, layers * experts)),
        host_bandwidth=draw(st.sampled_from([None, 1.5e10])),
        dense=draw(st.sampled_from(["device0", "replicated"])),
        peer_link=draw(st.sampled_from(["nvlink", "pcie"])),
        requests=tuple(
            Request(index, arrival_s - arrivals[0], draw(st.integers(1, 12)), draw(st.integers(1, 6)))
            for index, arrival_s in enumerate(arrivals)
        ),
        seed=draw(st.integers(0, 99)),
    )

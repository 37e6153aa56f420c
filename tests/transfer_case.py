"""A small model of random bytes in files, and a forward pass that looks at the bytes it computes with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from finemoe._core import CpuArena, FileSource, HostSource, Source, TransferEngine, crc32c
from finemoe.policy.core import (
    CHUNK_OPEN,
    Core,
    Options,
    core_options,
    make_core,
    popular_experts,
)
from finemoe.policy.system import System
from finemoe.policy.systems import find_system

LAYERS, EXPERTS, TOP_K, WIDTH, TOTAL = 4, 8, 2, 6, 32
#: three pieces of a slab, a gap before the last
LENGTH = np.array([3000, 1001, 4099], np.int64)
PLACE = np.array([0, 3000, 4096], np.int64)
SLAB_BYTES = 8195
#: the expert whose second piece ends a file
LAST = 3


@dataclass
class Weights:
    """Random experts in files as their pieces lie there, and their slabs as they should arrive."""

    folder: Path
    files: int = 3
    seed: int = 1
    paths: list[str] = field(init=False)
    slabs: npt.NDArray[np.uint8] = field(init=False)  # [E, slab bytes], zeros in the gap
    file: npt.NDArray[np.int32] = field(init=False)
    offset: npt.NDArray[np.int64] = field(init=False)
    checksums: npt.NDArray[np.uint32] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.paths = [str(self.folder / f"experts-{i}.bin") for i in range(self.files)]
        self.slabs = np.zeros((TOTAL, SLAB_BYTES), np.uint8)
        self.file = random.integers(0, self.files, (TOTAL, len(LENGTH)), np.int32)
        self.offset = np.zeros((TOTAL, len(LENGTH)), np.int64)
        self.checksums = np.zeros(TOTAL, np.uint32)
        contents = [bytearray(random.bytes(17)) for _ in self.paths]
        order = random.permutation(TOTAL).tolist()
        order.append(order.pop(order.index(LAST)))
        for expert in order:
            for piece in (2, 0, 1):
                data = random.bytes(int(LENGTH[piece]))
                place = int(PLACE[piece])
                self.slabs[expert, place : place + len(data)] = np.frombuffer(data, np.uint8)
                at = contents[self.file[expert, piece]]
                self.offset[expert, piece] = len(at)
                at += data
            for piece in range(3):
                begin = int(PLACE[piece])
                part = self.slabs[expert, begin : begin + int(LENGTH[piece])]
                self.checksums[expert] = crc32c(part, int(self.checksums[expert]))
        for path, content in zip(self.paths, contents, strict=True):
            Path(path).write_bytes(content)

    def source(self, *, checked: bool = True, direct: bool = False) -> FileSource:
        checksums = self.checksums if checked else None
        return FileSource(self.paths, self.file, self.offset, LENGTH, PLACE, checksums, direct)

    def host_source(self) -> HostSource:
        return HostSource(self.slabs.ctypes.data, TOTAL, SLAB_BYTES, self.slabs)


def options_for(system: System, *, slots: int, devices: int = 1) -> Options:
    return core_options(
        system,
        layers=LAYERS,
        experts=EXPERTS,
        top_k=TOP_K,
        devices=devices,
        slots_per_device=slots,
        expert_bytes=SLAB_BYTES,
        prefetch_distance=2,
        store_capacity=8,
        embedding_width=WIDTH,
        embedding_work=WIDTH,
    )


class ForwardPass:
    """Iterations of random routing on a real engine; every chunk's bytes are compared with the model's."""

    def __init__(
        self,
        weights: Weights,
        source: Source,
        system: str = "finemoe",
        *,
        slots: int = 6,
        devices: int = 1,
        chunk_bytes: int = 1000,
        bandwidth: float | None = None,
        watchdog_s: float = 20.0,
        log: bool = True,
        seed: int = 0,
    ) -> None:
        self.weights, self.system, self.devices = weights, find_system(system), devices
        if self.system.preload == "all":
            slots = TOTAL
        self.options = options_for(self.system, slots=slots, devices=devices)
        self.core: Core = make_core(self.options, -1 if log else 0)
        self.memory: list[Any] = []  # per device [slots, SLAB_BYTES]
        arenas = [self._arena(device, min(slots, TOTAL)) for device in range(devices)]
        self.engine = TransferEngine(self.core, source, arenas, chunk_bytes, bandwidth, watchdog_s)
        self.random = np.random.default_rng(seed)
        self.iteration = self.compared = 0
        self.stall_s = 0.0
        if self.system.preload != "none":
            counts = self.random.integers(0, 9, (LAYERS, EXPERTS))
            popular = popular_experts(counts, devices=devices, slots_per_device=slots, top_k=TOP_K)
            self.engine.preload(popular)
        self.routing = self._routes()

    def _arena(self, device: int, slots: int) -> Any:
        """Makes a device's slots, in self.memory, and gives them as the engine wants them."""
        memory = np.zeros((slots, SLAB_BYTES), np.uint8)
        self.memory.append(memory)
        return CpuArena(memory.ctypes.data, slots, SLAB_BYTES, memory)

    def _routes(self) -> Iterator[npt.NDArray[np.float32]]:
        """Gate rows [L, 1, J] of each iteration: topics that last for some iterations, with noise."""
        while True:
            topic = self.random.dirichlet(np.full(EXPERTS, 0.3), (LAYERS, 1))
            for _ in range(5):
                noise = self.random.dirichlet(np.full(EXPERTS, 0.5), (LAYERS, 1))
                yield (0.7 * topic + 0.3 * noise).astype(np.float32)

    def iterate(self) -> None:
        core, engine = self.core, self.engine
        rows, embedding = next(self.routing), self.random.standard_normal((1, WIDTH)).astype(np.float32)
        chosen = np.sort(np.argsort(-rows[:, 0], axis=-1)[:, :TOP_K], axis=-1)
        if self.system.eviction == "belady":
            step = self.iteration * LAYERS
            required = [[layer * EXPERTS + j for j in js] for layer, js in enumerate(chosen.tolist())]
            engine.notify(core.foresight(step, required, engine.now()))
        begun = core.begin_iteration([(0, "decode", 1, True)], embedding, engine.now())
        self._told(begun)
        for layer in range(LAYERS):
            counts = np.bincount(chosen[layer], minlength=EXPERTS).astype(np.int32).reshape(1, -1)
            experts = chosen[layer].tolist()
            needs_rows = "activation" in (self.system.predictor, self.system.eviction)
            needs_rows |= self.system.predictor == "plugin"
            mask = core.gate(
                layer, rows[layer], experts, [1] * TOP_K, engine.now(), counts if needs_rows else None
            )
            self._told(mask)
            for target in self.system.speculated(layer, LAYERS, 2):
                mask = core.speculation(layer, target, rows[target], engine.now())
                self._told(mask)
            while mask & CHUNK_OPEN:
                mask = self._compute(layer)
            if self.system.prefetch_blocks:
                engine.wait_prefetches()
        self.iteration += 1
        finished = [0] if self.iteration % 7 == 0 else []
        self._told(core.end_iteration(engine.now(), finished))

    def _told(self, mask: int) -> None:
        self.engine.notify(mask)
        for command in self.core.take_forward():
            if command[0] == "WaitSearch":
                self.engine.wait_search(command[1])

    def _compute(self, layer: int) -> int:
        core, engine = self.core, self.engine
        if self.system.compute_order == "as_ready":
            ready = engine.wait_ready()
            for expert in ready:
                self._compare(expert, core.slot(expert))
            self._queued()
            mask = core.computed(layer, ready, engine.now())
        else:
            self.stall_s += engine.wait_chunk()
            experts, slots = core.chunk_slots()
            for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
                self._compare(expert, slot)
            self._queued()
            mask = core.computed_chunk(engine.now())
        self._told(mask)
        return mask

    def _compare(self, expert: int, slot: int) -> None:
        assert slot >= 0
        memory = self.memory[expert % self.devices][slot]
        for begin, length in zip(PLACE.tolist(), LENGTH.tolist(), strict=True):
            wanted = self.weights.slabs[expert, begin : begin + length]
            assert np.array_equal(memory[begin : begin + length], wanted), f"expert {expert} is not itself"
        self.compared += 1

    def _queued(self) -> None:
        """What computes with the chunk is over here; on a device it is only queued."""


Pass = TypeVar("Pass", bound=ForwardPass)


@contextmanager
def running(forward: Pass) -> Iterator[Pass]:
    """The engine started, and closed in the end."""
    forward.engine.start()
    try:
        yield forward
    finally:
        forward.engine.close()

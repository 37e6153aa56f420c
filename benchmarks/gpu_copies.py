"""What benchmarks/gpu.py measures without a model: copies by size, beside computing, and the engine's.

On the CPU the same code copies within host memory, so that it is run where there is no GPU; its figures then
mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from finemoe import _core
from finemoe.policy.core import core_options, make_core
from finemoe.policy.systems import find_system

Say = Callable[[str, str], None]  # a figure's name and value


def synchronize(device: str) -> None:
    """Until the device has computed everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def copy_rates(device: str, sizes: list[int], say: Say) -> None:
    """GB/s from pinned and from pageable host memory to the device, the median of some copies."""
    for pinned in (True, False):
        if pinned and device != "cuda":
            continue
        host = torch.ones(max(sizes), dtype=torch.uint8, pin_memory=pinned)
        target = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        for size in sizes:
            one = partial(_copy, target, host, size)
            repeats = max(3, min(50, (1 << 30) // size))
            seconds = [_timed(device, one) for _ in range(repeats + 1)][1:]
            name = f"copy, {'pinned' if pinned else 'pageable'}, {size / 2**20:g} MiB"
            say(name, f"{size / statistics.median(seconds) / 1e9:.2f} GB/s")


def overlap(device: str, size: int, width: int, say: Say) -> None:
    """A copy and matrix products at the same time, against each alone: hidden = (sum − both) / shorter."""
    host = torch.ones(size, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.zeros(size, dtype=torch.uint8, device=device)
    left = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    right = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    beside = torch.cuda.Stream() if device == "cuda" else None

    def copy() -> None:
        with torch.cuda.stream(beside) if beside is not None else nullcontext():
            _copy(target, host, size)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(left, right)

    copy_s = min(_timed(device, copy) for _ in range(4))
    compute(3)
    one_s = min(_timed(device, lambda: compute(10)) for _ in range(3)) / 10
    products = max(1, round(copy_s / one_s))

    def both() -> None:
        copy()
        compute(products)

    compute_s = min(_timed(device, lambda: compute(products)) for _ in range(4))
    both_s = min(_timed(device, both) for _ in range(4))
    hidden = (copy_s + compute_s - both_s) / min(copy_s, compute_s)
    say(
        "overlap: copy / compute / both", " / ".join(f"{s * 1e3:.2f} ms" for s in (copy_s, compute_s, both_s))
    )
    say("overlap: share of the shorter one that is hidden", f"{hidden:.0%}")


def engine_rates(device: str, slab_bytes: int, chunks: list[int], say: Say) -> None:
    """GB/s of the transfer engine's demand loads, one expert at a time, by the bytes of a chunk."""
    experts = 8
    source = _source(device, experts, slab_bytes)
    memory = torch.zeros(slab_bytes, dtype=torch.uint8, device=device)
    synchronize(device)
    for chunk in chunks:
        options = core_options(
            find_system("lru"),
            layers=1,
            experts=experts,
            top_k=1,
            devices=1,
            slots_per_device=1,
            expert_bytes=slab_bytes,
            prefetch_distance=1,
            store_capacity=1,
            embedding_width=0,
            embedding_work=0,
        )
        core = make_core(options)
        engine = _core.TransferEngine(core, source, [_arena(device, memory, slab_bytes)], chunk)
        engine.start()
        gate = np.full((1, experts), 1 / experts, np.float32)
        for expert in range(experts):
            engine.notify(core.begin_iteration([(0, "decode", 1, False)], None, engine.now()))
            engine.notify(core.gate(0, gate, [expert], [1], engine.now()))
            engine.wait_chunk()
            engine.notify(core.computed_chunk(engine.now()))
            engine.notify(core.end_iteration(engine.now(), []))
        figures = engine.statistics()["devices"][0]
        engine.close()
        say(
            f"engine, experts of {slab_bytes / 2**20:g} MiB in chunks of {chunk / 2**20:g} MiB",
            f"{figures['bytes'] / figures['busy_s'] / 1e9:.2f} GB/s",
        )


def _source(device: str, experts: int, slab_bytes: int) -> Any:
    if device == "cuda":
        pinned = _core.PinnedSlabs(experts, slab_bytes)
        if pinned.warning:
            raise RuntimeError(pinned.warning)
        return _core.HostSource(pinned.address, experts, slab_bytes, pinned, pinned.stride)
    slabs = np.ones((experts, slab_bytes), np.uint8)
    return _core.HostSource(slabs.ctypes.data, experts, slab_bytes, slabs)


def _arena(device: str, memory: Any, slab_bytes: int) -> Any:
    if device == "cuda":
        return _core.CudaArena(0, memory.data_ptr(), 1, slab_bytes, memory)
    return _core.CpuArena(memory.data_ptr(), 1, slab_bytes, memory)


def _copy(target: Any, host: Any, size: int) -> None:
    target[:size].copy_(host[:size], non_blocking=True)


def _timed(device: str, work: Callable[[], None]) -> float:
    """Seconds from an idle device to an idle device."""
    synchronize(device)
    began_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began_s

"""Experts on a device: what every CUDA test needs. On the CPU the same tests run, but for CUDA itself."""

from __future__ import annotations

from typing import Any

import pytest
from finemoe._core import CpuArena, CudaArena, HostSource, PinnedSlabs, cuda_problem
from transfer_case import LENGTH, PLACE, SLAB_BYTES, TOTAL, ForwardPass, Weights

torch = pytest.importorskip("torch", reason="torch is not installed (extra `real`)")

POISON = 0xEE
BUSY_CYCLES = 10_000_000  # of the GPU before each read: some 5 ms


def _why_no_cuda() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    return cuda_problem(0)


NEEDS_CUDA = pytest.mark.skipif(bool(_why_no_cuda()), reason=_why_no_cuda() or "CUDA is here")
DEVICES = ("cpu", pytest.param("cuda", marks=NEEDS_CUDA))


def pinned_source(weights: Weights, device: str, limit_bytes: int | None = None) -> Any:
    """The weights as slabs in host memory; pinned for CUDA."""
    if device == "cpu":
        return weights.host_source()
    pinned = PinnedSlabs(TOTAL, SLAB_BYTES, limit_bytes)
    pinned.slabs[:, :SLAB_BYTES] = weights.slabs
    return HostSource(pinned.address, TOTAL, SLAB_BYTES, pinned, pinned.stride)


class DevicePass(ForwardPass):
    """A forward pass that reads its slots late, on a busy device, and looks at what it read in the end.

    The slots are full of `POISON` at first. On CUDA each read of a slot waits on torch's stream behind
    `BUSY_CYCLES` of idling, while the host goes on: without order between reads and later copies into the
    slot it would see the next expert.
    """

    def __init__(
        self, weights: Weights, source: Any, system: str, device: str, *, ordered: bool = True, **options: Any
    ) -> None:
        self._device, self._ordered = device, ordered
        self._read: list[tuple[int, Any]] = []
        super().__init__(weights, source, system, **options)

    def _arena(self, device: int, slots: int) -> Any:
        memory = torch.full((slots, SLAB_BYTES), POISON, dtype=torch.uint8, device=self._device)
        self.memory.append(memory)
        if self._device == "cpu":
            return CpuArena(memory.data_ptr(), slots, SLAB_BYTES, memory)
        torch.cuda.synchronize()
        return CudaArena(device, memory.data_ptr(), slots, SLAB_BYTES, memory)

    def _compare(self, expert: int, slot: int) -> None:
        assert slot >= 0
        if self._device == "cuda":
            torch.cuda._sleep(BUSY_CYCLES)
        self._read.append((expert, self.memory[0][slot].clone()))
        self.compared += 1

    def _queued(self) -> None:
        if self._device == "cuda" and self._ordered:
            self.engine.record_compute(0, torch.cuda.current_stream().cuda_stream)

    def wrong(self) -> list[int]:
        """Experts in whose place something else was read."""
        found = []
        for expert, read in self._read:
            got, wanted = read.cpu().numpy(), self.weights.slabs[expert]
            pieces = zip(PLACE.tolist(), LENGTH.tolist(), strict=True)
            if any((got[begin : begin + n] != wanted[begin : begin + n]).any() for begin, n in pieces):
                found.append(expert)
        return found

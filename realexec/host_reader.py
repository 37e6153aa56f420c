"""Small tensors of the forward pass on the host, where the policy core is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostReader:
    """Brings tensors of one device to the host. On CUDA those of a call go in one copy into pinned memory,
    and the thread waits for that copy: neither for what was queued after it nor for other streams."""

    def __init__(self) -> None:
        #: seconds spent waiting for CUDA: for what comes before the tensors on their stream, and for the copy
        self.waited_s = 0.0
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def read(self, *tensors: Tensor) -> list[NDArray[Any]]:
        """The tensors as arrays of the same shape and dtype."""
        if not tensors[0].is_cuda:
            return [tensor.detach().numpy() for tensor in tensors]
        packed = pack(tensors)
        if len(self._pinned) < len(packed):
            self._pinned = torch.empty(2 * len(packed), dtype=torch.uint8, pin_memory=True)
        landed = self._pinned[: len(packed)]
        landed.copy_(packed, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(packed.device))
        began_s = time.perf_counter()
        arrived.synchronize()
        self.waited_s += time.perf_counter() - began_s
        return unpack(landed.numpy(), tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes, one after another: uint8 [n], on their device."""
    return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def unpack(packed: NDArray[np.uint8], like: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Arrays of their own of the bytes that `pack(like)` gave."""
    arrays, at = [], 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        arrays.append(np.frombuffer(packed[at : at + size].tobytes(), dtype).reshape(tensor.shape))
        at += size
    return arrays

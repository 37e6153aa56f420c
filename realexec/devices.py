"""Devices that a model runs on, and the expert slots on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from ..errors import CapacityError, SettingError
from ..policy.cache_size import bytes_text
from ..policy.core import owned_experts
from .experts_kernel import Arena

if TYPE_CHECKING:
    from ..policy.core import Options
    from .expert_layout import ExpertLayout


def parse_devices(given: str | Sequence[str]) -> list[torch.device]:
    """The devices of `device=`; SettingError for unknown ones, several CPUs, and CUDA where there is none."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise SettingError(f"device is {given!r}. Give cpu, cuda, or a list of CUDA devices.")
    devices = []
    for name in names:
        try:
            devices.append(torch.device(name))
        except (RuntimeError, TypeError):
            raise SettingError(f"device {name!r} is unknown. Give cpu, cuda, or cuda:N.") from None
    kinds = {device.type for device in devices}
    if not devices or kinds - {"cpu", "cuda"} or len(kinds) > 1 or (kinds == {"cpu"} and len(devices) > 1):
        raise SettingError(f"device is {given!r}. Give cpu, cuda, or a list of CUDA devices.")
    if kinds == {"cuda"}:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise SettingError("device cuda: torch sees no CUDA device here. Use cpu.")
        devices = [torch.device("cuda", device.index or 0) for device in devices]
        if max(device.index for device in devices) >= count or len(set(devices)) < len(devices):
            raise SettingError(f"device is {given!r}, but there are cuda:0 … cuda:{count - 1}, each once.")
    return devices


def make_arenas(layout: ExpertLayout, options: Options, devices: list[torch.device]) -> list[Arena]:
    """An arena per device; CapacityError where its memory does not suffice."""
    arenas = []
    for number, device in enumerate(devices):
        owned = owned_experts(int(options["layers"]), int(options["experts"]), len(devices), number)
        slots = min(int(options["slots_per_device"]), owned)
        try:
            arenas.append(Arena(layout, slots, device))
        except RuntimeError as error:  # also torch.OutOfMemoryError
            raise CapacityError(
                f"{device}: {slots} expert slots of {bytes_text(layout.slab_bytes)} cannot be allocated. "
                "Give a smaller expert_cache."
            ) from error
    return arenas


def engine_arena(arena: Arena) -> Any:
    """The same slots for the transfer engine."""
    memory = arena.memory
    if memory.is_cuda:
        return _core.CudaArena(memory.device.index, memory.data_ptr(), arena.slots, arena.slab_bytes, memory)
    return _core.CpuArena(memory.data_ptr(), arena.slots, arena.slab_bytes, memory)

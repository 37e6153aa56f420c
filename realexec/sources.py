"""Where experts are copied from: the checkpoint's files, or slabs in host memory."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import SettingError, TransferError
from ..policy.cache_size import parse_cache_size

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from .expert_layout import ExpertLayout


def file_source(layout: ExpertLayout, checksums: NDArray[np.uint32] | None, *, direct: bool) -> Any:
    """Experts in the checkpoint's files. SettingError for a file that cannot be opened or is too short."""
    try:
        return _core.FileSource(
            [str(path) for path in layout.files],
            layout.file,
            layout.offset,
            layout.length,
            layout.place,
            checksums,
            direct=direct,
            slab_bytes=layout.slab_bytes,
        )
    except TransferError as error:
        raise SettingError(str(error)) from error


def host_source(
    layout: ExpertLayout,
    checksums: NDArray[np.uint32] | None,
    device: torch.device,
    pinned_memory: str | None,
    *,
    progress: bool,
) -> Any:
    """All experts in host memory, read from the files once; pinned for CUDA as far as that is allowed."""
    from tqdm import tqdm

    experts = len(layout.file)
    slabs: NDArray[np.uint8]
    if device.type == "cuda":
        # Slabs are whole pages apart here, so "all of them" is more than their bytes.
        limit = None
        if pinned_memory is not None:
            limit = parse_cache_size(pinned_memory, experts, layout.slab_bytes, name="pinned_memory")
        pinned = _core.PinnedSlabs(experts, layout.slab_bytes, limit)
        if pinned.warning:
            warnings.warn(pinned.warning, stacklevel=3)
        slabs = pinned.slabs
        source = _core.HostSource(pinned.address, experts, layout.slab_bytes, pinned, pinned.stride)
    else:
        if pinned_memory is not None:
            raise SettingError("pinned_memory is for CUDA devices. Leave it out.")
        slabs = np.empty((experts, layout.slab_bytes), np.uint8)
        source = _core.HostSource(slabs.ctypes.data, experts, layout.slab_bytes, slabs)
    files = file_source(layout, checksums, direct=False)
    bar = tqdm(total=experts, desc="experts to host memory", disable=None if progress else True)
    with bar:
        for expert in range(experts):
            files.read(expert, slabs[expert])
            bar.update()
    return source

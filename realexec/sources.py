"""Where experts are copied from: the checkpoint's files, or slabs in host memory."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from ..errors import SettingError, TransferError
from ..policy.cache_size import parse_cache_size

if TYPE_CHECKING:
    import numpy as np
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
    if device.type == "cuda":
        limit = parse_cache_size(pinned_memory or "1.0", experts, layout.slab_bytes, name="pinned_memory")
        slabs = _core.PinnedSlabs(experts, layout.slab_bytes, limit)
        if slabs.warning:
            warnings.warn(slabs.warning, stacklevel=3)
    else:
        if pinned_memory is not None:
            raise SettingError("pinned_memory is for CUDA devices. Leave it out.")
        slabs = torch.empty(experts, layout.slab_bytes, dtype=torch.uint8)
    files = file_source(layout, checksums, direct=False)
    bar = tqdm(total=experts, desc="experts to host memory", disable=None if progress else True)
    with bar:
        for expert in range(experts):
            slab = slabs[expert].numpy() if isinstance(slabs, torch.Tensor) else slabs.slab(expert)
            files.read(expert, slab)
            bar.update()
    if isinstance(slabs, torch.Tensor):
        return _core.HostSource(slabs.data_ptr(), experts, layout.slab_bytes, slabs)
    return slabs.source()

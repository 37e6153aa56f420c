"""`finemoe.load_model`: an ordinary transformers model whose experts live in a bounded arena."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from .._core import Source as TransferSource
from ..errors import SettingError
from ..policy.cache_size import cycle_warning, parse_cache_size, slots_per_device
from ..policy.core import core_options, total_slots
from ..policy.systems import find_system
from .checksums import read_checksums
from .devices import make_arenas, parse_devices
from .expert_layout import ExpertLayout, expert_layout
from .handle import Handle
from .hooks import attach
from .runnable import why_not
from .safetensors_index import read_index
from .skeleton import Skeleton, inspect, load_skeleton, read_config, renaming
from .sources import file_source, host_source

if TYPE_CHECKING:
    from ..policy.core import Options
    from ..policy.system import System
    from .gates import MoeModel

Source = Literal["file", "host"]
DEFAULT_DISTANCE = 3  # paper §6.1


def load_model(
    folder: str | Path,
    policy: str = "finemoe",
    expert_cache: str = "0.5",
    device: str | Sequence[str] = "cpu",
    source: Source | TransferSource = "file",
    *,
    prefetch_distance: int | None = None,
    store_capacity: int = 1000,
    history: str | Path | None = None,
    seed: int = 0,
    direct: bool = False,
    bandwidth_limit: float | None = None,
    pinned_memory: str | None = None,
    log_iterations: int = 0,
    progress: bool = True,
    **rules: Any,
) -> Any:
    """Load a Mixture-of-Experts checkpoint of safetensors; returns the transformers model.

    folder: the checkpoint. policy: a system's name, or `path.py:Class`. expert_cache: bytes ("8GB"), a share
    of all experts ("0.25") or slots ("96slots"), over all devices. device: "cpu", "cuda", or several CUDA
    devices; dense weights and KV cache are on the first. source: where experts are read from, the
    checkpoint's files or host memory, into which they are copied first; or `model.finemoe.source` of another
    model of the same checkpoint, which need not be read again.

    prefetch_distance: layers ahead (3). store_capacity: expert maps. history: a routing trace of the same
    model that fills the map store, and says for `static` which experts are popular. direct: read files past
    the page cache. bandwidth_limit: bytes per second and device, to be slow in a repeatable way.
    pinned_memory: at most so much host memory is pinned (CUDA, source "host"). log_iterations: iterations
    whose events and commands are kept. rules: `frequency`, `frequency_decay`, `preempt_scope`,
    `rank_prefill_by_tokens`, as of `finemoe-sim`.

    The model computes without gradients. `model.finemoe` has figures, the decision log, `reset()` and
    `close()`. Raises SettingError for what cannot be used, before any weight is read where that can be known.
    """
    folder = Path(folder)
    system = find_system(policy)
    reason = why_not(system)
    if reason:
        raise SettingError(f"policy {system.name} cannot run on a real model: {reason}.")
    if isinstance(source, str) and source not in ("file", "host"):
        raise SettingError(f"source is {source!r}. Give 'file' or 'host'.")
    devices = parse_devices(device)
    config = read_config(folder)
    whole, layout = _experts_of(folder, config)
    options = _options(
        system,
        whole.moe,
        layout,
        len(devices),
        expert_cache,
        int(config.get_text_config().hidden_size),
        prefetch_distance=prefetch_distance or DEFAULT_DISTANCE,
        store_capacity=store_capacity,
        seed=seed,
        **rules,
    )
    skeleton = load_skeleton(folder, config, getattr(torch, layout.dtype))
    skeleton.model.to(devices[0])
    if source == "file":
        source = file_source(layout, read_checksums(folder, layout), direct=direct)
    elif source == "host":
        checksums = read_checksums(folder, layout)
        source = host_source(layout, checksums, devices[0], pinned_memory, progress=progress)
    arenas = make_arenas(layout, options, devices)
    handle = Handle(
        skeleton.moe,
        system,
        options,
        source,
        arenas,
        bandwidth_limit=bandwidth_limit,
        log_iterations=log_iterations,
        history=history,
    )
    attach(skeleton.model, handle.runtime)
    skeleton.model.finemoe = handle
    return skeleton.model


def layout_of(folder: str | Path) -> ExpertLayout:
    """Where the experts of a checkpoint lie. Errors as of `load_model`; no weight is read."""
    folder = Path(folder)
    return _experts_of(folder, read_config(folder))[1]


def _experts_of(folder: Path, config: Any) -> tuple[Skeleton, ExpertLayout]:
    whole = inspect(config)
    index = read_index(folder)
    return whole, expert_layout(index, whole.blocks, whole.shapes, renaming(whole), whole.moe.family)


def _options(
    system: System,
    moe: MoeModel,
    layout: ExpertLayout,
    devices: int,
    expert_cache: str,
    hidden_size: int,
    **settings: Any,
) -> Options:
    layers, experts, top_k = len(moe.layers), moe.num_experts, moe.top_k
    if system.preload == "all":
        expert_cache = "1.0"
    cache = parse_cache_size(expert_cache, layers * experts, layout.slab_bytes, name="expert_cache")
    slots = slots_per_device(cache, layers * experts, layout.slab_bytes, devices, name="expert_cache")
    options = core_options(
        system,
        layers=layers,
        experts=experts,
        top_k=top_k,
        devices=devices,
        slots_per_device=slots,
        expert_bytes=layout.slab_bytes,
        embedding_width=hidden_size,
        embedding_work=hidden_size,
        **settings,
    )
    held = total_slots(layers, experts, devices, slots)
    for text in cycle_warning(layers, top_k, layers * experts, held):
        warnings.warn(text, stacklevel=4)
    return options

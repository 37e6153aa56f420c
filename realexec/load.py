"""`finemoe.load_model`: an ordinary transformers model whose experts live in a bounded arena."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import SettingError
from ..policy.cache_size import cycle_warning, parse_cache_size, slots_per_device
from ..policy.core import core_options, total_slots
from ..policy.systems import find_system
from .arguments import bandwidth_of, check_arguments
from .checksums import read_checksums
from .devices import parse_devices
from .expert_layout import ExpertLayout, expert_layout
from .handle import Handle, refuse_to_save
from .hooks import attach
from .runnable import why_not
from .safetensors_index import read_index
from .skeleton import inspect, load_skeleton, read_config, renaming
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
    source: Source = "file",
    *,
    prefetch_distance: int | None = None,
    store_capacity: int = 1000,
    history: str | Path | None = None,
    seed: int = 0,
    direct: bool = False,
    bandwidth_limit: float | str | None = None,
    pinned_memory: str | None = None,
    log_iterations: int = 0,
    progress: bool = True,
    **rules: Any,
) -> Any:
    """Load a Mixture-of-Experts checkpoint of safetensors; returns the transformers model.

    folder: the checkpoint. policy: a system's name, or `path.py:Class`. expert_cache: bytes ("8GB"), a share
    of all experts ("0.25") or slots ("96slots"), over all devices. device: "cpu", "cuda", or several CUDA
    devices; dense weights and KV cache are on the first. source: where experts are read from, the
    checkpoint's files or host memory, into which they are copied first.

    prefetch_distance: layers ahead (3). store_capacity: expert maps. history: a routing trace of the same
    model that fills the map store, and says for `static` which experts are popular. direct: read files past
    the page cache. bandwidth_limit: bytes per second (2e9, "2GB/s") and device, to be slow in a repeatable
    way. pinned_memory: at most so much host memory is pinned (CUDA, source "host"). log_iterations:
    iterations whose events and commands are kept; -1: all. rules: `frequency`, `frequency_decay`,
    `preempt_scope`, `rank_prefill_by_tokens`, as of `finemoe-sim`.

    The model computes without gradients. `model.finemoe` has figures, the decision log, `reset()` and
    `close()`. It cannot be saved: its experts are in `folder`. Raises SettingError for what cannot be used,
    before any weight is read where that can be known.
    """
    check_arguments(
        {
            "folder": folder,
            "policy": policy,
            "expert_cache": expert_cache,
            "source": source,
            "prefetch_distance": prefetch_distance,
            "store_capacity": store_capacity,
            "history": history,
            "seed": seed,
            "direct": direct,
            "pinned_memory": pinned_memory,
            "log_iterations": log_iterations,
            "progress": progress,
        },
        rules,
    )
    bytes_per_s = bandwidth_of(bandwidth_limit)
    system = find_system(policy)
    reason = why_not(system)
    if reason:
        raise SettingError(f"policy {system.name} cannot run on a real model: {reason}.")
    devices = parse_devices(device)
    checkpoint = read_checkpoint(Path(folder))
    size = "1.0" if system.preload == "all" else expert_cache
    _, slots = checkpoint.cache(size, len(devices), "expert_cache")
    options = model_options(
        system,
        checkpoint,
        len(devices),
        slots,
        prefetch_distance=DEFAULT_DISTANCE if prefetch_distance is None else prefetch_distance,
        store_capacity=store_capacity,
        seed=seed,
        **rules,
    )
    for text in cache_warning(options):
        warnings.warn(text, stacklevel=2)
    return open_model(
        checkpoint,
        system,
        options,
        devices,
        source,
        direct=direct,
        bandwidth_limit=bytes_per_s,
        pinned_memory=pinned_memory,
        log_iterations=log_iterations,
        history=history,
        progress=progress,
    )


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a checkpoint before any weight is read."""

    folder: Path
    config: Any
    moe: MoeModel
    layout: ExpertLayout

    @property
    def hidden_size(self) -> int:
        """Width of an embedding."""
        return int(self.config.get_text_config().hidden_size)

    def cache(self, expert_cache: str, devices: int, name: str) -> tuple[int, int]:
        """Bytes of an expert cache over so many devices, and its slots per device. SettingError for a size
        that is none, which calls it `name`."""
        experts, slab_bytes = len(self.moe.layers) * self.moe.num_experts, self.layout.slab_bytes
        size = parse_cache_size(expert_cache, experts, slab_bytes, name=name)
        return size, slots_per_device(size, experts, slab_bytes, devices, name=name)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read config and index of a checkpoint; SettingError for one that cannot be used."""
    config = read_config(folder)
    whole = inspect(folder, config)
    index = read_index(folder)
    layout = expert_layout(index, whole.blocks, whole.shapes, renaming(whole), whole.moe.family)
    return Checkpoint(folder, config, whole.moe, layout)


def open_model(
    checkpoint: Checkpoint,
    system: System,
    options: Options,
    devices: list[torch.device],
    source: Source,
    *,
    direct: bool = False,
    bandwidth_limit: float | None = None,
    pinned_memory: str | None = None,
    log_iterations: int = 0,
    history: str | Path | None = None,
    progress: bool = True,
) -> Any:
    """The model of a checkpoint; see `load_model`."""
    folder, layout = checkpoint.folder, checkpoint.layout
    skeleton = load_skeleton(folder, checkpoint.config, getattr(torch, layout.dtype))
    skeleton.model.to(devices[0])
    store = (
        file_source(layout, read_checksums(folder, layout), direct=direct)
        if source == "file"
        else host_source(layout, read_checksums(folder, layout), devices[0], pinned_memory, progress=progress)
    )
    handle = Handle(
        skeleton.moe,
        system,
        options,
        store,
        layout,
        devices,
        bandwidth_limit=bandwidth_limit,
        log_iterations=log_iterations,
        history=history,
    )
    attach(skeleton.model, handle.runtime)
    skeleton.model.finemoe = handle
    skeleton.model.save_pretrained = refuse_to_save
    return skeleton.model


def layout_of(folder: str | Path) -> ExpertLayout:
    """Where the experts of a checkpoint lie. Errors as of `load_model`; no weight is read."""
    return read_checkpoint(Path(folder)).layout


def model_options(
    system: System, checkpoint: Checkpoint, devices: int, slots_per_device: int, **settings: Any
) -> Options:
    """The core's options for a system and so many expert slots."""
    moe = checkpoint.moe
    return core_options(
        system,
        layers=len(moe.layers),
        experts=moe.num_experts,
        top_k=moe.top_k,
        devices=devices,
        slots_per_device=slots_per_device,
        expert_bytes=checkpoint.layout.slab_bytes,
        embedding_width=checkpoint.hidden_size,
        embedding_work=checkpoint.hidden_size,
        **settings,
    )


def cache_warning(options: Options) -> tuple[str, ...]:
    """A warning where so few slots that even LRU has hardly any hits."""
    layers, experts, top_k, devices, slots = (
        int(options[name]) for name in ("layers", "experts", "top_k", "devices", "slots_per_device")
    )
    held = total_slots(layers, experts, devices, slots)
    return cycle_warning(layers, top_k, layers * experts, held)

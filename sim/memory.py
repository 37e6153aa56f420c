"""Split each device's memory into reserve, dense weights, KV cache and expert slots."""

from __future__ import annotations

import msgspec

from ..calibration.profile import HardwareProfile
from ..errors import CapacityError
from ..policy.cache_size import bytes_text, cycle_warning, slots_per_device
from ..policy.core import owned_experts
from ..policy.models import ExpertDtype, ModelSpec
from ..serving.settings import Dense


class DeviceShare(msgspec.Struct, frozen=True, kw_only=True):
    """One device's memory by purpose, in bytes; `kv_bytes` is all that is left beside dense weights."""

    capacity_bytes: int
    reserve_bytes: int
    dense_bytes: int
    expert_slot_bytes: int
    kv_bytes: int


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything goes. Every device has expert slots; `dense` says which have dense weights and KV."""

    expert_bytes: int
    #: slots of a device; device g uses min(slots_per_device, experts it owns)
    slots_per_device: int
    slots: int  #: over all devices
    whole_model: bool  #: every routed expert has a slot
    kv_budget_bytes: int
    max_kv_tokens: int  #: prompt and output tokens that all running requests may hold together
    kv_bytes_per_token: int
    devices: tuple[DeviceShare, ...]
    warnings: tuple[str, ...]
    dense: Dense = "device0"
    host_slots: int  #: experts that host memory holds
    ssd: bool  #: that is fewer than all, the others are on the SSD

    @property
    def replicated(self) -> bool:
        """Whether several devices have dense weights."""
        return self.dense == "replicated" and len(self.devices) > 1

    def peak_memory_bytes(self, kv_tokens: int) -> dict[str, int]:
        """Peak over all devices by purpose, for a run that held at most `kv_tokens` in the KV cache."""
        return {
            "reserve": sum(share.reserve_bytes for share in self.devices),
            "dense_weights": sum(share.dense_bytes for share in self.devices),
            "expert_slots": sum(share.expert_slot_bytes for share in self.devices),
            "kv_cache": kv_tokens * self.kv_bytes_per_token,
        }


def plan_memory(
    model: ModelSpec,
    dtype: ExpertDtype,
    profile: HardwareProfile,
    expert_cache_bytes: int,
    *,
    min_kv_tokens: int = 1,
    dense: Dense = "device0",
) -> MemoryPlan:
    """Split the memory of `profile`.

    expert_cache_bytes: total over devices; each gets floor(total / G / expert bytes) slots, or, where the
    total holds every routed expert, a slot for each expert it owns. min_kv_tokens: tokens the KV cache must
    hold at least, such as the longest request's prompt and output.

    Replicated dense weights: a request's KV cache is on one device, the one with the fewest tokens at its
    admission. M tokens on each of G devices then always suffice for G·M − (G − 1)·longest in all.

    Raises SettingError for less than one slot per device, CapacityError (with every share) where device 0
    does not hold its shares, or host memory and SSD not the experts they would have to serve.
    """
    expert_bytes, experts, devices = model.expert_bytes(dtype), model.routed_experts(), profile.devices
    slots = slots_per_device(expert_cache_bytes, experts, expert_bytes, devices)
    used = [
        min(slots, owned_experts(model.layers, model.experts, devices, device)) for device in range(devices)
    ]
    whole_model = sum(used) == experts
    # Device 0 is always the fullest: no device owns more experts, and it has dense weights and KV.
    usable = profile.device_memory_bytes - profile.memory_reserve_bytes
    kv_budget = usable - model.dense_bytes() - used[0] * expert_bytes
    if kv_budget < min_kv_tokens * model.kv_bytes_per_token:
        raise CapacityError(_does_not_fit(model, profile, used[0], used[0] * expert_bytes, min_kv_tokens))
    host_slots, ssd, host_warning = _host(model, profile, experts, expert_bytes, whole_model=whole_model)
    shares = tuple(
        DeviceShare(
            capacity_bytes=profile.device_memory_bytes,
            reserve_bytes=profile.memory_reserve_bytes,
            dense_bytes=model.dense_bytes() if serves else 0,
            expert_slot_bytes=slots * expert_bytes,
            kv_bytes=usable - model.dense_bytes() - slots * expert_bytes if serves else 0,
        )
        for slots, serves in zip(
            used, [device == 0 or dense == "replicated" for device in range(devices)], strict=True
        )
    )
    kv_devices = devices if dense == "replicated" else 1
    least_tokens = kv_budget // model.kv_bytes_per_token
    return MemoryPlan(
        expert_bytes=expert_bytes,
        slots_per_device=slots,
        slots=sum(used),
        whole_model=whole_model,
        kv_budget_bytes=sum(share.kv_bytes for share in shares),
        max_kv_tokens=kv_devices * least_tokens - (kv_devices - 1) * min_kv_tokens,
        kv_bytes_per_token=model.kv_bytes_per_token,
        devices=shares,
        warnings=(*cycle_warning(model.layers, model.top_k, experts, sum(used)), *host_warning),
        dense=dense,
        host_slots=host_slots,
        ssd=ssd,
    )


def whole_model_bytes(model: ModelSpec, dtype: ExpertDtype) -> int:
    """The cache size with which `plan_memory` gives every routed expert a slot."""
    return model.routed_experts() * model.expert_bytes(dtype)


def _host(
    model: ModelSpec, profile: HardwareProfile, experts: int, expert_bytes: int, *, whole_model: bool
) -> tuple[int, bool, tuple[str, ...]]:
    """Experts that host memory holds, whether the others are on an SSD, and a warning if so.

    Devices that hold the whole model read each expert once at most, so they do without either.
    """
    slots = profile.host_memory_bytes // expert_bytes
    if slots >= experts:
        return experts, False, ()
    hosted = f"host memory of {bytes_text(profile.host_memory_bytes)}"
    wanted = f"the {experts} routed experts of {model.name}, {bytes_text(experts * expert_bytes)}"
    if whole_model and (profile.ssd_bandwidth is None or slots < profile.devices):
        return experts, False, ()
    if profile.ssd_bandwidth is None:
        raise CapacityError(
            f"{profile.name}: {hosted} does not hold {wanted}, and there is no SSD. Use a smaller expert "
            "dtype, a larger host, or a profile with ssd_bandwidth and ssd_latency_s."
        )
    if slots < profile.devices:
        raise CapacityError(
            f"{profile.name}: {hosted} holds {slots} expert(s) of {bytes_text(expert_bytes)}, but each of "
            f"{profile.devices} device(s) copies from one. Use more host memory or a smaller expert dtype."
        )
    if whole_model:
        return slots, True, ()
    text = f"{hosted} holds {slots} of {wanted}; the others are read from the SSD"
    return slots, True, (f"{text}. Give more host memory or a smaller expert dtype to avoid it.",)


def _does_not_fit(
    model: ModelSpec, profile: HardwareProfile, slots: int, slots_bytes: int, min_kv_tokens: int
) -> str:
    shares = {
        "reserve": profile.memory_reserve_bytes,
        "dense weights": model.dense_bytes(),
        f"{slots} expert slots": slots_bytes,
        f"KV cache for {min_kv_tokens} token(s)": min_kv_tokens * model.kv_bytes_per_token,
    }
    total = sum(shares.values())
    listed = ", ".join(f"{purpose} {bytes_text(size)}" for purpose, size in shares.items())
    over = bytes_text(total - profile.device_memory_bytes)
    return (
        f"{profile.name}: device 0 has {bytes_text(profile.device_memory_bytes)}, but {model.name} needs "
        f"{bytes_text(total)} there: {listed}. Over by {over}: use a smaller expert cache, "
        "expert dtype or request length, or more memory."
    )

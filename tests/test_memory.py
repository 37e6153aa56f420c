"""The memory split: sizes as users write them, shares that add up, and errors that state them."""

from __future__ import annotations

import msgspec
import pytest
from finemoe.calibration.profile import load_profile, profile_names
from finemoe.errors import CapacityError, SettingError
from finemoe.policy.cache_size import parse_cache_size
from finemoe.policy.models import EXPERT_DTYPES, MODEL_NAMES, ExpertDtype, load_model_spec
from finemoe.sim.memory import plan_memory, whole_model_bytes
from hypothesis import given
from hypothesis import strategies as st

MIXTRAL = load_model_spec("mixtral-8x7b")
EXPERT = 3 * 4096 * 14336 * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GB", 24 * 10**9),
        ("16GiB", 16 * 2**30),
        ("0.5 TB", 5 * 10**11),
        ("1500MB", 15 * 10**8),
        ("1.5GB", 15 * 10**8),
        ("123456789B", 123456789),
        ("96slots", 96 * EXPERT),
        ("1slot", EXPERT),
        ("0.25", 64 * EXPERT),
        (".25", 64 * EXPERT),
        ("0.29", 74 * EXPERT),  # 74.24 experts, rounded down
        ("1", 256 * EXPERT),
        ("1.0", 256 * EXPERT),
    ],
)
def test_cache_sizes(text: str, expected: int) -> None:
    assert parse_cache_size(text, MIXTRAL.routed_experts(), MIXTRAL.expert_bytes("bf16")) == expected


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "is no size"),
        ("lots", "is no size"),
        ("-1GB", "is no size"),
        ("1e9", "is no size"),
        ("nan", "is no size"),
        ("0", "is zero"),
        ("0GB", "is zero"),
        ("24", "has no unit"),
        ("1.01", "has no unit"),
        ("24gb", "unit 'gb' is none of"),
        ("٣GB", "is no size"),
        ("24\tGB", "is no size"),
        ("24  GB", "is no size"),
        (" 24GB", "is no size"),
        ("9" * 5000 + "GB", "is no size"),
        ("1.5slots", "slots come whole"),
        ("0.001", "less than one of 256 experts"),
    ],
)
def test_bad_cache_sizes_name_value_and_remedy(text: str, word: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_cache_size(text, MIXTRAL.routed_experts(), MIXTRAL.expert_bytes("bf16"))
    assert repr(text) in str(caught.value)
    assert word in str(caught.value)
    assert "24GB" in str(caught.value)


def test_mixtral_on_the_papers_machine_by_hand() -> None:
    plan = plan_memory(MIXTRAL, "bf16", load_profile("rtx3090x6"), 24 * 10**9)
    # 4e9 bytes a device hold 11 experts of 352,321,536 bytes.
    assert (plan.slots_per_device, plan.slots, plan.whole_model) == (11, 66, False)
    first, *others = plan.devices
    assert first.dense_bytes == 3_211_272_192
    assert first.kv_bytes == 24 * 10**9 - 2 * 10**9 - 3_211_272_192 - 11 * EXPERT
    assert plan.kv_budget_bytes == first.kv_bytes
    assert plan.max_kv_tokens == first.kv_bytes // (32 * 2 * 8 * 128 * 2)
    assert len(others) == 5
    assert all((share.dense_bytes, share.kv_bytes) == (0, 0) for share in others)
    assert plan.warnings == ()
    assert plan.peak_memory_bytes(1000) == {
        "reserve": 6 * 2 * 10**9,
        "dense_weights": 3_211_272_192,
        "expert_slots": 66 * EXPERT,
        "kv_cache": 1000 * 131072,
    }


def test_whole_model_is_resident_though_devices_own_unequal_shares() -> None:
    profile = load_profile("rtx3090x6")
    plan = plan_memory(MIXTRAL, "bf16", profile, whole_model_bytes(MIXTRAL, "bf16"))
    assert plan.whole_model
    assert plan.slots == 256
    assert plan.slots_per_device == 43
    assert [share.expert_slot_bytes // EXPERT for share in plan.devices] == [43, 43, 43, 43, 42, 42]
    one_less = plan_memory(MIXTRAL, "bf16", profile, whole_model_bytes(MIXTRAL, "bf16") - 1)
    assert not one_less.whole_model
    assert one_less.slots == 6 * 42


def test_more_than_the_model_is_capped() -> None:
    spec = load_model_spec("qwen1.5-moe")
    plan = plan_memory(spec, "bf16", load_profile("rtx3090x6"), 96 * 10**9)
    assert plan.slots == spec.routed_experts() == 24 * 60


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (12, ["12 expert slots", "= 64", "no hits at all with 62"]),
        (62, ["no hits at all with 62"]),
        (63, ["63 expert slots"]),
        (64, ["64 expert slots"]),
        (65, []),
        (256, []),
    ],
)
def test_token_cycle_warning(slots: int, words: list[str]) -> None:
    plan = plan_memory(MIXTRAL, "bf16", load_profile("h200"), slots * EXPERT)
    assert plan.slots == slots
    assert len(plan.warnings) == bool(words)
    for word in words:
        assert word in plan.warnings[0]
    assert ("no hits" in "".join(plan.warnings)) == (slots <= 62)


def test_less_than_a_slot_per_device() -> None:
    with pytest.raises(SettingError, match="holds no expert") as caught:
        plan_memory(MIXTRAL, "bf16", load_profile("rtx3090x6"), 6 * EXPERT - 1)
    assert "6slots" in str(caught.value)
    assert f"{6 * EXPERT} bytes (2.11 GB)" in str(caught.value)
    assert plan_memory(MIXTRAL, "bf16", load_profile("rtx3090x6"), 6 * EXPERT).slots == 6


def test_capacity_error_states_every_share_of_the_device() -> None:
    with pytest.raises(CapacityError) as caught:
        plan_memory(MIXTRAL, "bf16", load_profile("rtx3090"), 60 * EXPERT, min_kv_tokens=4096)
    message = str(caught.value)
    total = 2 * 10**9 + 60 * EXPERT + 3_211_272_192 + 4096 * 131072
    for part in (
        "rtx3090: device 0 has 24000000000 bytes (24.00 GB)",
        f"needs {total} bytes",
        "reserve 2000000000 bytes (2.00 GB)",
        f"60 expert slots {60 * EXPERT} bytes (21.14 GB)",
        "dense weights 3211272192 bytes (3.21 GB)",
        f"KV cache for 4096 token(s) {4096 * 131072} bytes (0.54 GB)",
        f"Over by {total - 24 * 10**9} bytes",
    ):
        assert part in message


def test_longest_request_must_fit_the_kv_cache() -> None:
    profile = load_profile("rtx3090")
    room = plan_memory(MIXTRAL, "bf16", profile, 50 * EXPERT).max_kv_tokens
    assert plan_memory(MIXTRAL, "bf16", profile, 50 * EXPERT, min_kv_tokens=room).max_kv_tokens == room
    with pytest.raises(CapacityError, match=f"KV cache for {room + 1} token"):
        plan_memory(MIXTRAL, "bf16", profile, 50 * EXPERT, min_kv_tokens=room + 1)


def test_host_must_hold_the_experts_it_serves() -> None:
    small = msgspec.structs.replace(
        load_profile("h200"), host_memory_bytes=64 * 10**9, ssd_bandwidth=None, ssd_latency_s=None
    )
    with pytest.raises(CapacityError, match=r"host memory of 64000000000 bytes .* 256 routed experts"):
        plan_memory(MIXTRAL, "bf16", small, 24 * 10**9)
    assert plan_memory(MIXTRAL, "int4", small, 12 * 10**9).slots > 0
    assert plan_memory(MIXTRAL, "bf16", small, 91 * 10**9).whole_model  # nothing is left to serve


def test_an_ssd_serves_what_host_memory_does_not_hold() -> None:
    small = msgspec.structs.replace(load_profile("h200"), host_memory_bytes=64 * 10**9)
    plan = plan_memory(MIXTRAL, "bf16", small, 24 * 10**9)
    assert (plan.ssd, plan.host_slots) == (True, 181)  # 64e9 / 352,321,536 = 181.65
    assert "holds 181 of the 256 routed experts" in plan.warnings[0]
    whole = plan_memory(MIXTRAL, "int4", small, 12 * 10**9)
    assert (whole.ssd, whole.host_slots, whole.warnings) == (False, 256, ())


def test_devices_that_hold_the_whole_model_read_it_once() -> None:
    h200 = load_profile("h200")
    small = msgspec.structs.replace(h200, host_memory_bytes=64 * 10**9)
    plan = plan_memory(MIXTRAL, "bf16", small, 91 * 10**9)
    assert (plan.whole_model, plan.ssd, plan.host_slots, plan.warnings) == (True, True, 181, ())
    tiny = msgspec.structs.replace(h200, host_memory_bytes=10**6)
    assert not plan_memory(MIXTRAL, "bf16", tiny, 91 * 10**9).ssd


def test_each_device_needs_an_expert_in_host_memory_to_copy_from() -> None:
    six = load_profile("rtx3090x6")
    enough = msgspec.structs.replace(six, host_memory_bytes=6 * EXPERT)
    assert plan_memory(MIXTRAL, "bf16", enough, 24 * 10**9).host_slots == 6
    short = msgspec.structs.replace(six, host_memory_bytes=6 * EXPERT - 1)
    with pytest.raises(CapacityError, match=r"holds 5 expert\(s\) .* each of 6 device\(s\) copies from one"):
        plan_memory(MIXTRAL, "bf16", short, 24 * 10**9)


@given(
    st.sampled_from(MODEL_NAMES),
    st.sampled_from(EXPERT_DTYPES),
    st.sampled_from(profile_names()),
    st.integers(10**8, 10**11),
)
def test_shares_add_up_and_more_cache_never_means_fewer_slots(
    name: str, dtype: ExpertDtype, hardware: str, cache_bytes: int
) -> None:
    spec, profile = load_model_spec(name), load_profile(hardware)
    try:
        plan = plan_memory(spec, dtype, profile, cache_bytes)
    except (CapacityError, SettingError):
        return
    for share in plan.devices:
        used = share.reserve_bytes + share.dense_bytes + share.expert_slot_bytes + share.kv_bytes
        assert used <= share.capacity_bytes
    first = plan.devices[0]
    assert first.capacity_bytes == (
        first.reserve_bytes + first.dense_bytes + first.expert_slot_bytes + first.kv_bytes
    )
    assert sum(share.expert_slot_bytes for share in plan.devices) == plan.slots * spec.expert_bytes(dtype)
    assert plan.slots * spec.expert_bytes(dtype) <= cache_bytes
    assert plan.max_kv_tokens * spec.kv_bytes_per_token <= plan.kv_budget_bytes
    less = max(cache_bytes - 10**9, profile.devices * spec.expert_bytes(dtype))
    if less < cache_bytes:
        assert plan_memory(spec, dtype, profile, less).slots <= plan.slots

"""Dense weights on every device: who serves what, what it takes, and where the memory goes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from finemoe.calibration.profile import load_profile, profile_names
from finemoe.errors import CapacityError, SettingError
from finemoe.policy.models import MODEL_NAMES, load_model_spec
from finemoe.serving.request import RequestState
from finemoe.serving.scheduler import Step
from finemoe.sim.memory import plan_memory
from finemoe.sim.placement import Placement
from finemoe.traces.requests import Request
from hypothesis import given
from hypothesis import strategies as st
from world_case import ListedRouting, MadeRouting, cell, routing_of, serve, small_machine, small_model

MIXTRAL = load_model_spec("mixtral-8x7b")
EXPERT = 3 * 4096 * 14336 * 2
DENSE, KV = 3_211_272_192, 131_072


def states(*lengths: tuple[int, int]) -> list[RequestState]:
    return [
        RequestState(Request(index, 0.0, prompt, output)) for index, (prompt, output) in enumerate(lengths)
    ]


def split(placement: Placement, *step: RequestState) -> list[tuple[RequestState, ...]]:
    return [part.requests for part in placement.split(Step("decode", step))]


def test_requests_go_to_the_device_with_the_fewest_tokens() -> None:
    placement = Placement(2)
    first, second, third, fourth = states((100, 10), (30, 10), (20, 10), (90, 10))
    for state in (first, second, third):
        placement.admit(state)
    assert placement.kv_tokens == [110, 70]  # the third joins the second
    assert split(placement, first, second, third) == [(first,), (second, third)]
    assert split(placement, third) == [(third,)]
    placement.finish(first)
    placement.admit(fourth)
    assert placement.kv_tokens == [100, 70]
    assert split(placement, second, fourth) == [(fourth,), (second,)]
    assert placement.peak_kv_tokens == 110


def test_mixtral_replicated_on_the_papers_machine_by_hand() -> None:
    plan = plan_memory(
        MIXTRAL, "bf16", load_profile("rtx3090x6"), 24 * 10**9, min_kv_tokens=5000, dense="replicated"
    )
    kv_bytes = 24 * 10**9 - 2 * 10**9 - DENSE - 11 * EXPERT  # on each of six devices
    assert all((share.dense_bytes, share.kv_bytes) == (DENSE, kv_bytes) for share in plan.devices)
    assert plan.kv_budget_bytes == 6 * kv_bytes
    assert plan.max_kv_tokens == 6 * (kv_bytes // KV) - 5 * 5000
    assert plan.replicated
    assert plan.peak_memory_bytes(1000)["dense_weights"] == 6 * DENSE


def test_one_device_has_nothing_to_replicate() -> None:
    both = [
        plan_memory(MIXTRAL, "bf16", load_profile("h200"), 24 * 10**9, dense=dense)
        for dense in ("device0", "replicated")
    ]
    assert both[0] == msgspec.structs.replace(both[1], dense="device0")
    assert not both[1].replicated


def test_the_longest_request_must_fit_each_device() -> None:
    profile = load_profile("rtx3090x6")
    room = (24 * 10**9 - 2 * 10**9 - DENSE - 11 * EXPERT) // KV
    plan = plan_memory(MIXTRAL, "bf16", profile, 24 * 10**9, min_kv_tokens=room, dense="replicated")
    assert plan.max_kv_tokens == room
    with pytest.raises(CapacityError, match=f"KV cache for {room + 1} token"):
        plan_memory(MIXTRAL, "bf16", profile, 24 * 10**9, min_kv_tokens=room + 1, dense="replicated")


@given(
    st.sampled_from(MODEL_NAMES),
    st.sampled_from([name for name in profile_names() if load_profile(name).devices > 1]),
    st.integers(10**8, 10**11),
    st.integers(1, 20_000),
)
def test_no_device_has_more_than_its_memory(name: str, hardware: str, cache_bytes: int, longest: int) -> None:
    spec, profile = load_model_spec(name), load_profile(hardware)
    try:
        plan = plan_memory(spec, "bf16", profile, cache_bytes, min_kv_tokens=longest, dense="replicated")
    except (CapacityError, SettingError):
        return
    for share in plan.devices:
        used = share.reserve_bytes + share.dense_bytes + share.expert_slot_bytes + share.kv_bytes
        assert used <= share.capacity_bytes
        assert longest * spec.kv_bytes_per_token <= share.kv_bytes
    assert plan.max_kv_tokens >= longest


@given(st.integers(1, 6), st.integers(1, 40), st.data())
def test_admission_by_the_total_never_overfills_a_device(
    devices: int, room: int, data: st.DataObject
) -> None:
    """The limit G·M − (G − 1)·longest keeps every device within M, whatever comes and goes."""
    longest = data.draw(st.integers(1, room))
    limit = devices * room - (devices - 1) * longest
    placement, running, index = Placement(devices), list[RequestState](), 0
    for _ in range(data.draw(st.integers(1, 30))):
        size = data.draw(st.integers(1, longest))
        leaves = data.draw(st.booleans())
        if running and leaves:
            placement.finish(running.pop(data.draw(st.integers(0, len(running) - 1))))
        elif sum(placement.kv_tokens) + size <= limit:
            state = RequestState(Request(index, 0.0, size, 0))
            index += 1
            placement.admit(state)
            running.append(state)
        assert max(placement.kv_tokens) <= room
    assert sum(placement.kv_tokens) == sum(state.kv_tokens for state in running)


# Everything resident. A machine of 1e10 bytes/s and 1e13 FLOP/s, launches of 1 us, exchanges of 10 us; a
# model of 2 layers, each 200,000 parameters before its experts (400,000 bytes: 40 us), 100 bytes of KV per
# token and layer, experts of 1e6 bytes (100 us), rows of 16 · 2 bytes, head and embedding of 10,000
# parameters.
MODEL = small_model(layers=2, experts=4, top_k=4)
REQUESTS = [Request(index, 0.0, 1000, 3) for index in range(3)]


@pytest.mark.parametrize(
    ("dense", "tokens", "context"),
    [
        ("device0", 3, 3 * 1001),  # one device has all three requests
        ("replicated", 2, 2 * 1001),  # the first device has two of them, the second one
    ],
)
@pytest.mark.parametrize(("peer_link", "hops", "bandwidth"), [("nvlink", 1, 1e10), ("pcie", 2, 5e9)])
def test_a_decode_step_by_hand(
    dense: str, tokens: int, context: int, peer_link: str, hops: int, bandwidth: float
) -> None:
    machine = small_machine(2, link_latency_s=1e-5, link_bandwidth=5e9)
    settings = {"dense": dense, "peer_link": peer_link, "max_num_seqs": 3}
    inputs = cell("no-offload", MODEL, machine, MadeRouting(MODEL), REQUESTS, slots=1, settings=settings)
    steps = serve(inputs).iterations.table()
    decode = steps[steps["phase"] == "decode"][0]
    assert (decode["batch"], decode["tokens"]) == (3, 3)
    attention_s = 400_000 / 1e10 + (context + tokens) * 100 / 1e10 + 8e-6
    experts_s = 2 * 1e-4 + 1e-6  # two of the four on each device
    exchange_s = 2 * hops * (1e-5 + tokens * 4 * 0.5 * 32 / bandwidth)
    once_s = 2 * tokens * 32 / 1e10 + 20_000 / 1e10 + 4e-6
    expected_s = 2 * (attention_s + experts_s + exchange_s) + once_s
    assert decode["end_s"] - decode["start_s"] == pytest.approx(expected_s, rel=1e-9)


def test_a_prompt_is_served_by_one_device() -> None:
    # One request: replicating the dense weights gains nothing.
    took = []
    for dense in ("device0", "replicated"):
        inputs = cell(
            "lru",
            MODEL,
            small_machine(2),
            MadeRouting(MODEL),
            REQUESTS[:1],
            slots=4,
            settings={"dense": dense},
        )
        took.append(serve(inputs).run_s)
    assert took[0] == took[1]


def test_any_copy_slows_attention_where_every_device_has_some() -> None:
    # Expert (l, j) is on device j; a load takes 1.01 ms. The oracle loads (0, 0) on device 0 for the prompt,
    # and on device 1 (1, 1) for the prompt and then (0, 1) for the token after it, until 2.02 ms. The
    # prompt's layer 0 waits until 1.01 ms and takes 0.2 ms. So in its layer 1 only device 1 copies: attention
    # is slower by the factor of 2 if every device has dense work, and not if all of it is on device 0.
    model = small_model(layers=2, experts=2, top_k=1)
    chosen = np.array([[[1, 0], [0, 1]], [[0, 1], [0, 1]]], np.float16)  # iteration, layer, expert
    prompt = [np.array([1, 0]), np.array([0, 1])]
    routing = ListedRouting(MadeRouting(model).meta, [routing_of(chosen, prompt, 1, None)])
    machine = small_machine(2, link_bandwidth=1e9, copy_slowdown=2.0)
    took = {}
    for dense in ("device0", "replicated"):
        inputs = cell(
            "oracle", model, machine, routing, [Request(0, 0.0, 1, 2)], slots=4, settings={"dense": dense}
        )
        took[dense] = serve(inputs).iterations.column("compute_s")[0]
    attention_s = 400_000 / 1e10 + 2 * 100 / 1e10 + 8e-6
    assert took["replicated"] - took["device0"] == pytest.approx(attention_s, rel=1e-9)

"""The scheduler: conservation, order, budgets, and that everybody is served."""

from __future__ import annotations

import pytest
from finemoe.errors import CapacityError, SettingError
from finemoe.serving.request import RequestState
from finemoe.serving.scheduler import Scheduler, Step
from finemoe.traces.requests import Request
from hypothesis import given
from hypothesis import strategies as st


def request(index: int, prompt: int, output: int) -> Request:
    return Request(index=index, arrival_s=float(index), prompt_tokens=prompt, output_tokens=output)


def must_step(scheduler: Scheduler) -> Step:
    step = scheduler.next_step()
    assert step is not None
    return step


def test_a_worked_timeline() -> None:
    """Two seats, a budget of 100 tokens: admission, prefill first, decode together, a seat handed on."""
    scheduler = Scheduler(max_num_seqs=2, token_budget=100, kv_capacity_tokens=1000)
    for index, (prompt, output) in enumerate([(60, 2), (50, 3), (30, 1)]):
        scheduler.add(request(index, prompt, output))
    timeline = []
    while (step := scheduler.next_step()) is not None:
        members = [state.request.index for state in step.requests]
        tokens = step.tokens
        finished = [state.request.index for state in scheduler.finish_step(step)]
        timeline.append((step.phase, members, tokens, finished, scheduler.kv_reserved_tokens))
    assert timeline == [
        ("prefill", [0], 60, [], 62),  # 60 + 50 is over the budget
        ("prefill", [1], 50, [], 115),
        ("decode", [0, 1], 2, [0], 53),
        ("prefill", [2], 30, [2], 53),  # the free seat is filled before decoding goes on
        ("decode", [1], 1, [1], 0),
    ]


def test_prefills_share_a_step_up_to_the_budget() -> None:
    scheduler = Scheduler(max_num_seqs=8, token_budget=100, kv_capacity_tokens=1000)
    for index, prompt in enumerate([40, 60, 1]):
        scheduler.add(request(index, prompt, 2))
    assert [state.request.index for state in must_step(scheduler).requests] == [0, 1]


def test_a_prompt_over_the_budget_goes_alone() -> None:
    scheduler = Scheduler(max_num_seqs=8, token_budget=100, kv_capacity_tokens=1000)
    scheduler.add(request(0, 500, 2))
    scheduler.add(request(1, 1, 2))
    assert [state.request.index for state in must_step(scheduler).requests] == [0]


def test_context_grows_by_one_token_per_iteration() -> None:
    scheduler = Scheduler(max_num_seqs=1, token_budget=100, kv_capacity_tokens=1000)
    state = scheduler.add(request(0, 7, 3))
    contexts = []
    while (step := scheduler.next_step()) is not None:
        contexts.append((state.context_tokens, state.step_tokens))
        scheduler.finish_step(step)
    assert contexts == [(0, 7), (7, 1), (8, 1)]


def test_a_request_that_can_never_fit_is_refused_when_it_is_added() -> None:
    scheduler = Scheduler(max_num_seqs=1, token_budget=100, kv_capacity_tokens=1000)
    with pytest.raises(CapacityError, match=r"request 3 needs 1,001 tokens .* holds 1,000"):
        scheduler.add(request(3, 1000, 1))
    assert scheduler.next_step() is None


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    """Request 1 waits for KV cache that request 0 holds; request 2 would fit, but comes later."""
    scheduler = Scheduler(max_num_seqs=8, token_budget=100, kv_capacity_tokens=100)
    for index, (prompt, output) in enumerate([(60, 2), (60, 2), (10, 1)]):
        scheduler.add(request(index, prompt, output))
    order = []
    while (step := scheduler.next_step()) is not None:
        if step.phase == "prefill":
            order.append([state.request.index for state in step.requests])
        scheduler.finish_step(step)
    assert order == [[0], [1, 2]]


@pytest.mark.parametrize("field", ["max_num_seqs", "token_budget"])
def test_settings_below_one_are_refused(field: str) -> None:
    settings = {"max_num_seqs": 1, "token_budget": 1, "kv_capacity_tokens": 1} | {field: 0}
    with pytest.raises(SettingError, match=f"{field} is 0"):
        Scheduler(**settings)


def test_no_room_for_kv_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="no request fits"):
        Scheduler(1, 1, 0)


def test_steps_are_closed_one_by_one() -> None:
    scheduler = Scheduler(2, 100, 100)
    scheduler.add(request(0, 1, 2))
    step = must_step(scheduler)
    with pytest.raises(RuntimeError, match="still open"):
        scheduler.next_step()
    scheduler.finish_step(step)
    with pytest.raises(RuntimeError, match="not open"):
        scheduler.finish_step(step)


requests = st.lists(
    st.tuples(st.integers(1, 120), st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=25
)


@given(rows=requests, seats=st.integers(1, 5), budget=st.integers(1, 150), slack=st.integers(0, 200))
def test_any_traffic(rows: list[tuple[int, int, int]], seats: int, budget: int, slack: int) -> None:
    """Requests arrive some steps apart. All are served, in order, within seats, token budget and KV cache."""
    capacity = max(prompt + output for prompt, output, _ in rows) + slack
    scheduler = Scheduler(seats, budget, capacity)
    pending = [(request(i, prompt, output), gap) for i, (prompt, output, gap) in enumerate(rows)]
    tokens = dict.fromkeys(range(len(rows)), 0)
    prefilled: list[int] = []
    running: dict[int, RequestState] = {}
    wait = pending[0][1]
    while pending or scheduler.waiting or scheduler.running:
        while pending and wait <= 0:
            scheduler.add(pending.pop(0)[0])
            wait = pending[0][1] if pending else 0
        wait -= 1
        waited, was_running = scheduler.waiting, list(running)
        step = scheduler.next_step()
        if step is None:  # idle only while nobody is there
            assert waited == 0
            assert not running
            continue
        members = [state.request.index for state in step.requests]
        if step.phase == "prefill":
            prefilled += members
            running |= {state.request.index: state for state in step.requests}
            assert step.tokens <= budget or len(members) == 1
        else:
            assert members == was_running  # one decode step of all running requests, in order of admission
        assert len(running) <= seats
        reserved = sum(state.kv_tokens for state in running.values())
        assert scheduler.kv_reserved_tokens == reserved <= capacity
        for index in members:
            tokens[index] += 1
        done = scheduler.finish_step(step)
        for state in done:
            assert state.finished
            del running[state.request.index]
    assert prefilled == list(range(len(rows)))  # first come, first served; nobody is left out or served twice
    assert tokens == {i: output for i, (_, output, _) in enumerate(rows)}
    assert scheduler.kv_reserved_tokens == 0

"""Timelines of the reference core worked by hand: predictors, evictions and caches beyond the paper's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from finemoe.errors import CoreError
from reference_core import ReferenceCore
from reference_plugin import ExpertView, UserPolicy
from reference_predictions import Row
from reference_state import Command, Config


def core_of(policy: UserPolicy | None = None, **changes: Any) -> ReferenceCore:
    """Two layers of two experts of 100 bytes on one device that holds all; demand loads only, LRU."""
    plain = {"layers": 2, "experts": 2, "top_k": 1, "devices": 1, "slots_per_device": 99, "expert_bytes": 100}
    return ReferenceCore(Config(**(plain | {"predictor": "none", "eviction": "lru"} | changes)), policy)


def begin(core: ReferenceCore, *requests: int) -> list[Command]:
    return core.begin_iteration([Row(request, "decode", 1) for request in requests or (7,)])


def gate(core: ReferenceCore, *experts: int, counts: list[list[int]] | None = None) -> list[Command]:
    """The next layer's gate; the gate's rows are the same for all experts."""
    config = core.config
    rows = np.full((len(core.rows), config.experts), 1.0 / config.experts)
    tokens = [1] * len(experts) if counts is None else np.sum(counts, axis=0)[list(experts)].tolist()
    return core.gate(core.l_now + 1, rows, experts, tokens, counts)


def serve(core: ReferenceCore) -> list[Command]:
    """Let every load land and compute the layer; the commands of its last event."""
    commands: list[Command] = []
    while core.chunk:
        for flight in [f for f in core.flights if f is not None]:
            commands = core.loaded(flight.expert)
        ready = sorted(e for e in core.chunk if core.states[e].status == "resident")
        if ready:
            commands = core.computed(core.l_now, ready)
    return commands


def load(expert: int, slot: int, kind: str = "demand", evicts: int = -1) -> Command:
    return ("Load", expert, 0, slot, 0, 100, kind, evicts)


# -- activation matrices


def test_a_matrix_predicts_all_later_layers_by_share_and_depth() -> None:
    core = core_of(layers=3, predictor="activation", targets="later", selector="positive", priority="depth")
    core.seed_store([[[1.0, 0.0], [0.25, 0.75], [0.0, 1.0]]], np.zeros((1, 0)), [1])
    assert begin(core) == []
    # One row, one stored matrix, J = 2.
    search = ("Search", 0, "trajectory", 0, 2, 2, False)
    assert gate(core, 0, counts=[[5, 0]]) == [("Wait", (0,)), search, load(0, 0)]
    assert serve(core) == []
    # Cosine 1. Layer 1: 0.25 · 2/3 and 0.75 · 2/3; layer 2: 1 · 1/3 and an expert that nothing speaks for.
    assert core.search_done(0) == [load(3, 1, "prefetch")]
    assert core.loaded(3) == [load(5, 2, "prefetch")]
    assert core.loaded(5) == [load(2, 3, "prefetch")]
    assert core.loaded(2) == []
    assert [core.states[e].p for e in range(2, 6)] == [0.25, 0.75, 0.0, 1.0]


def test_a_finished_requests_matrix_replaces_the_nearest_one() -> None:
    core = core_of(predictor="activation", store_capacity=2)
    core.seed_store([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]], np.zeros((2, 0)), [1, 2])
    begin(core, 7, 8)
    for counts in ([[1, 3], [2, 2]], [[0, 4], [4, 0]]):
        gate(core, 0, 1, counts=counts)
        serve(core)
    # The trajectory search of layer 0 is abandoned; request 8 goes on.
    assert core.end_iteration([7, 9]) == [("Search", 1, "update", 1, -1, 2 * 4, False)]
    # Layer 0: cosines 1/√10 and 3/√10 of [0.25, 0.75]; layer 1: both 1. So it replaces the second one.
    assert core.search_done(1) == []
    assert core.store.maps.tolist() == [[[1.0, 0.0], [0.0, 1.0]], [[0.25, 0.75], [0.0, 1.0]]]
    assert core.store.written.tolist() == [1, 3]
    # Request 7 was forgotten, request 8 grows on.
    begin(core, 7, 8)
    gate(core, 0, 1, counts=[[0, 2], [6, 0]])
    assert core.activations.matrices[7].tolist() == [[0, 2], [0, 0]]
    assert core.activations.matrices[8].tolist() == [[8, 2], [4, 0]]
    assert core.activations.popularity.tolist() == [[9, 7], [4, 4]]


def test_popular_experts_of_the_first_layers_are_queued_before_the_first_gate() -> None:
    core = core_of(predictor="activation", popular_start=True, slots_per_device=1)
    assert begin(core) == []  # nothing is popular yet
    for counts in ([[1, 2]], [[5, 0]]):
        gate(core, *np.flatnonzero(counts[0]).tolist(), counts=counts)
        serve(core)
    core.end_iteration([7])
    core.search_done(0)
    # Layer 0 only (d = 1); expert 2 makes room.
    assert begin(core) == [load(1, 0, "prefetch", 2)]
    assert [core.states[e].p for e in range(4)] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 0.5, 0.5]


def test_activation_eviction_keeps_what_running_requests_use_and_early_layers() -> None:
    core = core_of(eviction="activation", slots_per_device=2)
    begin(core, 7, 8)
    gate(core, 0, 1, counts=[[2, 0], [1, 1]])
    serve(core)
    # a is 3/4 and 1/4: expert 1 leaves, although it is the higher id.
    assert gate(core, 0, counts=[[1, 0], [1, 0]]) == [("Wait", (2,)), load(2, 1, evicts=1)]
    serve(core)
    core.end_iteration([7])
    begin(core, 8)
    # Of request 8 alone: a of expert 0 is 1/2, of expert 2 it is 1, halved for its layer with its 1e-6.
    assert core.eviction_key(0) == (0.5 + 1e-6, 1, 0)
    assert core.eviction_key(2) == (0.5 * (1.0 + 1e-6), 2, 2)
    # The gate's own tokens count before anybody leaves: a of expert 0 is 1/3 by then.
    assert gate(core, 1, counts=[[0, 1]])[-1] == load(1, 0, evicts=0)


# -- least frequently recently used


def test_lfru_protects_what_was_hit_last_in_half_of_the_slots() -> None:
    core = core_of(layers=1, experts=6, slots_per_device=4, eviction="lfru")

    def iteration(expert: int) -> list[Command]:
        begin(core)
        commands = gate(core, expert)[1:]
        serve(core)
        core.end_iteration()
        return commands

    for expert in (0, 1, 2, 3, 0, 1, 2):
        iteration(expert)
    assert [core.states[e].privileged for e in range(4)] == [False, True, True, False]
    assert iteration(4) == [load(4, 3, evicts=3)]  # visited once, expert 0 twice
    assert iteration(3) == [load(3, 3, evicts=4)]  # expert 3 keeps its visits
    assert iteration(5) == [load(5, 0, evicts=0)]  # as many visits as expert 3, longer ago
    iteration(3)
    assert [e for e in range(6) if core.states[e].privileged] == [2, 3]


# -- a quota per layer


def test_a_quota_replaces_within_the_layer_and_stages_prefetches_beside_it() -> None:
    core = core_of(experts=4, slots_per_device=4, predictor="speculate", layer_quota=1)

    def speculate(j: int) -> list[Command]:
        return core.speculation(core.l_now, 1, np.eye(4)[[j]])

    begin(core)
    assert gate(core, 0) == [("Wait", (0,)), load(0, 0)]
    serve(core)
    assert speculate(2) == [load(6, 1, "prefetch")]
    core.loaded(6)
    assert gate(core, 2) == [("Wait", (6,))]
    serve(core)
    core.end_iteration()
    begin(core)
    # Two slots are free, but layer 0 has its one expert.
    assert gate(core, 1) == [("Wait", (1,)), load(1, 0, evicts=0)]
    serve(core)
    assert speculate(3) == [load(7, 2, "prefetch")]
    core.loaded(7)
    assert speculate(0) == [load(4, 3, "prefetch")]
    core.loaded(4)
    assert gate(core, 3) == [("Wait", (7,))]
    assert core.residents(0) == [1, 6, 7, 4]
    # Expert 7 was staged and is used: expert 6 becomes spare. Expert 4 was not used and does not count.
    assert serve(core) == []
    assert core.residents(0) == [1, 6, 7, 4]
    assert [e for e in range(8) if core.states[e].spare] == [6]
    core.end_iteration()
    begin(core)
    assert gate(core, 1) == [("Wait", (1,))]
    serve(core)
    assert speculate(1) == [load(5, 1, "prefetch", 6)]
    core.loaded(5)
    assert speculate(2) == [load(6, 3, "prefetch", 4)]  # expert 4 was staged in an earlier iteration
    core.loaded(6)
    assert speculate(0) == []  # nothing settled makes room, and the others staged are still to come
    assert gate(core, 2) == [("Wait", (6,))]
    serve(core)
    core.end_iteration()
    begin(core)
    assert gate(core, 1) == [("Wait", (1,))]
    serve(core)
    assert gate(core, 1, 2) == [("Wait", (5, 6))]
    serve(core)
    assert [e for e in range(8) if core.states[e].spare] == [5, 7]
    core.end_iteration()
    begin(core)
    # The layer's own expert is required too. Of the spare ones, expert 7 was used least recently.
    assert gate(core, 1, 2) == [("Wait", (1, 2)), load(2, 2, evicts=7)]
    serve(core)
    assert gate(core, 3) == [("Wait", (7,)), load(7, 3, evicts=6)]


# -- kept experts


def test_kept_experts_take_no_room_of_a_chunk_and_never_leave() -> None:
    core = core_of(slots_per_device=3)
    with pytest.raises(CoreError, match="no slot left"):
        core.preload([0, 1, 2])
    assert core.preload([1, 2]) == []
    with pytest.raises(CoreError, match="once"):
        core.preload([1, 2])
    begin(core)
    assert gate(core, 0, 1) == [("Wait", (0, 1)), load(0, 2)]
    serve(core)
    assert gate(core, 0, 1) == [("Wait", (2, 3)), load(3, 2, evicts=0)]
    serve(core)
    core.end_iteration()
    assert core.slots == [[1, 2, 3]]
    assert core.counter_values()["hits"] == [[0, 0], [1, 1]]


def test_all_experts_may_be_kept() -> None:
    core = core_of(devices=2, slots_per_device=2)
    core.preload([0, 1, 2, 3])
    begin(core)
    for _ in range(2):
        assert [c[0] for c in gate(core, 0, 1)] == ["Wait"]
        serve(core)
    assert core.slots == [[0, 2], [1, 3]]


# -- what a blocked layer waits for


def test_prefetches_of_the_next_layer_are_open_until_they_are_there() -> None:
    core = core_of(layers=3, predictor="speculate", prefetch_blocks=True)
    begin(core)
    open_after = []
    for event, *arguments in (
        ("speculation", -1, 1, [[1.0, 0.0]]),
        ("speculation", -1, 0, [[1.0, 0.0]]),
        ("loaded", 2),
        ("loaded", 0),
    ):
        getattr(core, event)(*arguments)
        open_after.append(core.prefetch_open())
    # Layer 1 is not next; then expert 0 waits behind expert 2, is loaded, is there.
    assert open_after == [False, True, True, False]


# -- the user's policy


class Fixed:
    """Predicts what it is given; evicts the higher id first."""

    def __init__(self, predictions: dict[int, list[float]]) -> None:
        self.predictions = predictions
        self.finished: list[list[int]] = []

    def begin_iteration(
        self, rows: list[tuple[int, str, int]], embeddings: npt.NDArray[np.float16] | None
    ) -> dict[int, list[float]]:
        assert rows == [(7, "decode", 1)]
        assert embeddings is None
        return self.predictions

    def gate(self, layer: int, probabilities: Any, row_counts: Any) -> dict[int, list[float]]:
        return {}

    def end_iteration(self, finished: list[int]) -> None:
        self.finished.append(finished)

    def eviction_key(self, view: ExpertView) -> float:
        return -(view.layer * 10.0 + view.expert)


def test_a_policys_predictions_and_keys_are_used() -> None:
    policy = Fixed({1: [0.5, 9.0], 0: [0.0, 1.0]})
    core = core_of(policy, predictor="plugin", eviction="plugin", selector="positive", slots_per_device=2)
    # p / (l − l_now): 9 / 2, 1 / 1, 0.5 / 2.
    assert begin(core) == [load(3, 0, "prefetch")]
    assert core.loaded(3) == [load(1, 1, "prefetch")]
    assert core.loaded(1) == [load(2, 0, "prefetch", 3)]
    assert core.loaded(2) == []
    assert gate(core, 0, counts=[[1, 0]]) == [("Wait", (0,)), load(0, 0, evicts=2)]
    serve(core)
    gate(core, 1, counts=[[0, 4]])
    serve(core)
    core.end_iteration([7])
    assert policy.finished == [[7]]


@pytest.mark.parametrize(
    "predictions",
    [
        {1: [0.5]},
        {2: [0.5, 0.5]},
        {-1: [0.5, 0.5]},
        {0: [0.5, -0.5]},
        {0: [0.5, math.inf]},
        {1: [math.nan, 0]},
    ],
)
def test_a_useless_prediction_ends_the_run(predictions: dict[int, list[float]]) -> None:
    core = core_of(Fixed(predictions), predictor="plugin")
    with pytest.raises(CoreError):
        begin(core)
    with pytest.raises(CoreError, match="aborted"):
        begin(core)


def test_a_policy_comes_with_plugin_and_only_with_it() -> None:
    with pytest.raises(CoreError, match="policy"):
        core_of(eviction="plugin")
    with pytest.raises(CoreError, match="policy"):
        core_of(Fixed({}))

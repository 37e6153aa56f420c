"""A user's policy in the compiled core: what it may answer, and how its mistakes end a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from finemoe.errors import CoreError
from finemoe.policy.core import Core, make_config
from world_case import plain_options


class Policy:
    """Predicts nothing and evicts the lower id."""

    def begin_iteration(self, rows: Any, embeddings: Any) -> Any:
        return {}

    def gate(self, layer: Any, probabilities: Any, row_counts: Any) -> Any:
        return {}

    def end_iteration(self, finished: Any) -> None:
        pass

    def eviction_key(self, view: Any) -> Any:
        return 0.0


def policy_core(policy: object) -> Core:
    """Three layers of two experts and two slots, all decisions the policy's."""
    sizes = {"layers": 3, "experts": 2, "top_k": 1, "slots_per_device": 2, "embedding_width": 2}
    options = plain_options(**sizes, predictor="plugin", eviction="plugin")
    return Core(make_config(options), policy=policy)


def one_iteration(core: Core) -> None:
    """Every method of a policy is asked."""
    core.begin_iteration([(3, "decode", 1, True)], np.ones((1, 2), np.float16))
    for layer in range(3):
        core.gate(layer, np.full((1, 2), 0.5), [0], [1], row_counts=np.array([[1, 0]], np.int32))
        core.loaded(2 * layer)
        core.computed_chunk()
    core.end_iteration(finished=[3])


class MistakeError(Exception):
    """A user's own."""


def raising(*_: object) -> object:
    raise MistakeError("mine")


@pytest.mark.parametrize("method", ["begin_iteration", "gate", "end_iteration", "eviction_key"])
def test_a_policys_exception_is_raised_from_the_event_and_ends_the_run(method: str) -> None:
    policy = Policy()
    one_iteration(policy_core(policy))
    setattr(policy, method, raising)
    core = policy_core(policy)
    with pytest.raises(MistakeError, match="mine") as raised:
        one_iteration(core)
    assert raised.traceback[-1].name == "raising", "the user's own line ends the traceback"
    events: list[Callable[[], int]] = [
        lambda: core.begin_iteration([(3, "decode", 1, False)]),
        lambda: core.gate(0, np.ones((1, 2)), [0], [1], row_counts=np.array([[1, 0]], np.int32)),
        lambda: core.end_iteration(finished=[]),
        lambda: core.loaded(0),
        lambda: core.computed(0, [0]),
    ]
    for event in events:
        with pytest.raises(CoreError):
            event()


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("begin_iteration", {0: [0.5]}),
        ("begin_iteration", {3: [0.5, 0.5]}),
        ("begin_iteration", {-1: [0.5, 0.5]}),
        ("begin_iteration", {0: [0.5, -0.5]}),
        ("begin_iteration", {0: [0.5, np.inf]}),
        ("begin_iteration", {0: [np.nan, 0.5]}),
        ("begin_iteration", {0: [[0.5, 0.5]]}),
        ("begin_iteration", {0: "much"}),
        ("begin_iteration", {"first": [0.5, 0.5]}),
        ("begin_iteration", [0.5, 0.5]),
        ("begin_iteration", None),
        ("gate", {0: [0.5, 0.5]}),
        ("gate", None),
        ("eviction_key", np.nan),
        ("eviction_key", "much"),
        ("eviction_key", None),
    ],
)
def test_a_policys_useless_answer_ends_the_run(method: str, answer: object) -> None:
    policy = Policy()
    setattr(policy, method, lambda *_: answer)
    core = policy_core(policy)
    with pytest.raises((CoreError, TypeError, ValueError)):
        one_iteration(core)
    with pytest.raises(CoreError):
        core.begin_iteration([(3, "decode", 1, False)])


@pytest.mark.parametrize("method", ["begin_iteration", "gate", "end_iteration", "eviction_key"])
def test_a_policy_that_calls_the_core_is_refused(method: str) -> None:
    policy = Policy()
    core = policy_core(policy)
    setattr(policy, method, lambda *_: core.loaded(0))
    with pytest.raises(CoreError):
        one_iteration(core)
    with pytest.raises(CoreError):
        core.begin_iteration([(3, "decode", 1, False)])


def test_a_policy_comes_with_plugin_and_only_with_it() -> None:
    sizes = {"layers": 1, "experts": 2, "top_k": 1, "slots_per_device": 1}
    for part in ("predictor", "eviction"):
        options = plain_options(**sizes) | {part: "plugin"}
        with pytest.raises((CoreError, TypeError)):
            Core(make_config(options))
    with pytest.raises((CoreError, TypeError)):
        Core(make_config(plain_options(**sizes)), policy=Policy())


@pytest.mark.parametrize(
    "row_counts",
    [
        None,
        np.array([[1, 1]], np.int32),
        np.array([[2, 0]], np.int32),
        np.array([[1]], np.int32),
        np.array([1, 0], np.int32),
        np.array([[1, 0], [1, -0]], np.int32),
        "abc",
    ],
)
def test_row_counts_that_do_not_fit_are_refused_and_change_nothing(row_counts: Any) -> None:
    core = policy_core(Policy())
    core.begin_iteration([(3, "decode", 1, False)])
    with pytest.raises((CoreError, TypeError, ValueError)):
        core.gate(0, np.full((1, 2), 0.5), [0], [1], row_counts=row_counts)
    core.gate(0, np.full((1, 2), 0.5), [0], [1], row_counts=np.array([[1, 0]], np.int32))

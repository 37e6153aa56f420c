"""Between the core and a user's policy: answers are checked, what goes wrong names method and place."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import PolicyError
from .plugin import ExpertView, Policy, Row

#: What a user's code may raise: Ctrl-C alone is not its own.
USERS_ERRORS = (Exception, SystemExit)
_INTERNAL = (__file__, "<frozen importlib")


class GuardedPolicy:
    """What the core calls in place of the policy; the same methods, with the core's own types."""

    def __init__(self, name: str, policy: Policy, layers: int, experts: int) -> None:
        self._name = name
        self._policy = policy
        self._layers = layers
        self._experts = experts

    def begin_iteration(
        self, rows: list[tuple[int, str, int]], embeddings: NDArray[np.float16] | None
    ) -> dict[int, NDArray[np.float32]]:
        """The policy's predictions as the core takes them."""
        named = [Row._make(row) for row in rows]
        try:
            answer = self._policy.begin_iteration(named, embeddings)
        except USERS_ERRORS as error:
            self._fail("begin_iteration", -1, error)
        return self._predictions("begin_iteration", -1, answer)

    def gate(
        self, layer: int, probabilities: NDArray[np.float32], row_counts: NDArray[np.int32]
    ) -> dict[int, NDArray[np.float32]]:
        """The policy's predictions as the core takes them."""
        try:
            answer = self._policy.gate(layer, probabilities, row_counts)
        except USERS_ERRORS as error:
            self._fail("gate", layer, error)
        return self._predictions("gate", layer, answer)

    def end_iteration(self, finished: list[int]) -> None:
        """Tells the policy."""
        try:
            self._policy.end_iteration(finished)
        except USERS_ERRORS as error:
            self._fail("end_iteration", self._layers - 1, error)

    def eviction_key(self, view: ExpertView) -> float:
        """The policy's key, a number."""
        try:
            key = self._policy.eviction_key(view)
        except USERS_ERRORS as error:
            self._fail("eviction_key", view.layer_now, error)
        if type(key) is float and not math.isnan(key):
            return key
        try:
            number = math.nan if isinstance(cast(object, key), str) else float(key)
        except USERS_ERRORS:  # also what a `__float__` of the user's raises, and a whole number too large
            number = math.nan
        if math.isnan(number):
            self._refuse("eviction_key", view.layer_now, f"returned {_shown(key)}. Return a number, no NaN")
        return number

    def _predictions(self, method: str, layer_now: int, answer: object) -> dict[int, NDArray[np.float32]]:
        rows: dict[int, NDArray[np.float32]] = {}
        if not isinstance(answer, Mapping):
            wanted = f"Return {{layer: row of {self._experts} values}}, or {{}}"
            self._refuse(method, layer_now, f"returned {_shown(answer)}. {wanted}")
        try:
            entries = list(answer.items())
        except USERS_ERRORS as error:
            self._fail(method, layer_now, error)
        for layer, row in entries:
            if isinstance(layer, bool) or not isinstance(layer, int | np.integer):
                self._refuse(method, layer_now, f"predicts for layer {_shown(layer)}. Give whole numbers")
            if not layer_now < layer < self._layers:
                later = f"Give layers {layer_now + 1} to {self._layers - 1}"
                if layer_now == self._layers - 1:
                    later = "No layer comes after it; return {}"
                self._refuse(method, layer_now, f"predicts for layer {layer}. {later}")
            rows[int(layer)] = self._row(method, layer_now, int(layer), row)
        return rows

    def _row(self, method: str, layer_now: int, layer: int, row: object) -> NDArray[np.float32]:
        try:
            with np.errstate(over="ignore"):
                given = np.asarray(row)
                # Numbers only: text and complex ones would be converted in silence.
                numbers = given.dtype.kind in "biuf"
                values = given.astype(np.float32) if numbers else np.empty(0, np.float32)
        except USERS_ERRORS:
            values = np.empty(0, np.float32)
        if values.shape != (self._experts,):
            has = f"values of shape {values.shape}" if values.size else _shown(row)
            wanted = f"Give a row of {self._experts} numbers"
            self._refuse(method, layer_now, f"predicts {has} for layer {layer}. {wanted}")
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0.0)))
        if wrong.size:
            expert = int(wrong[0])
            what = f"predicts {values[expert]} for expert {expert} of layer {layer}"
            self._refuse(method, layer_now, f"{what}. Give finite numbers of 0 or more")
        return values

    def _fail(self, method: str, layer_now: int, error: BaseException) -> NoReturn:
        raise PolicyError(self._name, _place(method, layer_now), "failed", users_traceback(error)) from error

    def _refuse(self, method: str, layer_now: int, problem: str) -> NoReturn:
        raise PolicyError(self._name, _place(method, layer_now), f"{problem}.")


def users_traceback(error: BaseException, internal: Sequence[str] = ()) -> str:
    """The traceback from the user's first frame on: frames of ours or of `internal` are left out before."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith((*_INTERNAL, *internal)):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _place(method: str, layer_now: int) -> str:
    return f"{method} before layer 0" if layer_now < 0 else f"{method} at layer {layer_now}"


def _shown(value: object) -> str:
    """A value in a few characters; the user's own repr may fail."""
    try:
        text = " ".join(repr(value).split())
    except USERS_ERRORS:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}…"

"""What the oracle is told: the remaining routing of running requests, never of requests to come."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..policy.core import Core, Feed
    from ..serving.request import RequestState
    from ..serving.scheduler import Step

HORIZON = 32  # iterations ahead; next uses beyond it count as never


class Foresight:
    """Keeps the core informed about the next iterations, as if no further request arrived."""

    def __init__(self, core: Core, feed: Feed, layers: int) -> None:
        self._core = core
        self._feed = feed
        self._layers = layers
        self._iteration = -1  # the last one begun
        self._known = 0  # iterations before this one are known

    def before(self, step: Step, running: tuple[RequestState, ...], now_s: float) -> int:
        """Call before each step; `running` includes the step's requests. Returns the core's mask."""
        self._iteration += 1
        iteration = self._iteration
        if step.phase == "prefill":  # the running requests have changed: tell everything anew
            self._tell(iteration, step.requests, [state.generated for state in step.requests], 1, now_s)
            self._known = iteration + 1
        prefilled = step.requests if step.phase == "prefill" else ()
        ahead = self._known - iteration - (1 if step.phase == "prefill" else 0)
        places = [state.generated + (1 if state in prefilled else 0) + ahead for state in running]
        count = iteration + 1 + HORIZON - self._known
        mask = self._tell(self._known, running, places, count, now_s)
        self._known += count
        return mask

    def _tell(
        self,
        iteration: int,
        requests: tuple[RequestState, ...],
        places: list[int],
        count: int,
        now_s: float,
    ) -> int:
        ids = [state.request.index for state in requests]
        return self._feed.foresee(self._core, iteration * self._layers, ids, places, count, now_s)

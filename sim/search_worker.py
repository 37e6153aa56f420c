"""The searcher beside inference: one worker that runs searches and store updates in ticket order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import simpy

from ..policy.core import OUTBOXES
from .events import SEARCH_DONE, Timer

if TYPE_CHECKING:
    from ..calibration.profile import HardwareProfile
    from ..policy.core import Core


class SearchWorker:
    """Carries out the core's search outbox; a search takes a fixed time plus work over the scan rate."""

    def __init__(
        self, env: simpy.Environment, core: Core, profile: HardwareProfile, deliver: Callable[[int], None]
    ) -> None:
        self._env = env
        self._core = core
        self._latency_s = profile.search_latency_s
        self._rate = profile.search_rate
        self._deliver = deliver
        self._queue: deque[tuple[int, int]] = deque()
        self._ticket = -1  # the one being worked on
        self._timer = Timer(env, SEARCH_DONE, self._done)
        self._waited = -1  # the ticket that the forward pass waits for
        self._waiter: Timer | None = None
        self.busy_s = 0.0

    def drain(self) -> None:
        """Take the commands from the core's search outbox."""
        for _, ticket, _, _, _, work, _ in self._core.take_searches():
            if self._ticket < 0:
                self._start(ticket, work)
            else:
                self._queue.append((ticket, work))

    def wait(self, ticket: int, waiter: Timer) -> Timer:
        """`waiter`, which fires when the search, not yet done, is done."""
        self._waited, self._waiter = ticket, waiter
        return waiter.wait()

    def _start(self, ticket: int, work: int) -> None:
        search_s = self._latency_s + work / self._rate
        self._ticket = ticket
        self.busy_s += search_s
        self._timer.start(search_s)

    def _done(self, _: simpy.Event) -> None:
        ticket, self._ticket = self._ticket, -1
        mask = self._core.search_done(ticket, self._env.now)
        if mask & OUTBOXES:  # a search makes nothing resident, so nobody else can be waiting for it
            self._deliver(mask)
        if ticket == self._waited and self._waiter is not None:
            self._waited = -1
            self._waiter.fire()
        while self._queue and self._ticket < 0:
            ticket, work = self._queue.popleft()
            if not self._core.search_abandoned(ticket):  # its iteration ended while it waited
                self._start(ticket, work)

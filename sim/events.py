"""Order of simulated events, and the timer that the world is made of."""

from __future__ import annotations

from collections.abc import Callable

import simpy
from simpy.events import EventPriority

# At equal simulated time: loads, pauses, search results, then what the engine does, then arrivals.
# SimPy's own urgent and normal priorities are 0 and 1.
LOADED, PAUSED, SEARCH_DONE, ENGINE, ARRIVAL = (EventPriority(n) for n in range(2, 7))


class Timer(simpy.Event):
    """An event with a priority that can be started again once it has fired.

    `simpy.Timeout` knows no priority and is made anew each time, which costs more than a layer's core event.
    """

    def __init__(
        self,
        env: simpy.Environment,
        priority: EventPriority,
        callback: Callable[[simpy.Event], None] | None = None,
    ) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self._priority = priority
        self._callback = callback

    def wait(self) -> Timer:
        """Make it an event that a process can wait for; `fire` ends the wait."""
        self.callbacks = [] if self._callback is None else [self._callback]
        return self

    def fire(self, delay_s: float = 0.0) -> None:
        """Let it happen `delay_s` from now."""
        self.env.schedule(self, self._priority, delay_s)

    def start(self, delay_s: float) -> Timer:
        """`wait` and `fire` in one."""
        self.callbacks = [] if self._callback is None else [self._callback]
        self.env.schedule(self, self._priority, delay_s)
        return self

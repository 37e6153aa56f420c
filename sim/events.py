"""Order of simulated events, and the timer that the world is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

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


class Alarm:
    """A call at one time to come, which can be put off or called off.

    A scheduled `Timer` cannot be taken back, so one that no longer counts is left to fire and then kept for
    another turn.
    """

    def __init__(self, env: simpy.Environment, priority: EventPriority, callback: Callable[[], None]) -> None:
        self._env = env
        self._priority = priority
        self._callback = callback
        self._timer: Timer | None = None  # the one that counts
        self._spare: list[Timer] = []

    @property
    def pending(self) -> bool:
        """Whether a call is to come."""
        return self._timer is not None

    def set(self, delay_s: float) -> None:
        """Call at `delay_s` from now, and not when an earlier `set` said."""
        self._timer = self._spare.pop() if self._spare else Timer(self._env, self._priority, self._fired)
        self._timer.start(delay_s)

    def cancel(self) -> None:
        """Do not call."""
        self._timer = None

    def _fired(self, timer: simpy.Event) -> None:
        self._spare.append(cast("Timer", timer))
        if timer is self._timer:
            self._timer = None
            self._callback()

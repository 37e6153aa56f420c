"""Order of simulated events, and the timer that the world is made of."""

from __future__ import annotations

from collections.abc import Callable

import simpy

# At equal simulated time: loads, pauses, search results, then what the engine does, then arrivals.
# SimPy's own urgent and normal priorities are 0 and 1.
LOADED, PAUSED, SEARCH_DONE, ENGINE, ARRIVAL = 2, 3, 4, 5, 6


class Timer(simpy.Event):
    """Fires `delay_s` from now with one of the priorities above (`simpy.Timeout` knows no priority)."""

    def __init__(
        self,
        env: simpy.Environment,
        delay_s: float,
        priority: int,
        callback: Callable[[simpy.Event], None] | None = None,
    ) -> None:
        self.env = env
        self.callbacks = [] if callback is None else [callback]
        self._ok = True
        self._value = None
        env.schedule(self, priority, delay_s)

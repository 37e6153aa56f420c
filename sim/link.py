"""One device's host link: latency plus bytes over bandwidth, one copy at a time, preemptible by chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import simpy

from .events import LOADED, PAUSED, Timer

if TYPE_CHECKING:
    from ..calibration.profile import HardwareProfile
    from ..policy.core import Core


class Copies:
    """How many copies are in flight on all links together; a copy slows computation down."""

    in_flight = 0

    @property
    def busy(self) -> bool:
        """Whether there is any."""
        return self.in_flight > 0


class Link:
    """Carries out one device's outbox.

    A chunk costs no event of its own: where a copy stops is computed when it is asked to pause. `deliver`
    takes the mask that the core returns. Host memory holds every expert and keeps up with all links: where it
    does not, `HostLink` takes this one's place.
    """

    def __init__(
        self,
        env: simpy.Environment,
        core: Core,
        device: int,
        profile: HardwareProfile,
        copies: Copies,
        deliver: Callable[[int], None],
        *,
        write_back: bool = False,
    ) -> None:
        self._env = env
        self._core = core
        self._copies = copies
        self._device = device
        directions = 2 if write_back else 1  # one after the other: the victim to the host, then the expert
        self._latency_s = profile.link_latency_s * directions
        self._bandwidth = profile.link_bandwidth / directions
        self._chunk_bytes = profile.link_chunk_bytes
        self._deliver = deliver
        self._timer = Timer(env, LOADED, self._loaded)
        self._spare_timers: list[Timer] = []
        self._pause_timer = Timer(env, PAUSED, self._paused)
        self.busy = False  # a copy is in flight
        self._expert = -1
        self._offset = self._size = 0
        self._began_s = 0.0
        self.busy_s = 0.0  # of finished copies
        self.bytes_moved = 0

    def busy_until(self, now_s: float) -> float:
        """Seconds in which a copy ran until now, the one in flight included."""
        return self.busy_s + (now_s - self._began_s if self.busy else 0.0)

    def drain(self) -> None:
        """Take the commands from the core's outbox of this device."""
        for command in self._core.take_device(self._device):
            if len(command) == 2:  # PreemptPrefetch(device)
                self._pause()
                continue
            _, self._expert, _, _, self._offset, size, _, _ = command
            self._size = size
            self._began_s = self._env.now
            self.busy = True
            self._copies.in_flight += 1
            self._timer.start(self._latency_s + size / self._bandwidth)

    def _loaded(self, timer: simpy.Event) -> None:
        if timer is self._timer:
            self._deliver(self._core.loaded(self._expert, self._finish()))
        else:  # of a copy that was paused before its end
            self._spare_timers.append(cast("Timer", timer))

    def _pause(self) -> None:
        """PreemptPrefetch: the chunk in the copier finishes; if it is the last one, so does the load."""
        copied_s = self._env.now - self._began_s - self._latency_s
        chunk_s = self._chunk_bytes / self._bandwidth
        size = max(1, math.ceil(copied_s / chunk_s)) * self._chunk_bytes
        if size >= self._size:
            return
        end_s = self._began_s + self._latency_s + size / self._bandwidth
        self._size = size
        # The timer that runs no longer counts.
        spare = self._spare_timers
        self._timer = spare.pop() if spare else Timer(self._env, LOADED, self._loaded)
        self._pause_timer.start(max(0.0, end_s - self._env.now))

    def _paused(self, _: simpy.Event) -> None:
        now = self._finish()
        self._deliver(self._core.paused(self._expert, self._offset + self._size, now))

    def _finish(self) -> float:
        now = self._env.now
        self.busy = False
        self._copies.in_flight -= 1
        self.busy_s += now - self._began_s
        self.bytes_moved += self._size
        return now

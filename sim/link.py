"""Host links: latency plus bytes over bandwidth, one copy at a time on each, preemptible by chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

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


class Landings:
    """Copies that end at one moment, on whatever links: one event of the simulation for all of them.

    Experts are equally large, so devices that start together end together, load after load.
    """

    def __init__(self, env: simpy.Environment, core: Core, deliver: Callable[[int], None]) -> None:
        self._env = env
        self._core = core
        self._deliver = deliver
        self._links: dict[float, list[Link]] = {}  # by the time at which their copies end
        self._spare_timers: list[Timer] = []

    def expect(self, link: Link, now_s: float, delay_s: float) -> float:
        """The link's copy ends `delay_s` from now, unless it is paused before; returns when that is."""
        end_s = now_s + delay_s
        links = self._links.get(end_s)
        if links is not None:
            links.append(link)
            return end_s
        self._links[end_s] = [link]
        spare = self._spare_timers
        (spare.pop() if spare else Timer(self._env, LOADED, self._landed)).start(delay_s)
        return end_s

    def _landed(self, timer: simpy.Event) -> None:
        self._spare_timers.append(cast("Timer", timer))
        now = self._env.now
        links = self._links.pop(now)
        if len(links) == 1:
            if links[0].end_s == now:
                self._deliver(self._core.loaded(links[0].finish(now), now))
            return
        landed = [link.finish(now) for link in links if link.end_s == now]
        if landed:
            self._deliver(self._core.loaded_all(landed, now))


def hand_over(core: Core, links: Sequence[Link]) -> None:
    """Take the core's commands for devices; each link, numbered as its device, carries out its own."""
    for command in core.take_devices():
        links[command[2] if len(command) > 2 else command[1]].obey(command)


class Link:
    """Carries out one device's commands.

    A chunk costs no event of its own: where a copy stops is computed when it is asked to pause. `deliver`
    takes the mask that the core returns. Host memory holds every expert and keeps up with all links: where it
    does not, `HostLink` takes this one's place.
    """

    def __init__(
        self,
        env: simpy.Environment,
        core: Core,
        profile: HardwareProfile,
        copies: Copies,
        landings: Landings,
        deliver: Callable[[int], None],
        *,
        write_back: bool = False,
    ) -> None:
        self._env = env
        self._core = core
        self._copies = copies
        self._landings = landings
        directions = 2 if write_back else 1  # one after the other: the victim to the host, then the expert
        self._latency_s = profile.link_latency_s * directions
        self._bandwidth = profile.link_bandwidth / directions
        self._chunk_bytes = profile.link_chunk_bytes
        self._deliver = deliver
        self._pause_timer = Timer(env, PAUSED, self._paused)
        self.busy = False  # a copy is in flight
        self.end_s = -1.0  # when it ends, where it is not to pause
        self._expert = -1
        self._offset = self._size = 0
        self._began_s = 0.0
        self.busy_s = 0.0  # of finished copies
        self.bytes_moved = 0

    def busy_until(self, now_s: float) -> float:
        """Seconds in which a copy ran until now, the one in flight included."""
        return self.busy_s + (now_s - self._began_s if self.busy else 0.0)

    def obey(self, command: tuple[Any, ...]) -> None:
        """Carry out a command of the core: PreemptPrefetch(device) or Load."""
        if len(command) == 2:
            self._pause()
            return
        _, self._expert, _, _, self._offset, size, _, _ = command
        self._size = size
        self._began_s = now = self._env.now
        self.busy = True
        self._copies.in_flight += 1
        self.end_s = self._landings.expect(self, now, self._latency_s + size / self._bandwidth)

    def finish(self, now_s: float) -> int:
        """The copy ends now; returns its expert."""
        self.busy = False
        self.end_s = -1.0
        self._copies.in_flight -= 1
        self.busy_s += now_s - self._began_s
        self.bytes_moved += self._size
        return self._expert

    def _pause(self) -> None:
        """PreemptPrefetch: the chunk in the copier finishes; if it is the last one, so does the load."""
        copied_s = self._env.now - self._began_s - self._latency_s
        chunk_s = self._chunk_bytes / self._bandwidth
        size = max(1, math.ceil(copied_s / chunk_s)) * self._chunk_bytes
        if size >= self._size:
            return
        end_s = self._began_s + self._latency_s + size / self._bandwidth
        self._size = size
        self.end_s = -1.0
        self._pause_timer.start(max(0.0, end_s - self._env.now))

    def _paused(self, _: simpy.Event) -> None:
        now = self._env.now
        self._deliver(self._core.paused(self.finish(now), self._offset + self._size, now))

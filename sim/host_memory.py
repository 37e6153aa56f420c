"""Host memory that does not hold every expert, or does not keep up with all links.

An expert that host memory does not hold is read from an SSD first. Host memory is a cache of experts in front
of it, least recently used first out and empty at the start: a model of the operating system's page cache, in
which the policy core has no say. Copies in flight share host memory's bandwidth evenly.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import simpy

from .events import LOADED, PAUSED, Alarm
from .link import Copies, Landings, Link

if TYPE_CHECKING:
    from ..calibration.profile import HardwareProfile
    from ..policy.core import Core
    from .memory import MemoryPlan


class HostBandwidth:
    """The rate, in bytes/s, at which each of the copies in flight gets on."""

    def __init__(self, profile: HardwareProfile, *, write_back: bool = False) -> None:
        shared = math.inf if profile.host_bandwidth is None else profile.host_bandwidth
        directions = 2 if write_back else 1  # as for a Link: as many bytes go the other way first
        counts = range(1, profile.devices + 1)
        self._rates = [min(profile.link_bandwidth, shared / count) / directions for count in counts]
        self._copying: list[HostLink] = []

    def join(self, link: HostLink) -> float:
        """A copy begins; returns its rate. The others go on at their new one."""
        others = tuple(self._copying)
        self._copying.append(link)
        return self._spread(others)

    def leave(self, link: HostLink) -> None:
        """A copy has ended."""
        self._copying.remove(link)
        if self._copying:
            self._spread(tuple(self._copying))

    def _spread(self, links: tuple[HostLink, ...]) -> float:
        rate = self._rates[len(self._copying) - 1]
        for link in links:
            link.go_on_at(rate)
        return rate


class HostMemory:
    """Experts in host memory in front of an SSD: one read at a time, of demands before prefetches.

    Reads of one kind are first come, first served; a read is not interrupted for another device's demand.
    What a stopped read has brought stays, as pages do, until the expert's slot is taken. A prefetch that is
    required meanwhile goes on as a prefetch: the core does not say so.
    """

    def __init__(
        self, env: simpy.Environment, slots: int, expert_bytes: int, profile: HardwareProfile
    ) -> None:
        if profile.ssd_bandwidth is None or profile.ssd_latency_s is None:
            raise ValueError("without an SSD host memory holds every expert")
        self._env = env
        self._slots = slots
        self._expert_bytes = expert_bytes
        self._latency_s = profile.ssd_latency_s
        self._bandwidth = profile.ssd_bandwidth
        self._chunk_bytes = profile.link_chunk_bytes
        # Expert → bytes of it that are here. With a slot per device one can always be taken: a device has one
        # load at most, and takes a slot only when it reads or copies.
        self._held: OrderedDict[int, int] = OrderedDict()
        self._in_use: set[int] = set()  # being read or copied
        self._demands: deque[tuple[HostLink, int]] = deque()
        self._prefetches: deque[tuple[HostLink, int]] = deque()
        self._reader: HostLink | None = None  # whose expert is being read
        self._expert = -1
        self._size = 0
        self._began_s = 0.0
        # A read starts in an event of its own, so that all the commands of one moment are known.
        self._start_alarm = Alarm(env, LOADED, self._start)
        self._read_alarm = Alarm(env, LOADED, self._read)
        self._stop_alarm = Alarm(env, PAUSED, self._stopped)
        self.hits = 0  # loads whose expert was here
        self.misses = 0
        self.bytes_read = 0
        self.busy_s = 0.0  # of finished reads

    def counters(self) -> dict[str, int]:
        """What the results say of host memory and SSD."""
        return {"host_hits": self.hits, "host_misses": self.misses, "ssd_bytes": self.bytes_read}

    def busy_until(self, now_s: float) -> float:
        """Seconds in which the SSD read until now, the read in progress included."""
        return self.busy_s + (now_s - self._began_s if self._reader is not None else 0.0)

    def fetch(self, link: HostLink, expert: int, *, demand: bool) -> None:
        """Let the link copy the expert as soon as it is here."""
        if self._held.get(expert) == self._expert_bytes:
            self.hits += 1
            self._held.move_to_end(expert)
            self._in_use.add(expert)
            link.copy()
            return
        self.misses += 1
        (self._demands if demand else self._prefetches).append((link, expert))
        self._next()

    def release(self, expert: int) -> None:
        """The copy of the expert has ended; its slot may be taken."""
        self._in_use.discard(expert)

    def stop(self, link: HostLink) -> None:
        """The link's load is to pause: a read ends with its chunk, a queued one does not begin."""
        if link is not self._reader:
            entry = next(entry for entry in self._prefetches if entry[0] is link)
            self._prefetches.remove(entry)
            link.give_up(0.0)
            return
        read_s = self._env.now - self._began_s - self._latency_s
        chunks = max(1, math.ceil(read_s * self._bandwidth / self._chunk_bytes))
        self._size = min(self._size, chunks * self._chunk_bytes)
        self._read_alarm.cancel()
        end_s = self._began_s + self._latency_s + self._size / self._bandwidth
        self._stop_alarm.set(max(0.0, end_s - self._env.now))

    def _next(self) -> None:
        if self._reader is None and not self._start_alarm.pending and (self._demands or self._prefetches):
            self._start_alarm.set(0.0)

    def _start(self) -> None:
        if not self._demands and not self._prefetches:
            return  # the one that waited was stopped
        self._reader, expert = (self._demands or self._prefetches).popleft()
        if expert not in self._held:
            if len(self._held) >= self._slots:
                del self._held[next(other for other in self._held if other not in self._in_use)]
            self._held[expert] = 0
        self._held.move_to_end(expert)
        self._in_use.add(expert)
        self._expert = expert
        self._size = self._expert_bytes - self._held[expert]
        self._began_s = self._env.now
        self._read_alarm.set(self._latency_s + self._size / self._bandwidth)

    def _read(self) -> None:
        link = self._end_read()
        link.copy()
        self._next()

    def _stopped(self) -> None:
        expert = self._expert
        link = self._end_read()
        self._in_use.discard(expert)
        link.give_up_now()
        self._next()

    def _end_read(self) -> HostLink:
        link, self._reader = self._reader, None
        assert link is not None
        self._held[self._expert] += self._size
        self.bytes_read += self._size
        self.busy_s += self._env.now - self._began_s
        return link


class HostLink(Link):
    """A link whose copies wait for an SSD or share host memory's bandwidth.

    A load that waits for the SSD is not a copy: the link is not busy, computation not slowed down. A copy has
    its share of the bandwidth from its start, its latency included.
    """

    def __init__(
        self,
        env: simpy.Environment,
        core: Core,
        profile: HardwareProfile,
        copies: Copies,
        landings: Landings,
        deliver: Callable[[int], None],
        bandwidth: HostBandwidth,
        memory: HostMemory | None,
        *,
        write_back: bool = False,
    ) -> None:
        super().__init__(env, core, profile, copies, landings, deliver, write_back=write_back)
        self._share = bandwidth
        self._memory = memory
        self._rate = 0.0
        # Bytes that were copied by `_since_s`, from when on they flow at `_rate`.
        self._copied = 0.0
        self._since_s = 0.0
        self._stopping = False  # the copy ends in a pause
        self._load_alarm = Alarm(env, LOADED, self._copied_all)
        self._stop_alarm = Alarm(env, PAUSED, self._copied_part)
        self._give_up_alarm = Alarm(env, PAUSED, self.give_up_now)

    def obey(self, command: tuple[Any, ...]) -> None:
        """See `Link`."""
        if len(command) == 2:
            self._pause()
            return
        _, self._expert, _, _, self._offset, self._size, kind, _ = command
        if self._memory is None:
            self.copy()
        else:
            self._memory.fetch(self, self._expert, demand=kind == "demand")

    def copy(self) -> None:
        """Host memory holds the expert: copy it."""
        self._began_s = self._env.now
        self.busy = True
        self._copies.in_flight += 1
        self._stopping = False
        self._copied = 0.0
        self._since_s = self._began_s + self._latency_s
        self._rate = self._share.join(self)
        self._set()

    def go_on_at(self, rate: float) -> None:
        """The number of copies in flight has changed."""
        if rate == self._rate:
            return
        now = self._env.now
        if now > self._since_s:
            self._copied += (now - self._since_s) * self._rate
            self._since_s = now
        self._rate = rate
        self._set()

    def give_up_now(self) -> None:
        """The load pauses before its copy has begun: nothing has reached the device."""
        self._deliver(self._core.paused(self._expert, self._offset, self._env.now))

    def give_up(self, delay_s: float) -> None:
        """`give_up_now`, in an event of its own."""
        self._give_up_alarm.set(delay_s)

    def _set(self) -> None:
        end_s = self._since_s + (self._size - self._copied) / self._rate
        (self._stop_alarm if self._stopping else self._load_alarm).set(max(0.0, end_s - self._env.now))

    def _pause(self) -> None:
        if not self.busy:
            assert self._memory is not None
            self._memory.stop(self)
            return
        copied = self._copied + max(0.0, self._env.now - self._since_s) * self._rate
        size = max(1, math.ceil(copied / self._chunk_bytes)) * self._chunk_bytes
        if size >= self._size:
            return  # the last chunk: the load completes
        self._size = size
        self._stopping = True
        self._load_alarm.cancel()
        self._set()

    def _copied_all(self) -> None:
        now = self._env.now
        self._deliver(self._core.loaded(self.finish(now), now))

    def _copied_part(self) -> None:
        now = self._env.now
        self._deliver(self._core.paused(self.finish(now), self._offset + self._size, now))

    def finish(self, now_s: float) -> int:
        """See `Link`."""
        expert = super().finish(now_s)
        if self._memory is not None:
            self._memory.release(expert)
        self._share.leave(self)
        return expert


def make_links(
    env: simpy.Environment,
    core: Core,
    profile: HardwareProfile,
    memory: MemoryPlan,
    copies: Copies,
    deliver: Callable[[int], None],
    *,
    write_back: bool,
) -> tuple[list[Link], HostMemory | None]:
    """A link per device, and host memory where it is a cache in front of an SSD.

    Where host memory holds every expert and its bandwidth never binds, links are the plain ones, which cost
    nothing more.
    """
    held = None
    if memory.ssd:
        held = HostMemory(env, memory.host_slots, memory.expert_bytes, profile)
    binds = profile.host_bandwidth is not None and (
        profile.devices * profile.link_bandwidth > profile.host_bandwidth
    )
    devices = range(profile.devices)
    landings = Landings(env, core, deliver)
    if held is None and not binds:
        plain = [Link(env, core, profile, copies, landings, deliver, write_back=write_back) for _ in devices]
        return plain, None
    share = HostBandwidth(profile, write_back=write_back)
    links: list[Link] = [
        HostLink(env, core, profile, copies, landings, deliver, share, held, write_back=write_back)
        for _ in devices
    ]
    return links, held


def ssd_note(counters: Mapping[str, int], busy_s: float, span_s: float) -> tuple[str, ...]:
    """What a run has to say of its SSD: nothing where nothing was loaded past it."""
    loads = counters.get("host_hits", 0) + counters.get("host_misses", 0)
    if not loads:
        return ()
    return (
        f"SSD: {counters['ssd_bytes'] / 1e9:.4g} GB read, busy {busy_s / span_s:.1%} of the time; "
        f"host memory had the expert of {counters['host_hits'] / loads:.1%} of the loads",
    )

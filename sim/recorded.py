"""A recorded decision log as what drives the simulator: its iterations, gates and compute times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..serving.decisions import KINDS
from ..serving.request import RequestState
from ..serving.scheduler import Step
from ..traces.requests import Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..policy.core import Core
    from ..serving.log_rows import LogRows

_DECODE = 1  # bit of a row's phase


@dataclass(frozen=True)
class RecordedIteration:
    """Rows of the log: where the iteration begins and ends, its gate of each layer, its speculations by
    (layer, target). `idle_s`: between the end of the one before and its begin."""

    step: Step
    begin: int
    end: int
    gates: tuple[int, ...]
    speculations: dict[tuple[int, int], int]
    idle_s: float


def iterations_of(rows: LogRows) -> list[RecordedIteration]:
    """The whole iterations of a log, each with the requests that it served."""
    kind = {name: KINDS.index(name) for name in ("begin_iteration", "gate", "speculation", "end_iteration")}
    begins, ends = (np.flatnonzero(rows.kind == kind[f"{at}_iteration"]).tolist() for at in ("begin", "end"))
    times = rows.column("time_s")
    running: dict[int, RequestState] = {}
    found = []
    for number, (begin, end) in enumerate(zip(begins, ends, strict=False)):
        part = rows.kind[begin:end]
        gates = tuple((np.flatnonzero(part == kind["gate"]) + begin).tolist())
        guesses = (np.flatnonzero(part == kind["speculation"]) + begin).tolist()
        found.append(
            RecordedIteration(
                step=_step(rows, begin, end, running),
                begin=begin,
                end=end,
                gates=gates,
                speculations={
                    (int(rows.column("layer")[i]), int(rows.column("target")[i])): i for i in guesses
                },
                idle_s=float(times[begin] - times[ends[number - 1]]) if number else 0.0,
            )
        )
    return found


def _step(rows: LogRows, begin: int, end: int, running: dict[int, RequestState]) -> Step:
    """The requests of an iteration as the scheduler would hand them out; `running` is kept."""
    requests, tokens, phases = (rows.items(name, begin).tolist() for name in ("requests", "tokens", "phases"))
    finished = set(rows.items("requests", end).tolist())
    decode = bool(phases[0] & _DECODE)
    states = []
    for request, count in zip(requests, tokens, strict=True):
        before = running.get(request)
        prompt = before.request.prompt_tokens if before is not None else count
        generated = before.generated if before is not None else int(decode)
        # The last iteration is told by the log; until then there is more to come.
        output = generated + 1 if request in finished else generated + 2
        states.append(RequestState(Request(request, 0.0, prompt, output), generated))
        running[request] = RequestState(Request(request, 0.0, prompt, output), generated + 1)
    return Step("decode" if decode else "prefill", tuple(states))


class RecordedFeed:
    """Plays a log's gates into another core, iteration by iteration; in place of the core's own feed."""

    def __init__(self, rows: LogRows, iterations: Sequence[RecordedIteration]) -> None:
        self._rows, self._iterations = rows, iterations
        self._next = -1

    def select(
        self, requests: Sequence[int], iterations: Sequence[int], tokens: Sequence[int], prefill: bool
    ) -> None:
        """The next iteration of the log, which is the one that is asked for."""
        self._next += 1

    def token_counts(self) -> NDArray[np.int32]:
        """Tokens per expert of the iteration, [L, J]."""
        rows = self._rows
        counts = np.zeros((rows.layers, rows.experts), np.int32)
        for layer, gate in enumerate(self._iterations[self._next].gates):
            experts = rows.items("experts", gate)
            counts[layer, experts] = rows.items("token_counts", gate)[: len(experts)]
        return counts

    def begin_iteration(self, core: Core, time_s: float = 0.0) -> int:
        """Play it."""
        return self._rows.feed(core, self._iterations[self._next].begin, time_s)

    def gate(self, core: Core, layer: int, time_s: float = 0.0) -> int:
        """Play it."""
        return self._rows.feed(core, self._iterations[self._next].gates[layer], time_s)

    def speculation(self, core: Core, layer: int, target: int, time_s: float = 0.0) -> int:
        """Play it."""
        return self._rows.feed(core, self._iterations[self._next].speculations[layer, target], time_s)


class RecordedCompute:
    """Compute times as the log has them; in place of the roofline.

    A layer's experts take from when they are all there to the event that says they are computed; the rest of
    the time between two layers is attention, of which an iteration's layers have the mean. What the forward
    pass waited for is in neither.
    """

    def __init__(
        self, rows: LogRows, iterations: Sequence[RecordedIteration], *, prefetch_blocks: bool
    ) -> None:
        self._times = [_compute_times(rows, one, prefetch_blocks) for one in iterations]
        self._next = -1
        self._experts_s = np.zeros(rows.layers)

    def attention_s(self, tokens: int, context_tokens: int, *, score_pairs: int | None = None) -> float:
        """Of each layer of the next iteration."""
        self._next += 1
        attention_s, self._experts_s, self._rest_s = self._times[self._next]
        return attention_s

    def iteration_overhead_s(
        self, tokens: int, sequences: int, context_tokens: int, *, score_pairs: int | None = None
    ) -> float:
        """After the last layer."""
        return self._rest_s

    def exchange_s(self, tokens: int) -> float:
        """In the experts' time."""
        return 0.0

    def gate_s(self, tokens: int) -> float:
        """In the attention's time."""
        return 0.0

    def expert_s(self, token_counts: NDArray[np.int32]) -> NDArray[np.float64]:
        """Of all experts of each layer."""
        self._counts = token_counts
        return self._experts_s

    def experts_time_s(self, layer: int, experts: Sequence[int], counts: Sequence[int]) -> float:
        """Of some experts of a layer: their share of its tokens."""
        return float(self._experts_s[layer] * sum(counts) / max(1, int(self._counts[layer].sum())))


def _compute_times(
    rows: LogRows, iteration: RecordedIteration, prefetch_blocks: bool
) -> tuple[float, NDArray[np.float64], float]:
    """Attention of a layer, experts of each layer, and the rest of an iteration, in seconds."""
    times, kind = rows.column("time_s"), rows.kind
    part = slice(iteration.begin, iteration.end)
    computed = np.flatnonzero(kind[part] == KINDS.index("computed")) + iteration.begin
    loaded = np.flatnonzero(kind[part] == KINDS.index("loaded")) + iteration.begin
    searched = np.flatnonzero(kind[part] == KINDS.index("search_done")) + iteration.begin
    blocking = rows.column("blocking")[part].any()
    experts_s = np.zeros(rows.layers)
    attention_s = 0.0
    before = times[iteration.begin]
    bounds = [*iteration.gates[1:], iteration.end]
    for layer, (gate, until) in enumerate(zip(iteration.gates, bounds, strict=True)):
        attention_s += times[gate] - before
        required = set((rows.items("experts", gate) + layer * rows.experts).tolist())
        ready = times[gate]
        if blocking:
            ready = max([ready, *times[searched[(searched > gate) & (searched < until)]]])
        for end in computed[(computed > gate) & (computed < until)]:
            arrived = [times[i] for i in loaded if gate < i < end and rows.column("expert")[i] in required]
            began = max([ready, *arrived])
            experts_s[layer] += max(0.0, times[end] - began)
            ready = before = times[end]
        if prefetch_blocks and layer + 1 < rows.layers:  # the next layer's prefetches were waited for
            first = (layer + 1) * rows.experts
            own = [i for i in loaded if until > i and 0 <= rows.column("expert")[i] - first < rows.experts]
            before = max([before, *times[own]])
    rest_s = max(0.0, float(times[iteration.end] - before))
    return max(0.0, attention_s) / max(1, len(iteration.gates)), experts_s, rest_s

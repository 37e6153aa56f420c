"""A random world that drives a policy core with legal events, and now and then with an illegal one.

The walk learns from commands only. At each moment it picks at random among what could happen next: a load
completes, fails or is paused, the oldest search is done, part of the chunk is computed, the next gate comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from core_draws import F32, draw_gate_row, draw_preload, draw_row_counts
from core_illegal import illegal_events
from finemoe.errors import CoreError
from finemoe.policy.contract.observed import ObservedCore
from finemoe.policy.contract.rules import RuleObserver
from reference_formulas import round_f16, unit_embedding
from reference_predictions import Row
from reference_state import PHASES, Command, Config


class Core(Protocol):
    """What the walk drives; see reference_core.py."""

    def preload(self, experts: Sequence[int], /) -> list[Command]: ...
    def begin_iteration(self, rows: Sequence[Row], /) -> list[Command]: ...
    def gate(
        self,
        layer: int,
        probabilities: npt.ArrayLike,
        experts: Sequence[int],
        token_counts: Sequence[int],
        row_counts: npt.ArrayLike | None = None,
        /,
    ) -> list[Command]: ...
    def speculation(self, layer: int, target: int, probabilities: npt.ArrayLike, /) -> list[Command]: ...
    def search_done(self, ticket: int, /) -> list[Command]: ...
    def loaded(self, expert: int, /) -> list[Command]: ...
    def paused(self, expert: int, bytes_done: int, /) -> list[Command]: ...
    def load_failed(self, expert: int, reason: str, /) -> list[Command]: ...
    def computed(self, layer: int, experts: Sequence[int], /) -> list[Command]: ...
    def end_iteration(self, finished: Sequence[int] = (), /) -> list[Command]: ...
    def seed_store(
        self, maps: npt.ArrayLike, embeddings: npt.ArrayLike, written: npt.ArrayLike, /
    ) -> list[Command]: ...
    def foresight(self, step: int, required: Sequence[Sequence[int]], /) -> list[Command]: ...
    def counter_values(self) -> dict[str, Any]: ...


@dataclass
class Walk:
    """One random walk; `log` keeps every accepted event with its commands."""

    core: Core
    config: Config
    rng: np.random.Generator
    log: list[tuple[str, tuple[Any, ...], list[Command]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rules = RuleObserver(ObservedCore.of(asdict(self.config)))
        self.rows: list[Row] = []
        self.running: list[int] = []
        self.plan: list[list[int]] = []
        self.past_rows: list[F32] = []
        self.may_speculate = 0  # per layer, so that a walk comes to its end
        names = ("loaded", "failed", "search", "compute", "gate", "speculate", "foresight", "illegal")
        self.weights = {name: float(self.rng.choice([0.2, 1.0, 1.0, 5.0])) for name in names}
        self.weights["prefetched"] = float(self.rng.choice([0.05, 0.3, 1.0]))
        self.weights["stopping"] = float(
            self.rng.choice([0.01, 1.0, 5.0])
        )  # an asked transfer takes its time
        self.weights["failed"] *= float(self.rng.choice([0.0, 0.02, 0.1, 0.5]))
        self.weights["illegal"] *= 0.1
        self.knows_future = self.config.eviction == "belady" or self.config.predictor == "oracle"
        self.known_steps = 0
        self.weights["foresight"] *= 0.1
        self.weights["speculate"] *= 0.3

    def run(self, iterations: int) -> None:
        """Walk until so many iterations have ended and every load has landed, or the core aborts."""
        if self.rng.random() < 0.2:
            self._do("preload", draw_preload(self.rng, self.config))
        if self.config.predictor in ("map", "activation") and self.rng.random() < 0.6:
            self._seed()
        while not self.rules.aborted:
            flying = any(d.transfer is not None for d in self.rules.devices)
            if self.rules.iteration == iterations - 1 and not self.rules.open:
                if not flying:
                    break
            elif not self.rules.open and (not flying or self.rng.random() < 0.5):
                self._begin()
            self._step()
            if len(self.log) > 500 * iterations:
                raise AssertionError("the walk does not come to its end")

    def _do(self, event: str, *arguments: Any) -> None:
        commands = getattr(self.core, event)(*arguments)
        self.log.append((event, arguments, commands))
        self.rules.observe(event, arguments, commands)
        self.rules.check_counters(self.core.counter_values())

    # -- choosing

    def _step(self) -> None:
        options = self._options()
        if not options:
            raise AssertionError("nothing can happen any more: the core has hung")
        weights = np.array([self.weights[name] for name, _ in options])
        if not weights.any():
            weights[:] = 1.0
        options[int(self.rng.choice(len(options), p=weights / weights.sum()))][1]()

    def _options(self) -> list[tuple[str, Callable[[], None]]]:
        rules, config = self.rules, self.config
        options: list[tuple[str, Callable[[], None]]] = []
        for device in rules.devices:
            if device.transfer is None:
                continue
            e, asked = device.transfer.expert, device.transfer.asked_to_stop
            failed = "stopping" if asked and self.rng.random() < 0.1 else "failed"
            slow = "prefetched" if device.transfer.kind == "prefetch" else "loaded"
            options.append(("stopping" if asked else slow, partial(self._do, "loaded", e)))
            options.append((failed, partial(self._do, "load_failed", e, "flipped a bit")))
            if asked:
                options.append(("stopping", partial(self._pause, e, device.transfer.offset)))
        for ticket in rules.searches.done_next():
            options.append(("search", partial(self._do, "search_done", ticket)))
        if rules.computable():
            options.append(("compute", self._compute))
        if rules.open and rules.layer_done:
            last = rules.layer == config.layers - 1
            options.append(("gate", self._end if last else self._gate))
        if rules.open and self.may_speculate > 0 and rules.layer < config.layers - 1:
            options.append(("speculate", self._speculate))
        if options:
            options.append(("illegal", self._illegal))
            if self.knows_future:
                options.append(("foresight", self._foresee))
        return options

    # -- events

    def _seed(self) -> None:
        config, n = self.config, int(self.rng.integers(1, self.config.store_capacity + 1))
        maps = np.stack([[self._gate_row() for _ in range(config.layers)] for _ in range(n)])
        embeddings = np.zeros((n, config.embedding_width), dtype=np.float16)
        for i in range(n):
            unit = unit_embedding(self._embedding())
            if unit is not None and self.rng.random() < 0.8:
                embeddings[i] = unit
        self._do("seed_store", round_f16(maps), embeddings, self.rng.permutation(n).astype(np.int64))

    def _begin(self) -> None:
        config, rng = self.config, self.rng
        phase = str(rng.choice(PHASES))
        self.rows = [
            Row(
                request=request,
                phase=phase,
                tokens=int(rng.choice([1, 2, 37, 1000])),
                embedding=self._embedding() if rng.random() < 0.8 else None,
            )
            for request in self._requests()
        ]
        self.plan = [self._required() for _ in range(config.layers)]
        if self.knows_future:
            step = (self.rules.iteration + 1) * config.layers
            beyond = [self._required() for _ in range(int(rng.integers(0, 2 * config.layers)))]
            self._foresight(step, (self.plan + beyond)[: int(rng.integers(1, 3 * config.layers))])
        self.may_speculate = int(config.predictor == "speculate")
        self._do("begin_iteration", self.rows)

    def _gate(self) -> None:
        layer = self.rules.layer + 1
        experts = self.plan[layer]
        if self.rng.random() < 0.5:  # a prediction that comes true: what is on its way is required
            moving = {e for d in self.rules.devices for e in d.slots if e >= 0} - self.rules.resident
            coming = {e % self.config.experts for e in moving if e // self.config.experts == layer}
            experts = sorted(coming | set(experts))
        counts = [int(self.rng.integers(1, 9)) for _ in experts]
        self.may_speculate = 4 * (self.config.predictor == "speculate")
        self._do("gate", layer, self._batch(), experts, counts, self._row_counts(experts, counts))

    def _end(self) -> None:
        """Some rows' requests finish, now and then also one that waits or one that nobody knows."""
        rng = self.rng
        known = {row.request for row in self.rows} | ({*self.running} if rng.random() < 0.2 else set())
        finished = [request for request in sorted(known) if rng.random() < 0.5]
        if rng.random() < 0.1:
            finished.append(1_000_000)
        rng.shuffle(finished)
        self.running = [request for request in self.running if request not in finished]
        self._do("end_iteration", finished)

    def _speculate(self) -> None:
        target = int(self.rng.integers(self.rules.layer + 1, self.config.layers))
        self.may_speculate -= 1
        self._do("speculation", self.rules.layer, target, self._batch())

    def _foresee(self) -> None:
        rules = self.rules
        now = rules.iteration * self.config.layers + rules.layer
        step = (
            int(self.rng.integers(now + 1, max(self.known_steps, now + 1) + 1)) if rules.iteration >= 0 else 0
        )
        self._foresight(step, [self._required() for _ in range(int(self.rng.integers(0, 4)))])

    def _foresight(self, step: int, required: list[list[int]]) -> None:
        layers, experts = self.config.layers, self.config.experts
        ids = [[s % layers * experts + j for j in js] for s, js in enumerate(required, start=step)]
        self.known_steps = step + len(ids)
        self._do("foresight", step, ids)

    def _pause(self, expert: int, offset: int) -> None:
        self._do("paused", expert, int(self.rng.integers(offset, self.config.expert_bytes)))

    def _compute(self) -> None:
        ready = self.rules.computable()
        some = [e for e in ready if self.rng.random() < 0.7] or ready
        self._do("computed", self.rules.layer, some)

    def _illegal(self) -> None:
        attempts = illegal_events(self)
        event, *arguments = attempts[int(self.rng.integers(len(attempts)))]
        try:
            getattr(self.core, event)(*arguments)
        except CoreError:
            self.rules.check_counters(self.core.counter_values())
            return
        raise AssertionError(f"accepted an illegal {event}{tuple(arguments)}")

    # -- values

    def _requests(self) -> list[int]:
        """Of one to three rows: running requests that go on, and new ones; now and then one comes twice."""
        requests: list[int] = []
        for _ in range(int(self.rng.integers(1, 4))):
            waiting = [r for r in self.running if r not in requests or self.rng.random() < 0.1]
            if not waiting or self.rng.random() < 0.3:
                waiting = [int(self.rng.integers(100))]
            requests.append(waiting[int(self.rng.integers(len(waiting)))])
            self.running = sorted({*self.running, *requests})
        return requests

    def _row_counts(self, experts: Sequence[int], counts: Sequence[int]) -> npt.NDArray[np.int32] | None:
        if not self.config.counts_rows:
            return None
        sums = np.zeros(self.config.experts, dtype=int)
        sums[list(experts)] = counts
        return draw_row_counts(self.rng, len(self.rows), sums.tolist())

    def _required(self) -> list[int]:
        size = int(self.rng.integers(1, self.config.experts + 1))
        if self.rng.random() < 0.5:
            size = min(size, self.config.top_k)
        return sorted(int(j) for j in self.rng.choice(self.config.experts, size, replace=False))

    def _embedding(self) -> F32:
        values = self.rng.normal(size=self.config.embedding_width).astype(np.float32)
        kind = self.rng.integers(4)
        if kind == 0:
            return np.zeros_like(values)
        return np.sign(values) if kind == 1 else values * np.float32(self.rng.choice([1e-4, 1.0, 100.0]))

    def _gate_row(self) -> F32:
        if self.past_rows and self.rng.random() < 0.3:
            return self.past_rows[int(self.rng.integers(len(self.past_rows)))]
        row = draw_gate_row(self.rng, self.config.experts)
        self.past_rows.append(row)
        return row

    def _batch(self) -> F32:
        return np.stack([self._gate_row() for _ in self.rows])

"""Continuous batching as a pure state machine: no clock, no tensor, no device.

A step is either prefills up to the token budget or one decode step of all running requests; prefill goes
first. Requests are admitted strictly first come, first served, and reserve KV cache for prompt and output
at admission, so a running request is never preempted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import CapacityError, SettingError
from .request import RequestState

if TYPE_CHECKING:
    from ..traces.requests import Request

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of the model: every request of it is in the same phase."""

    phase: Phase
    requests: tuple[RequestState, ...]

    @property
    def tokens(self) -> int:
        """Tokens processed by the step, over all its requests."""
        return sum(state.step_tokens for state in self.requests)


class Scheduler:
    """Decides which requests the next iteration serves.

    `max_num_seqs` bounds the running requests, `token_budget` the prompt tokens of one prefill step (a
    longer prompt goes alone), `kv_capacity_tokens` the tokens of KV cache reserved by running requests.
    """

    def __init__(self, max_num_seqs: int, token_budget: int, kv_capacity_tokens: int) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("token_budget", token_budget)):
            if value < 1:
                raise SettingError(f"{name} is {value}; it must be 1 or more.")
        if kv_capacity_tokens < 1:
            raise CapacityError(f"the KV cache holds {kv_capacity_tokens} tokens; no request fits.")
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.kv_capacity_tokens = kv_capacity_tokens
        self.kv_reserved_tokens = 0
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []  # in order of admission
        self._open: Step | None = None

    @property
    def waiting(self) -> int:
        """Requests that have arrived and are not admitted."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests admitted and not finished."""
        return len(self._running)

    @property
    def running_states(self) -> tuple[RequestState, ...]:
        """The admitted and unfinished requests, in order of admission."""
        return tuple(self._running)

    def check(self, request: Request) -> None:
        """Raise CapacityError for a request whose KV cache can never fit."""
        need = request.prompt_tokens + request.output_tokens
        if need > self.kv_capacity_tokens:
            raise CapacityError(
                f"request {request.index} needs {need:,} tokens of KV cache "
                f"({request.prompt_tokens:,} prompt + {request.output_tokens:,} output), but the machine "
                f"holds {self.kv_capacity_tokens:,}. "
                "Use a smaller expert cache, or cut the prompt with --prompt-tokens."
            )

    def add(self, request: Request) -> RequestState:
        """Queue an arrived request behind all earlier ones; CapacityError if it can never run."""
        self.check(request)
        state = RequestState(request)
        self._waiting.append(state)
        return state

    def next_step(self) -> Step | None:
        """Admit what fits and open the next step; None when nothing waits or runs.

        The step must be closed by `finish_step` before the next one is asked for.
        """
        if self._open is not None:
            raise RuntimeError("the previous step is still open: call finish_step first")
        admitted = self._admit()
        if admitted:
            self._open = Step("prefill", admitted)
        elif self._running:
            self._open = Step("decode", tuple(self._running))
        return self._open

    def finish_step(self, step: Step) -> list[RequestState]:
        """Close the open step: each of its requests has one more output token. Returns those that
        finished."""
        if step is not self._open:
            raise RuntimeError("finish_step was called with a step that is not open")
        self._open = None
        finished = []
        for state in step.requests:
            state.generated += 1
            if state.finished:
                finished.append(state)
                self.kv_reserved_tokens -= state.kv_tokens
        if finished:
            self._running = [state for state in self._running if not state.finished]
        return finished

    def _admit(self) -> tuple[RequestState, ...]:
        """Move the longest fitting prefix of the waiting queue to the running requests."""
        admitted: list[RequestState] = []
        tokens = 0
        while self._waiting and len(self._running) < self.max_num_seqs:
            state = self._waiting[0]
            tokens += state.request.prompt_tokens
            if admitted and tokens > self.token_budget:
                break
            # Nobody overtakes the head of the queue: a smaller request behind it would starve it.
            if self.kv_reserved_tokens + state.kv_tokens > self.kv_capacity_tokens:
                break
            self._waiting.popleft()
            self._running.append(state)
            self.kv_reserved_tokens += state.kv_tokens
            admitted.append(state)
        return tuple(admitted)

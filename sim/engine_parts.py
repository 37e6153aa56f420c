"""What the engine asks of the feed and of compute times, which may also be those of a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..policy.core import Core


class Shape(Protocol):
    """L and J."""

    @property
    def layers(self) -> int:
        """L."""

    @property
    def experts(self) -> int:
        """J."""


class GateFeed(Protocol):
    """Says to the core what the gates say: `Feed` of the core, or a log's."""

    def select(
        self, requests: Sequence[int], iterations: Sequence[int], tokens: Sequence[int], prefill: bool
    ) -> None:
        """Who the rows of the next iteration are."""

    def token_counts(self) -> NDArray[np.int32]:
        """Tokens per expert of the iteration, [L, J]."""

    def begin_iteration(self, core: Core, time_s: float = 0.0) -> int:
        """Tell the core."""

    def gate(self, core: Core, layer: int, time_s: float = 0.0) -> int:
        """Tell the core."""

    def speculation(self, core: Core, layer: int, target: int, time_s: float = 0.0) -> int:
        """Tell the core."""


class ComputeTimes(Protocol):
    """Seconds of an iteration's parts; `ComputeModel` says what each is."""

    def attention_s(self, tokens: int, context_tokens: int, *, score_pairs: int | None = None) -> float:
        """Of one layer."""

    def iteration_overhead_s(
        self, tokens: int, sequences: int, context_tokens: int, *, score_pairs: int | None = None
    ) -> float:
        """Beside the layers."""

    def exchange_s(self, tokens: int) -> float:
        """Of one layer."""

    def gate_s(self, tokens: int) -> float:
        """Of a router applied ahead."""

    def expert_s(self, token_counts: NDArray[np.int32]) -> NDArray[np.float64]:
        """Of all experts of each layer."""

    def experts_time_s(self, layer: int, experts: Sequence[int], counts: Sequence[int]) -> float:
        """Of some experts of a layer."""

"""Which device serves which request where every device has the dense weights (data-parallel attention)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..serving.request import RequestState
    from ..serving.scheduler import Step


class Placement:
    """Requests on devices: each goes, for good, to the device with the fewest KV tokens at its admission."""

    def __init__(self, devices: int) -> None:
        self.kv_tokens = [0] * devices  # reserved on each device
        self.peak_kv_tokens = 0  # of any device
        self._device_of: dict[int, int] = {}

    def admit(self, state: RequestState) -> None:
        """Choose the request's device; ties go to the lowest."""
        device = self.kv_tokens.index(min(self.kv_tokens))
        self._device_of[state.request.index] = device
        self.kv_tokens[device] += state.kv_tokens
        self.peak_kv_tokens = max(self.peak_kv_tokens, self.kv_tokens[device])

    def finish(self, state: RequestState) -> None:
        """Free the request's KV cache."""
        self.kv_tokens[self._device_of.pop(state.request.index)] -= state.kv_tokens

    def split(self, step: Step) -> list[Step]:
        """The step's requests by device, as a step each; devices without any are left out."""
        parts: list[list[RequestState]] = [[] for _ in self.kv_tokens]
        for state in step.requests:
            parts[self._device_of[state.request.index]].append(state)
        return [replace(step, requests=tuple(part)) for part in parts if part]

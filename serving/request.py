"""The state of one request while it is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..traces.requests import Request


@dataclass(slots=True, eq=False)
class RequestState:
    """A request on its way through the scheduler.

    The prefill iteration yields the first output token and each decode iteration one more, so a request
    with n output tokens takes part in n iterations: iteration 0 is its prefill.
    """

    request: Request
    generated: int = 0  # output tokens so far = iterations done

    @property
    def kv_tokens(self) -> int:
        """KV cache that the request reserves at admission, in tokens: its prompt and its whole output."""
        return self.request.prompt_tokens + self.request.output_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens whose keys and values are cached before the next iteration: 0 before the prefill.

        The newest output token is the input of the next iteration, so it is not yet cached.
        """
        return self.request.prompt_tokens + self.generated - 1 if self.generated else 0

    @property
    def step_tokens(self) -> int:
        """Tokens that the next iteration processes: the prompt in prefill, one in decode."""
        return 1 if self.generated else self.request.prompt_tokens

    @property
    def last(self) -> bool:
        """Whether the next iteration yields the last output token."""
        return self.generated + 1 >= self.request.output_tokens

    @property
    def finished(self) -> bool:
        """Whether every output token exists."""
        return self.generated >= self.request.output_tokens

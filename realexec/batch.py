"""Who the rows of a forward pass are, and who else hears what the core is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """Who the rows of the next forward pass are. `requests` [B]; `valid` [B, T]: which positions are tokens,
    None where all are. `skip_pads`: experts do not compute the others, which transformers lets them do."""

    requests: tuple[int, ...]
    prefill: bool
    tokens: int  # T
    valid: Tensor | None = None
    skip_pads: bool = False

    def kept(self) -> Tensor | None:
        """Positions [tokens] of B·T that experts compute; None: all."""
        if self.valid is None or not self.skip_pads:
            return None
        return self.valid.reshape(-1).nonzero()[:, 0]

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        if self.valid is None:
            return [self.tokens] * len(self.requests)
        lengths: list[int] = self.valid.sum(dim=1).clamp(min=1).tolist()  # a row of pads counts as one token
        return lengths

    def row_means(self, values: Tensor) -> Tensor:
        """Mean over each row's tokens of `values` [B·T or B, T, n]: fp32 [B, n]."""
        if self.tokens == 1:  # most passes: no more than it takes
            return values.detach().view(len(self.requests), -1).float()
        rows = values.detach().view(len(self.requests), self.tokens, -1).float()
        if self.valid is None:
            rows = rows.mean(dim=1)
        else:
            # Not a product with the mask: what pads compute may be no number.
            rows = rows.masked_fill(~self.valid.unsqueeze(-1), 0)
            rows = rows.sum(dim=1) / self.valid.sum(dim=1, keepdim=True).clamp(min=1)
        return rows


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts as one batch that ends at the same place: token ids, which of them are tokens (bool), and
    their positions, [B, T] each."""
    longest = max(len(prompt) for prompt in prompts)
    pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)[:, None]
    tokens = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts], device=device)
    places = torch.arange(longest, device=device)
    return tokens, places >= pads, (places - pads).clamp(min=0)


class Observer(Protocol):
    """Hears what the core is told; rows are those of the batch."""

    def begun(self, batch: Batch, embedding: NDArray[np.float32]) -> None:
        """An iteration begins; `embedding` [B, h]."""

    def routed(self, rows: NDArray[np.float32], counts: NDArray[np.int32]) -> None:
        """The next layer's gate, [B, J], and the tokens of each row that each expert received, [B, J]."""

    def speculated(self, layer: int, target: int, rows: NDArray[np.float32]) -> None:
        """A later layer's gate on this layer's hidden state, [B, J]."""

    def ended(self) -> None:
        """The iteration is over."""

"""Activation matrices of requests, and the popularity of experts, for the reference core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from reference_formulas import F16, F32, shares

I64 = npt.NDArray[np.int64]


class Activations:
    """How many tokens each expert has received: [L, J] per request until it has finished, and over all."""

    def __init__(self, layers: int, experts: int) -> None:
        self.matrices: dict[int, I64] = {}
        self.popularity: I64 = np.zeros((layers, experts), dtype=np.int64)

    def grow(self, requests: Sequence[int], layer: int, row_counts: I64) -> None:
        """Count the tokens [B, J] of one layer, row by row."""
        for request, counts in zip(requests, row_counts, strict=True):
            matrix = self.matrices.setdefault(request, np.zeros_like(self.popularity))
            matrix[layer] += counts
            self.popularity[layer] += counts

    def rows(self, request: int) -> F16:
        """The request's rows as shares, [L, J]; zeros where it has activated nothing."""
        matrix = self.matrices.get(request, np.zeros_like(self.popularity))
        return shares(matrix).astype(np.float16)

    def popular(self, layer: int) -> F32 | None:
        """p [J] of a layer by popularity; None where nothing was activated yet."""
        if not self.popularity[layer].any():
            return None
        return shares(self.popularity[layer])

    def share(self, layer: int, j: int) -> float:
        """a: the expert's share of its layer's tokens over all requests that have not finished."""
        expert_tokens = sum(int(matrix[layer, j]) for matrix in self.matrices.values())
        layer_tokens = sum(int(matrix[layer].sum()) for matrix in self.matrices.values())
        return expert_tokens / layer_tokens if layer_tokens else 0.0

    def forget(self, requests: Iterable[int]) -> None:
        """These requests have finished."""
        for request in requests:
            self.matrices.pop(request, None)

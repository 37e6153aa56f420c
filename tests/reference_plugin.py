"""What the reference core asks of a user's policy, and the checks on its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from reference_formulas import F16, F32
from reference_state import check


@dataclass(frozen=True)
class ExpertView:
    """What an eviction rule may know of an expert; `expert` counts within its layer."""

    layer: int
    expert: int
    probability: float
    frequency: float
    last_used: int
    layer_now: int
    layers: int


class UserPolicy(Protocol):
    """Predictions are rows [J] by layer."""

    def begin_iteration(
        self, rows: list[tuple[int, str, int]], embeddings: F16 | None
    ) -> Mapping[int, npt.ArrayLike]: ...
    def gate(
        self, layer: int, probabilities: F32, row_counts: npt.NDArray[np.int32]
    ) -> Mapping[int, npt.ArrayLike]: ...
    def end_iteration(self, finished: list[int]) -> None: ...
    def eviction_key(self, view: ExpertView) -> float: ...


def checked(
    answer: Mapping[int, npt.ArrayLike], l_now: int, layers: int, experts: int
) -> list[tuple[int, F32]]:
    """The predictions of an answer, layers ascending; CoreError where it is none."""
    rows = [(int(layer), np.asarray(answer[layer], dtype=np.float32)) for layer in sorted(answer)]
    for layer, row in rows:
        check(l_now < layer < layers, f"layer {layer} is not a later layer")
        check(row.shape == (experts,), f"a row has {experts} values")
        check(bool(((row >= 0.0) & np.isfinite(row)).all()), "values are finite and not negative")
    return rows


def all_embeddings(embeddings: Sequence[F16 | None], width: int) -> F16 | None:
    """[B, h] unit embeddings; zeros for rows that have none, None where no row has one."""
    if width == 0 or all(embedding is None for embedding in embeddings):
        return None
    none = np.zeros(width, dtype=np.float16)
    return np.stack([none if embedding is None else embedding for embedding in embeddings])

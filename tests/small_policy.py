"""A small user policy for the tests: what it answers depends on what it was told, and on nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from reference_formulas import F32
from reference_plugin import ExpertView
from reference_state import Config


class SmallPolicy:
    """Predicts later layers by ageing token counts; evicts by a mixture of all that a view shows.

    `told` keeps all but the views, so that two policies can be compared. How often a key is asked for is the
    core's own affair: keys depend on finished events only.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.told: list[tuple[Any, ...]] = []
        self.worth = np.zeros((config.layers, config.experts), dtype=np.float32)

    def begin_iteration(
        self, rows: list[tuple[int, str, int]], embeddings: npt.NDArray[np.float16] | None
    ) -> dict[int, F32]:
        shown = None if embeddings is None else (str(embeddings.dtype), embeddings.tolist())
        self.told.append(("begin_iteration", list(rows), shown))
        if embeddings is not None:
            self.worth[0] += np.float32(np.abs(embeddings.astype(np.float32)).max())
        return self._predictions(-1)

    def gate(self, layer: int, probabilities: F32, row_counts: npt.NDArray[np.int32]) -> dict[int, F32]:
        dtypes = str(probabilities.dtype), str(row_counts.dtype)
        self.told.append(("gate", layer, dtypes, probabilities.tolist(), row_counts.tolist()))
        self.worth[layer] = self.worth[layer] / np.float32(2.0) + row_counts.sum(axis=0).astype(np.float32)
        self.worth[layer] += probabilities.max(axis=0)
        return self._predictions(layer)

    def end_iteration(self, finished: list[int]) -> None:
        self.told.append(("end_iteration", list(finished)))
        self.worth *= np.float32(0.5)

    def eviction_key(self, view: ExpertView) -> float:
        ahead = (view.layer - view.layer_now) % view.layers
        key = view.probability * view.frequency + view.last_used / (1.0 + ahead) + (view.probability == 0.0)
        return key + (7 * view.expert + 3 * view.layer + len(self.told)) % 5

    def _predictions(self, layer_now: int) -> dict[int, F32]:
        """Some later layers, the furthest first; none at all now and then, and rows of zeros."""
        step = len(self.told)
        later = [layer for layer in range(self.config.layers - 1, layer_now, -1) if (layer + step) % 3]
        return {layer: self.worth[layer].copy() for layer in later}


def policy_for(config: Config) -> SmallPolicy | None:
    """The policy that the configuration asks for."""
    return SmallPolicy(config) if config.has_policy else None

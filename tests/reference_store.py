"""The map store of the reference core: lists of maps, searched from scratch every time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from reference_formulas import (
    F16,
    F32,
    activation_keys,
    best_map,
    inverse_norms,
    redundancy,
    round_f16,
    running_sums,
    semantic_scores,
)


class ReferenceStore:
    """Up to `capacity` maps [L, J] with their unit embeddings [h] (zeros: none) and their ages."""

    def __init__(self, layers: int, experts: int, width: int, capacity: int) -> None:
        self.capacity = capacity
        self.maps: F16 = np.zeros((0, layers, experts), dtype=np.float16)
        self.embeddings: F16 = np.zeros((0, width), dtype=np.float16)
        self.written: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.maps)

    def seed(self, maps: npt.ArrayLike, embeddings: npt.ArrayLike, written: npt.ArrayLike) -> None:
        """Replace the content; the embeddings are taken as already unit-normalised."""
        self.maps = round_f16(maps)
        self.embeddings = round_f16(embeddings)
        self.written = np.array(written, dtype=np.int64)

    def semantic(self, query: F16) -> tuple[int, float]:
        """Place and score of the map whose embedding is nearest."""
        scores = semantic_scores(self.embeddings, query)
        best = best_map(scores, self.written)
        return best, float(scores[best])

    def trajectory(self, rows: F16) -> tuple[int, float]:
        """Place and score of the map whose rows 0 … m are nearest to `rows` [m + 1, J]."""
        keys = self._keys(rows)
        best = best_map(keys, self.written)
        return best, float(keys[best] * inverse_norms(rows)[-1])

    def redundancies(self, rows: F16, embedding: F16 | None, distance: int) -> F32:
        """RDY [n] of a new map [L, J] with every stored one."""
        trajectory = self._keys(rows) * inverse_norms(rows)[-1]
        semantic = None if embedding is None else semantic_scores(self.embeddings, embedding)
        return redundancy(semantic, trajectory, distance, len(rows))

    def update(self, rows: F16, embedding: F16 | None, distance: int) -> int:
        """Append a map, or replace the most redundant one; its place."""
        stored = np.zeros(self.embeddings.shape[1], dtype=np.float16) if embedding is None else embedding
        newest = int(self.written.max(initial=-1)) + 1
        if len(self) < self.capacity:
            self.maps = np.concatenate([self.maps, rows[None]])
            self.embeddings = np.concatenate([self.embeddings, stored[None]])
            self.written = np.append(self.written, newest)
            return len(self) - 1
        place = best_map(self.redundancies(rows, embedding, distance), self.written)
        self.maps[place], self.embeddings[place], self.written[place] = rows, stored, newest
        return place

    def _keys(self, rows: F16) -> F32:
        inverse = np.array([inverse_norms(m)[len(rows) - 1] for m in self.maps], dtype=np.float32)
        return running_sums(self.maps, rows) * inverse


class ActivationStore(ReferenceStore):
    """Activation matrices of finished requests, as shares [L, J]; they have no embeddings."""

    def trajectory(self, rows: F16) -> tuple[int, float]:
        """Place of the matrix whose rows 0 … m are nearest to `rows` [m + 1, J], and the mean cosine."""
        keys = activation_keys(self.maps, rows)
        best = best_map(keys, self.written)
        return best, float(keys[best] / np.float32(len(rows)))

    def redundancies(self, rows: F16, embedding: F16 | None, distance: int) -> F32:
        """RDY [n] of a new matrix [L, J] with every stored one."""
        return activation_keys(self.maps, rows)

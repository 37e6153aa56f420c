"""The base of a user's own policy: `finemoe-sim --policy my_policy.py:MyPolicy`. docs/writing-a-policy.md.

A policy sees what the policy core sees and answers at once: predictions, which become prefetches, and keys,
of which the smallest is evicted. Slots, loads, preemption and accounting stay the core's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._core import ExpertView

__all__ = ["ExpertView", "Policy", "Predictions", "Row", "Shape"]

#: Layer → row of J values, one per expert of the layer: finite, 0 or more, read as f32.
Predictions = Mapping[int, ArrayLike]

_STREAM = 2  # keeps a policy's draws apart from other uses of the run's seed


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy is made for: the model, the cache, and the seed of the run."""

    layers: int  # L; layers are numbered 0 … L−1
    experts: int  # J of each layer
    top_k: int  # K experts per token
    prefetch_distance: int  # layers looked ahead, of --prefetch-distance
    devices: int  # expert j of layer l lives on device (l·J + j) mod devices
    slots: int  # experts that all devices hold together
    expert_bytes: int
    embedding_width: int  # h; 0: the routing has no embeddings
    seed: int


class Row(NamedTuple):
    """One request's part of an iteration."""

    request: int
    phase: Literal["prefill", "decode"]
    tokens: int


class Policy:
    """Predicts and evicts; override what you need. What is not overridden costs nothing.

    Per iteration the core calls `begin_iteration`, then `gate` for layers 0 … L−1 in order, then
    `end_iteration`; `eviction_key` whenever it needs a victim. Arrays are the policy's own copies, rows in
    the order of `begin_iteration`. An iteration's rows are all prefill or all decode.

    The same calls must give the same answers, or a recorded run cannot be replayed: draw from `self.rng`
    only, read no clock, and keep no state beyond the instance. An exception, or an answer that means nothing,
    ends the run with a PolicyError and your traceback. One instance serves one run of the grid.
    """

    #: in tables and folders; the class's own name where it is empty
    name: ClassVar[str] = ""
    #: one line for people
    description: ClassVar[str] = ""
    #: the built-in rule where `eviction_key` is not overridden; `finemoe` evicts the smallest p · frequency
    eviction: ClassVar[Literal["finemoe", "lru", "lfu", "lfru"]] = "lru"
    #: prefetched of a predicted row: every expert above 0, the K largest, or the δ set of δ = 0
    selector: ClassVar[Literal["positive", "top_k", "delta"]] = "positive"
    #: order of the prefetches: p / (l − l_now), p · (1 − (l − l_now) / L), or the lowest layer first
    priority: ClassVar[Literal["distance", "depth", "layer"]] = "distance"

    def __init__(self, shape: Shape) -> None:
        """Called once before the run. An override calls this one first."""
        self.shape = shape
        #: the only source of chance
        self.rng = np.random.default_rng([shape.seed, _STREAM])

    def begin_iteration(self, rows: Sequence[Row], embeddings: NDArray[np.float16] | None) -> Predictions:
        """An iteration begins; predictions may be of any layer.

        embeddings: [B, h], unit length, zeros for a row without one; None where no row has one.
        """
        return {}

    def gate(
        self, layer: int, probabilities: NDArray[np.float32], row_counts: NDArray[np.int32]
    ) -> Predictions:
        """A layer's gate has chosen; predictions may be of later layers. A new row replaces the layer's last.

        probabilities: [B, J], of f16 precision, a prefill's being the mean over its tokens. row_counts:
        [B, J], how many of the row's tokens each expert received.
        """
        return {}

    def end_iteration(self, finished: Sequence[int]) -> None:
        """The last layer is computed. finished: requests that will not come again."""

    def eviction_key(self, expert: ExpertView) -> float:
        """Of the experts that could leave, that with the smallest key does; of equals the least recent.

        `expert.layer` and `.expert` (0 … J−1) say which one it is. `.probability`: the value last predicted
        for it, 1/J before any; `.frequency`: 1 + gates that required it; `.last_used`: number of the last
        gate that did, or after which its prefetch began; `.layer_now`: the layer of the last gate, −1 before
        an iteration's first; `.layers`: L. Asked at any moment, also between two gates. Not NaN.
        """
        raise NotImplementedError

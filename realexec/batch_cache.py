"""Keys and values of all running requests, in one batch that requests join and leave.

Every row ends at the same place: a step appends one position to all of them, a request that joins is padded
on the left, and what is left of the longest row is not looked at. Buffers have room to grow, so that a step
copies nothing but its own position; a row that leaves is replaced by the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import CapacityError

_LEAST_ROOM = 64  # positions


@dataclass
class _Extent:
    """Where the rows are in the buffers of all layers: positions [begin, end) of the first `rows` rows; the
    buffers have room for `capacity` positions of `most_rows` rows."""

    rows: int
    begin: int
    end: int
    most_rows: int
    capacity: int


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types here
    """One decoder layer's buffers [rows, heads, positions, width], which transformers sees as its cache.

    Never sliding: where a layer sees a window only, the mask says so.
    """

    is_sliding = False

    def __init__(self, extent: _Extent) -> None:
        super().__init__()
        self._extent = extent

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        extent = self._extent
        self.keys, self.values = (
            states.new_zeros(extent.most_rows, states.shape[1], extent.capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write the new positions [rows, heads, new, width] and return the whole rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        extent = self._extent
        end = extent.end + key_states.shape[2]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer[: extent.rows, :, extent.end : end] = states
        return tuple(buffer[: extent.rows, :, extent.begin : end] for buffer in (self.keys, self.values))

    def get_seq_length(self) -> int:
        return self._extent.end - self._extent.begin

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def enlarge(self, old: _Extent) -> None:
        """Move what `old` says into buffers of the extent, which has ended up elsewhere."""
        if self.is_initialized:
            self.keys, self.values = (self._enlarged(b, old) for b in (self.keys, self.values))

    def _enlarged(self, buffer: Tensor, old: _Extent) -> Tensor:
        new = self._extent
        larger = buffer.new_zeros(new.most_rows, buffer.shape[1], new.capacity, buffer.shape[3])
        kept = buffer[: old.rows, :, old.begin : old.end]
        larger[: old.rows, :, new.end - (old.end - old.begin) : new.end] = kept
        return larger

    def bytes(self) -> int:
        if not self.is_initialized:
            return 0
        return sum(b.numel() * b.element_size() for b in (self.keys, self.values))


@dataclass
class BatchCache:
    """The cache of a batch: `lengths` are the tokens of each row, the newest of which ends at the common end.

    decoder_layers: of the model. most_rows: that will ever run together. room: positions to allocate beyond
    those needed, at least, when the buffers grow.
    """

    decoder_layers: int
    most_rows: int
    room: int = _LEAST_ROOM
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._extent = _Extent(0, 0, 0, 0, 0)
        self._layers = [_Layer(self._extent) for _ in range(self.decoder_layers)]
        #: what the model is given
        self.cache = Cache(layers=list(self._layers))

    @property
    def width(self) -> int:
        """Positions of the longest row."""
        return self._extent.end - self._extent.begin

    def bytes(self) -> int:
        """Of all buffers."""
        return sum(layer.bytes() for layer in self._layers)

    def begin(self, lengths: Sequence[int]) -> None:
        """An empty batch is about to compute prompts of these lengths."""
        self.lengths = list(lengths)
        self._extent.rows = len(lengths)
        self._reserve(len(lengths), 0, max(lengths))

    def before_step(self) -> None:
        """Make sure that each row has room for another position."""
        self._reserve(self._extent.rows, self.width, 1)

    def advance(self, positions: int) -> None:
        """A forward pass has written so many positions of every row."""
        self._extent.end += positions

    def step_done(self) -> None:
        """A forward pass has written one more token of every row."""
        self.advance(1)
        self.lengths = [length + 1 for length in self.lengths]

    def mask(self, further: int, device: torch.device) -> Tensor:
        """Which of the rows' positions, and `further` ones after them, are tokens: bool [rows, positions]."""
        width = self.width + further
        pads = torch.tensor([self.width - length for length in self.lengths])
        return (torch.arange(width) >= pads[:, None]).to(device)

    def join(self, other: BatchCache) -> None:
        """Take the rows of `other`, which have been computed, behind one's own."""
        first, rows = self._extent.rows, len(other.lengths)
        self._reserve(first + rows, max(other.lengths), 1)
        self._extent.rows += rows
        end = self._extent.end
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            if not mine.is_initialized:
                mine.lazy_initialization(theirs.keys, theirs.values)
            for to, source in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                for row, length in enumerate(other.lengths):
                    place = to[first + row]
                    place[:, : end - length].zero_()
                    place[:, end - length : end] = source[
                        row, :, other._extent.end - length : other._extent.end
                    ]
        self.lengths += other.lengths
        self.trim()

    def leave(self, row: int) -> None:
        """Drop a row; the last one takes its place."""
        last = self._extent.rows - 1
        if row != last:
            here = slice(self._extent.begin, self._extent.end)
            for layer in self._layers:
                for buffer in (layer.keys, layer.values):
                    buffer[row, :, here] = buffer[last, :, here]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._extent.rows = last
        self.trim()

    def trim(self) -> None:
        """Look at no more positions than the longest row has."""
        self._extent.begin = self._extent.end - max(self.lengths, default=0)

    def _reserve(self, rows: int, length: int, more: int) -> None:
        """Room for so many rows of `length` positions up to the end, and `more` after it."""
        extent = self._extent
        if rows <= extent.most_rows and length <= extent.end and extent.end + more <= extent.capacity:
            return
        old = _Extent(**vars(extent))
        length = max(length, self.width)
        extent.end, extent.begin = length, length - self.width
        extent.capacity = length + more + (max(self.room, length // 2) if self.room else 0)
        if rows > extent.most_rows:
            extent.most_rows = max(rows, min(2 * extent.most_rows, self.most_rows))
        try:
            for layer in self._layers:
                layer.enlarge(old)
        except RuntimeError as error:  # also torch.OutOfMemoryError
            raise CapacityError(
                f"a KV cache of {extent.most_rows} requests × {extent.capacity} tokens cannot be allocated. "
                "Use a smaller expert cache, or cut --max-num-seqs or --prompt-tokens."
            ) from error

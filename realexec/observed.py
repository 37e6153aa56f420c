"""What the gates of a served model said, request by request: its routing trace, written as requests end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .recorder import Iteration, routing_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..traces.routing import RequestRouting
    from ..traces.routing_file import RoutingWriter
    from .batch import Batch


_HELD_BYTES = 256 * 2**20


class RoutingObserver:
    """Hears from the runtime what it tells the core, and keeps it until a request is over.

    Costs references to arrays that are there anyway, and one f16 copy of them per iteration. `speculation`:
    distances whose rows are kept.
    """

    def __init__(self, speculation: tuple[int, ...]) -> None:
        self._speculation = speculation
        self._requests: tuple[int, ...] = ()
        self._embedding: NDArray[np.float32] | None = None
        self._rows: list[NDArray[np.float32]] = []
        self._counts: list[NDArray[np.int32]] = []
        self._guessed: dict[int, dict[int, NDArray[np.float32]]] = {}
        self._kept: dict[int, list[Iteration]] = {}  # of each running request

    def begun(self, batch: Batch, embedding: NDArray[np.float32]) -> None:
        """An iteration of these requests begins; `embedding` [B, h]."""
        self._requests, self._embedding = batch.requests, embedding
        self._rows, self._counts = [], []
        self._guessed = {distance: {} for distance in self._speculation}

    def routed(self, rows: NDArray[np.float32], counts: NDArray[np.int32]) -> None:
        """The next layer's gate: mean probabilities and tokens per expert of each request, [B, J]."""
        self._rows.append(rows)
        self._counts.append(counts)

    def speculated(self, layer: int, target: int, rows: NDArray[np.float32]) -> None:
        """What `target`'s gate says, [B, J], on the hidden state of `layer`."""
        if target - layer in self._guessed:
            self._guessed[target - layer][layer] = rows

    def ended(self) -> None:
        """The iteration is over."""
        assert self._embedding is not None
        gate = np.stack(self._rows, axis=1).astype(np.float16)  # [B, L, J]
        whole = Iteration(
            gate, np.stack(self._counts, axis=1), self._embedding.astype(np.float16), self._speculated(gate)
        )
        for row, request in enumerate(self._requests):
            self._kept.setdefault(request, []).append(_row(whole, row))

    def take(self, request: int) -> RequestRouting:
        """The routing of a request that is over."""
        return routing_of(self._kept.pop(request), 0)

    def _speculated(self, gate: NDArray[np.float16]) -> dict[int, NDArray[np.float16]]:
        found = {}
        for distance, layers in self._guessed.items():
            found[distance] = np.zeros_like(gate)
            for layer, rows in layers.items():
                found[distance][:, layer] = rows
        return found


class InOrder:
    """Writes requests in their order of arrival, whatever the order they end in, when there is time."""

    def __init__(self, writer: RoutingWriter) -> None:
        self._writer = writer
        self._held: dict[int, RequestRouting] = {}
        self._held_bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether the next request could be written."""
        return self._writer.requests in self._held

    def add(self, place: int, routing: RequestRouting) -> None:
        """Request number `place` of those served is over. Written at once only where much is held."""
        self._held[place] = routing
        self._held_bytes += _bytes(routing)
        if self._held_bytes > _HELD_BYTES:
            self.write()

    def write(self, most: int | None = None) -> None:
        """Write what can be written, at most so many requests."""
        while self.waiting and most != 0:
            routing = self._held.pop(self._writer.requests)
            self._held_bytes -= _bytes(routing)
            self._writer.add(routing)
            most = None if most is None else most - 1


def _bytes(routing: RequestRouting) -> int:
    return routing.gate.nbytes + routing.experts.nbytes + routing.token_counts.nbytes


def _row(whole: Iteration, row: int) -> Iteration:
    """One request's part, as a batch of its own."""
    part = slice(row, row + 1)
    return Iteration(
        whole.gate[part],
        whole.counts[part],
        whole.embedding[part],
        {distance: rows[part] for distance, rows in whole.speculation.items()},
    )

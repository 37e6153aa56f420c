"""The forward pass of a real model, told to the policy core layer by layer.

Hooks see what the core must know: the embedding's output begins an iteration, a router's output is the gate
of its layer; the experts function computes the layer in the chunks that the core says are resident.
Everything else, loads, searches and their order, is the core's and the transfer engine's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CoreError, FineMoEError, SettingError
from ..policy.core import CHUNK_OPEN, FORWARD_PENDING, OUTBOXES, PREFETCH_OPEN
from .batch import Batch, Observer
from .experts_kernel import Arena, LayerOutputs, combine, runs_of
from .host_reader import HostReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..policy.core import Core
    from ..policy.system import System
    from .gates import MoeModel


@dataclass
class Times:
    """Seconds of the forward passes so far. `policy_s`: in the core's events, and in preparing them;
    `gate_wait_s`: until CUDA has computed what they carry; `stall_s`: waiting for demand loads;
    `search_wait_s`: waiting as the system's own search_blocks and prefetch_blocks say."""

    policy_s: float = 0.0
    gate_wait_s: float = 0.0
    stall_s: float = 0.0
    search_wait_s: float = 0.0
    iterations: int = 0


@dataclass
class Runtime:
    """One model, one core, one engine. Not thread-safe: one forward pass at a time."""

    core: Core
    engine: Any
    moe: MoeModel
    arenas: list[Arena]
    system: System
    prefetch_distance: int
    times: Times = field(default_factory=Times)
    observer: Observer | None = None

    _reader: HostReader = field(default_factory=HostReader)
    _batch: Batch | None = None  # told beforehand
    _open: Batch | None = None
    _layer: int = -1
    _logits: Tensor | None = None
    _hidden: Tensor | None = None

    def __post_init__(self) -> None:
        self.change(self.system, self.prefetch_distance, self.arenas)

    def change(self, system: System, prefetch_distance: int, arenas: list[Arena]) -> None:
        """Another system and other slots; `restart` follows."""
        self.system, self.prefetch_distance, self.arenas = system, prefetch_distance, arenas
        layers = len(self.moe.layers)
        self._speculated = [
            self.system.speculated(layer, layers, self.prefetch_distance) for layer in range(layers)
        ]
        self._as_ready = self.system.compute_order == "as_ready"

    def restart(self, core: Core, engine: Any) -> None:
        """Another core and engine, which know nothing of what was."""
        self.core, self.engine, self.times = core, engine, Times()
        self._batch = self._open = self._logits = self._hidden = None

    @property
    def expected(self) -> Batch | None:
        """Whom the next forward pass serves, where that is known."""
        return self._batch

    # What the hooks call.

    def expect(self, batch: Batch) -> None:
        """The next forward pass serves this batch. Requests of the last one that are not in it are over."""
        if self._open is not None:
            self.end([request for request in self._open.requests if request not in batch.requests])
        self._batch = batch

    def begin(self, embedded: Tensor) -> None:
        """The embedding's output [B, T, h] is known: the iteration begins."""
        batch, self._batch = self._batch, None
        if batch is None:
            return  # somebody embeds tokens of their own
        began_s = time.perf_counter()
        self._open, self._layer, self._logits = batch, -1, None
        phase = "prefill" if batch.prefill else "decode"
        rows = [(r, phase, n, True) for r, n in zip(batch.requests, batch.lengths(), strict=True)]
        (embedding,) = self._reader.read(batch.row_means(embedded))
        mask = self.core.begin_iteration(rows, embedding, self.engine.now())
        self._deliver(mask)
        if self.observer is not None:
            self.observer.begun(batch, embedding)
        self._count_policy(began_s)
        self._wait_searches(mask)

    def routed(self, hidden: Tensor, logits: Tensor) -> None:
        """A router has been applied: its input [tokens, H] and its logits [tokens, J]."""
        self._hidden, self._logits = hidden, logits

    def compute(self, layer: int, experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The output [tokens, H] of a layer's experts for the `chosen` [tokens, K] with their `weights`."""
        batch, logits = self._open, self._logits
        if batch is None or logits is None or layer != self._layer + 1:
            raise FineMoEError(
                f"MoE layer {layer} was computed outside its forward pass. Use the whole model, one pass at "
                "a time."
            )
        self._layer, self._logits = layer, None
        began_s = time.perf_counter()
        kept = batch.kept()
        if kept is not None:
            hidden, padded, chosen, weights = hidden[kept], hidden, chosen[kept], weights[kept]
        rows, ids = self._reader.read(batch.row_means(self.moe.probabilities(logits)), chosen)
        wanted = self.core.row_counts
        row_counts = self._row_counts(batch, ids) if wanted or self.observer else None
        counts = np.bincount(ids.reshape(-1), minlength=self.moe.num_experts)
        required = counts.nonzero()[0]
        try:
            mask = self.core.gate(
                layer,
                rows,
                required.tolist(),
                counts[required].tolist(),
                self.engine.now(),
                row_counts if wanted else None,
            )
        except CoreError:
            self.engine.check()  # what has stopped the core, if that is it
            if np.isfinite(rows).all():
                raise
            raise SettingError(
                f"the router of MoE layer {layer} gives no numbers: its weights, or those of layers before "
                "it, are damaged. Copy the checkpoint again."
            ) from None
        self._deliver(mask)
        if self.observer is not None and row_counts is not None:
            self.observer.routed(rows, row_counts)
        for target in self._speculated[layer]:
            asked = batch.row_means(self.moe.probabilities(self.moe.ask(target, self._hidden)))
            (guessed,) = self._reader.read(asked)
            mask |= self.core.speculation(layer, target, guessed, self.engine.now())
            self._deliver(mask)
            if self.observer is not None:
                self.observer.speculated(layer, target, guessed)
        self._count_policy(began_s)
        self._wait_searches(mask)
        # The order within an expert is transformers' own: a product's rows round by where they stand.
        order = torch.sort(chosen.reshape(-1))[1]
        starts = [0, *np.cumsum(counts).tolist()]
        outputs = self._in_parts(layer, experts, hidden[order // chosen.shape[-1]], starts)
        combined = combine(outputs, weights, order, hidden)
        return combined if kept is None else torch.zeros_like(padded).index_copy_(0, kept, combined)

    def finish(self) -> None:
        """All requests of the last pass are over."""
        if self._open is not None:
            self.end(self._open.requests)

    def end(self, finished: Sequence[int] = ()) -> None:
        """The last pass is over, and these requests will not come again."""
        if self._open is None:
            return
        if self._layer + 1 < len(self.moe.layers):
            raise FineMoEError(
                f"the last forward pass was interrupted at MoE layer {self._layer}. "
                "Call model.finemoe.reset()."
            )
        began_s = time.perf_counter()
        mask = self.core.end_iteration(self.engine.now(), finished)
        self._open = None
        self._deliver(mask)
        if self.observer is not None:
            self.observer.ended()
        self.times.policy_s += time.perf_counter() - began_s
        self.times.iterations += 1

    # A layer's parts.

    def _in_parts(self, layer: int, experts: Any, inputs: Tensor, starts: list[int]) -> Tensor:
        """Outputs [n, H] of the sorted pairs: chunk by chunk, or as experts become resident."""
        outputs = LayerOutputs(experts, inputs)
        mask = CHUNK_OPEN
        while mask & CHUNK_OPEN:
            members, slots = self._resident()
            for device, arena in enumerate(self.arenas):
                runs = runs_of(starts, *self._on(device, layer, members, slots))
                if runs:
                    outputs.compute(arena, runs)
            mask = self._computed(layer, members)
        if mask & PREFETCH_OPEN:
            self.times.search_wait_s += self.engine.wait_prefetches()
        return outputs.values

    def _resident(self) -> tuple[list[int], list[int]]:
        """Experts to compute now, by id, and the slots that they lie in."""
        began_s = time.perf_counter()
        if self._as_ready:
            members = self.engine.wait_ready()
            slots = [self.core.slot(expert) for expert in members]
        else:
            self.engine.wait_chunk()
            members, slots = (array.tolist() for array in self.core.chunk_slots())
        self.times.stall_s += time.perf_counter() - began_s
        return members, slots

    def _on(
        self, device: int, layer: int, members: list[int], slots: list[int]
    ) -> tuple[list[int], list[int]]:
        """Those of the members that live on a device, counted from the layer's first, and their slots."""
        first, devices = layer * self.moe.num_experts, len(self.arenas)
        mine = [
            (expert - first, slot)
            for expert, slot in zip(members, slots, strict=True)
            if expert % devices == device
        ]
        return [expert for expert, _ in mine], [slot for _, slot in mine]

    def _computed(self, layer: int, members: list[int]) -> int:
        """These experts' products are done, or queued on their devices' streams: what the core says to it."""
        began_s = time.perf_counter()
        for device, arena in enumerate(self.arenas):
            if arena.memory.is_cuda:
                stream = torch.cuda.current_stream(arena.memory.device).cuda_stream
                self.engine.record_compute(device, stream)
        mask = self.core.computed(layer, members, self.engine.now())
        self._deliver(mask)
        self.times.policy_s += time.perf_counter() - began_s
        return mask

    def _count_policy(self, began_s: float) -> None:
        """The time since then was the policy's, but for what CUDA took to compute what it is told."""
        waited_s, self._reader.waited_s = self._reader.waited_s, 0.0
        self.times.gate_wait_s += waited_s
        self.times.policy_s += time.perf_counter() - began_s - waited_s

    def _deliver(self, mask: int) -> None:
        """Let the workers carry out what an event asked for."""
        if mask & OUTBOXES:
            self.engine.notify(mask)

    def _wait_searches(self, mask: int) -> None:
        if mask & FORWARD_PENDING:
            began_s = time.perf_counter()
            for _, ticket in self.core.take_forward():
                self.engine.wait_search(ticket)
            self.times.search_wait_s += time.perf_counter() - began_s

    # What the core is told.

    def _row_counts(self, batch: Batch, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Tokens of each row that each expert received, [B, J]."""
        rows, experts = len(batch.requests), self.moe.num_experts
        tokens = [batch.tokens] * rows if len(ids) == rows * batch.tokens else batch.lengths()
        places = ids + np.repeat(np.arange(rows) * experts, tokens)[:, None]
        return (
            np.bincount(places.reshape(-1), minlength=rows * experts).reshape(rows, experts).astype(np.int32)
        )

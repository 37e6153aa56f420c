"""The experts' arithmetic on weights that lie in slots: transformers' `grouped_mm`, bit for bit.

Each expert's tokens are one matrix product of their own, whatever else is computed with it, and every
(token, k) output goes into a buffer that is summed over k once, in `grouped_mm`'s order. So the bits depend
neither on the slot of an expert nor on how a layer is cut into chunks. On the CPU that takes one thing more:
vector instructions and the loop's rest round differently, so an activation is always applied to all rows of
the layer, of which those that are not computed yet mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .expert_layout import ExpertLayout


MOST_GROUPS = 512  # of one grouped product; torch's CUDA kernel takes fewer than 1,024
Run = tuple[int, int, int]  # slot, and the sorted pairs [start, end) that go through the expert there


class Arena:
    """The expert slots of one device: one tensor, cut into slabs, and the parameters seen in them."""

    def __init__(self, layout: ExpertLayout, slots: int, device: torch.device) -> None:
        dtype = getattr(torch, layout.dtype)
        elements = layout.slab_bytes // layout.itemsize
        self.memory = torch.empty(slots * elements, dtype=dtype, device=device)
        self.slots = slots
        self.slab_bytes = layout.slab_bytes
        #: by parameter: [slots, …], strided by slabs
        self.parameters = {
            p.name: self.memory.as_strided(
                (slots, *p.shape), (elements, *_strides(p.shape)), p.place // layout.itemsize
            )
            for p in layout.parameters
        }

    def settle(self) -> None:
        """Until its device has computed all that was asked of it. Copies into the slots are not ordered after
        work from before their engine: on the slots, or on the memory that torch has made them of."""
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)


def runs_of(starts: list[int], experts: Iterable[int], slots: Iterable[int]) -> list[Run]:
    """Where these experts, which lie in `slots`, have their pairs; none for those that nobody chose.

    starts [J + 1]: where each expert's pairs begin, once all are sorted by expert.
    """
    return [
        (slot, starts[j], starts[j + 1])
        for j, slot in zip(experts, slots, strict=True)
        if starts[j + 1] > starts[j]
    ]


class LayerOutputs:
    """Outputs [n, H] of the sorted pairs of a layer, in parts, from their hidden states `inputs` [n, H]."""

    def __init__(self, experts: Any, inputs: Tensor) -> None:
        self._experts = experts
        self._inputs = inputs
        self._first = "gate_up_proj" if experts.has_gate else "up_proj"
        self._inner: Tensor | None = None
        self._outputs: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """All of them, once every run has been computed."""
        assert self._outputs is not None
        return self._outputs

    def compute(self, arena: Arena, runs: list[Run]) -> None:
        """The outputs of these runs, with the weights in their slots."""
        if arena.memory.is_cuda:
            self._compute_there(arena, runs)
        else:
            self._compute_here(arena, runs)

    def _compute_here(self, arena: Arena, runs: list[Run]) -> None:
        self._inner = _products(self._experts, arena, self._first, self._inputs, runs, self._inner)
        activated = self._activate(self._inner)
        self._outputs = _products(self._experts, arena, "down_proj", activated, runs, self._outputs)

    def _compute_there(self, arena: Arena, runs: list[Run]) -> None:
        """On the arena's GPU: as many experts as can be in one launch each way."""
        for slots, part in launches(runs, MOST_GROUPS):
            self._launch(arena, slots, part)

    def _launch(self, arena: Arena, slots: slice, runs: list[Run]) -> None:
        inputs, device = self._inputs, arena.memory.device
        rows = torch.from_numpy(np.concatenate([np.arange(start, end) for _, start, end in runs]))
        rows = rows.to(inputs.device, non_blocking=True)
        inner = _grouped(self._experts, arena, self._first, inputs[rows].to(device), slots, runs)
        outputs = _grouped(self._experts, arena, "down_proj", self._activate(inner), slots, runs)
        if self._outputs is None:
            self._outputs = torch.empty(inputs.shape, dtype=outputs.dtype, device=inputs.device)
        self._outputs[rows] = outputs.to(inputs.device)

    def _activate(self, inner: Tensor) -> Tensor:
        experts = self._experts
        activated: Tensor = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        return activated


def launches(runs: list[Run], most: int) -> list[tuple[slice, list[Run]]]:
    """The runs in order of their slots, in parts that lie within `most` neighbouring slots each."""
    parts: list[list[Run]] = []
    for run in sorted(runs):
        if not parts or run[0] - parts[-1][0][0] >= most:
            parts.append([])
        parts[-1].append(run)
    return [(slice(part[0][0], part[-1][0] + 1), part) for part in parts]


def combine(outputs: Tensor, weights: Tensor, order: Tensor, like: Tensor) -> Tensor:
    """Sum over k of the sorted pairs' `outputs` [n, H], weighted: [tokens, H], in the dtype of `like`."""
    sorted_weighted = outputs * weights.reshape(-1)[order].unsqueeze(-1)
    weighted = torch.empty_like(sorted_weighted)
    weighted[order] = sorted_weighted
    return weighted.view(*weights.shape, -1).sum(dim=1).to(like.dtype)


def _products(
    experts: Any, arena: Arena, name: str, inputs: Tensor, runs: list[Run], into: Tensor | None
) -> Tensor:
    """The matrix products of these runs on the CPU, in their rows of `into`, which is made where it is None.

    A product at a time, which is what `grouped_mm` does there; but a group takes it time even where it is
    empty, and there are as many groups as slots.
    """
    weight = _weight(experts, arena, name)
    inputs = inputs.to(weight.dtype)
    outputs = inputs.new_zeros(len(inputs), weight.shape[-1]) if into is None else into
    for slot, start, end in runs:
        part = outputs[start:end]
        torch.mm(inputs[start:end], weight[slot], out=part)
        if experts.has_bias:
            part.add_(arena.parameters[f"{name}_bias"][slot])
    return outputs


def _grouped(experts: Any, arena: Arena, name: str, inputs: Tensor, slots: slice, runs: list[Run]) -> Tensor:
    """One launch for these slots of a GPU; those without a run have no rows. Runs are in order of slots."""
    weight = _weight(experts, arena, name)[slots]
    lengths = np.zeros(len(weight), np.int32)
    lengths[[slot - slots.start for slot, _, _ in runs]] = [end - start for _, start, end in runs]
    offsets = torch.from_numpy(np.cumsum(lengths, dtype=np.int32)).to(weight.device, non_blocking=True)
    outputs = torch.nn.functional.grouped_mm(inputs.to(weight.dtype), weight, offs=offsets)
    if experts.has_bias:
        places = torch.from_numpy(np.repeat(np.arange(slots.start, slots.stop), lengths)).to(weight.device)
        outputs.add_(arena.parameters[f"{name}_bias"][places])
    return outputs


def _weight(experts: Any, arena: Arena, name: str) -> Tensor:
    """[slots, in, out]"""
    weight = arena.parameters[name]
    return weight if experts.is_transposed else weight.transpose(-2, -1)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))

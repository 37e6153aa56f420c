"""The experts' arithmetic on weights that lie in slots: transformers' `grouped_mm`, bit for bit.

Each expert's tokens are one matrix product of their own, whatever else is computed with it, and every
(token, k) output goes into a buffer that is summed over k once, in `grouped_mm`'s order. So the bits depend
neither on the slot of an expert nor on how a layer is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .expert_layout import ExpertLayout


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
        #: by matrix and slot: views made once, because making one takes as long as a small product
        self.matrices = {name: list(value) for name, value in self.parameters.items() if value.ndim == 3}
        self.columns = {name: [m.T for m in value] for name, value in self.matrices.items()}


@dataclass(frozen=True)
class Pairs:
    """The n = tokens · K (token, k) pairs of a layer, sorted by expert.

    `order` [n]: position of each sorted pair among all; `starts` [J + 1]: where each expert's pairs begin.
    """

    order: NDArray[np.int64]
    starts: list[int]

    @classmethod
    def of(cls, chosen: NDArray[np.int64], counts: NDArray[np.int64]) -> Pairs:
        """Of the experts chosen [tokens, K], whose `counts` [J] are known."""
        return cls(np.argsort(chosen.reshape(-1), kind="stable"), [0, *np.cumsum(counts).tolist()])

    def runs(self, experts: Iterable[int], slots: Iterable[int]) -> list[Run]:
        """Where these experts, which lie in `slots`, have their pairs; none for those that nobody chose."""
        starts = self.starts
        return [
            (slot, starts[j], starts[j + 1])
            for j, slot in zip(experts, slots, strict=True)
            if starts[j + 1] > starts[j]
        ]


def expert_outputs(experts: Any, arena: Arena, inputs: Tensor, runs: list[Run]) -> Tensor:
    """Outputs [n, H] of the pairs with hidden states `inputs` [n, H]: one run after another makes up all of
    them. On a GPU runs are in order of their slots."""
    slots, ends = [slot for slot, _, _ in runs], []
    at = 0
    for _, start, end in runs:
        at += end - start
        ends.append(at)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _linear(experts, arena, first, inputs, slots, ends)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outputs = _linear(experts, arena, "down_proj", inner, slots, ends)
    if getattr(experts, "has_post_expert_norm", False):
        outputs = experts.post_expert_norm(outputs)
    return outputs


def combine(outputs: Tensor, weights: Tensor, order: Tensor, like: Tensor) -> Tensor:
    """Sum over k of the sorted pairs' `outputs` [n, H], weighted: [tokens, H], in the dtype of `like`."""
    sorted_weighted = outputs * weights.reshape(-1)[order].unsqueeze(-1)
    weighted = torch.empty_like(sorted_weighted)
    weighted[order] = sorted_weighted
    return weighted.view(*weights.shape, -1).sum(dim=1).to(like.dtype)


def _linear(
    experts: Any, arena: Arena, name: str, inputs: Tensor, slots: list[int], ends: list[int]
) -> Tensor:
    weight = arena.parameters[name]
    inputs = inputs.to(weight.dtype)
    if weight.is_cuda:
        outputs = _grouped(weight if experts.is_transposed else weight.transpose(-2, -1), inputs, slots, ends)
    else:
        matrices = (arena.matrices if experts.is_transposed else arena.columns)[name]
        outputs = inputs.new_empty(len(inputs), matrices[0].shape[1])
        start = 0
        for slot, end in zip(slots, ends, strict=True):
            torch.mm(inputs[start:end], matrices[slot], out=outputs[start:end])
            start = end
    if experts.has_bias:
        bias = arena.parameters[f"{name}_bias"]
        lengths = np.diff(ends, prepend=0)
        rows = torch.from_numpy(np.repeat(np.array(slots, np.int64), lengths)).to(bias.device)
        outputs.add_(bias[rows])
    return outputs


def _grouped(weight: Tensor, inputs: Tensor, slots: list[int], ends: list[int]) -> Tensor:
    """One launch for all slots; those not named have no rows. `slots` ascend."""
    lengths = np.zeros(len(weight), np.int32)
    lengths[slots] = np.diff(ends, prepend=0)
    offsets = torch.from_numpy(np.cumsum(lengths, dtype=np.int32)).to(weight.device, non_blocking=True)
    return torch.nn.functional.grouped_mm(inputs, weight, offs=offsets)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))

"""What the gates of a model say during its forward passes: hooks on routers and on the input embedding.

A forward pass costs one small hook per layer; softmax, means and counts are done for many layers at once, and
one copy per iteration leaves the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..traces.routing import Half, RequestRouting
from .gates import MoeModel

_HELD_TOKENS = 1024  # tokens x layers whose router inputs and logits are kept until they are worked on


@dataclass(frozen=True, eq=False)
class Iteration:
    """One forward pass of B requests, means over each one's tokens; pad tokens are in nothing.

    gate         f16 [B, L, J], mean of the gate's probabilities
    counts       i32 [B, L, J], tokens that chose each expert
    embedding    f16 [B, h], mean of the embedding layer's output
    speculation  distance → f16 [B, L, J]: layer l + distance's gate on layer l's router input, in row l; rows
                 of the last `distance` layers are 0
    """

    gate: Half
    counts: npt.NDArray[np.int32]
    embedding: Half
    speculation: dict[int, Half]


class GateRecorder:
    """Records the forward passes of `model` while it is entered: `begin`, the model's forward, `end`."""

    def __init__(self, model: Any, moe: MoeModel, distances: Sequence[int] = ()) -> None:
        self._moe = moe
        self._distances = tuple(distances)
        self._embedding_layer = model.get_input_embeddings()
        self._hooks: list[Any] = []
        self._drop()

    def __enter__(self) -> GateRecorder:
        def hook_of(layer: int) -> Any:
            def hook(_: object, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
                self._routed(layer, inputs[0], output)

            return hook

        self._hooks = [layer.router.register_forward_hook(hook_of(layer.index)) for layer in self._moe.layers]
        self._hooks.append(self._embedding_layer.register_forward_hook(self._embedded))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._drop()

    def _drop(self) -> None:
        self._mask: Tensor | None = None
        self._embedding: Tensor | None = None
        self._held: list[tuple[Tensor, Tensor, Tensor]] = []
        self._next = 0  # layers seen

    def begin(self, mask: Tensor) -> None:
        """The next forward pass is of these tokens: bool [B, S], false for pads; every row has a true."""
        shape = (len(self._moe.layers), len(mask), self._moe.num_experts)
        self._drop()
        self._mask = mask
        self._tokens = mask.sum(dim=1)
        self._gate = torch.zeros(shape, dtype=torch.float16, device=mask.device)
        self._counts = torch.zeros(shape, dtype=torch.int32, device=mask.device)
        self._speculation = {d: torch.zeros_like(self._gate) for d in self._distances}

    def end(self) -> Iteration:
        """What the forward pass since `begin` said. Raises `RuntimeError` where a layer was not computed."""
        self._work_off()
        if self._embedding is None or self._next != len(self._moe.layers):
            raise RuntimeError(
                f"the forward pass went through {self._next} of {len(self._moe.layers)} MoE layers"
            )

        def out(values: Tensor) -> npt.NDArray[Any]:
            return np.ascontiguousarray(values.transpose(0, 1).cpu().numpy())

        iteration = Iteration(
            gate=out(self._gate),
            counts=out(self._counts),
            embedding=np.asarray(self._embedding.cpu().numpy()),
            speculation={distance: out(rows) for distance, rows in self._speculation.items()},
        )
        self._drop()
        return iteration

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _embedded(self, _: object, inputs: object, output: Tensor) -> None:
        if self._mask is not None and self._embedding is None:
            self._embedding = self._mean(output.float()).half()

    def _routed(self, layer: int, hidden: Tensor, output: tuple[Tensor, ...]) -> None:
        if self._mask is None:
            return
        if layer != self._next:
            raise RuntimeError(f"MoE layer {layer} was computed where layer {self._next} comes next")
        self._next += 1
        logits = self._moe.logits(output)
        self._held.append((logits, self._moe.chosen(output), hidden))
        if len(self._held) * len(logits) >= _HELD_TOKENS:
            self._work_off()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _work_off(self) -> None:
        """Reduce the held layers to their rows."""
        if not self._held or self._mask is None:
            return
        moe, held = self._moe, self._held
        batch, length = self._mask.shape
        layers = slice(self._next - len(held), self._next)
        self._gate[layers] = self._rows([logits for logits, _, _ in held])
        chosen = torch.stack([ids for _, ids, _ in held]).reshape(len(held), batch, length * moe.top_k)
        own = self._mask.to(torch.int32).repeat_interleave(moe.top_k, dim=1).expand_as(chosen)
        self._counts[layers].scatter_add_(2, chosen.long(), own)
        for distance, rows in self._speculation.items():
            known = min(len(held), len(moe.layers) - distance - layers.start)
            if known > 0:
                asked = [moe.ask(layers.start + i + distance, held[i][2]) for i in range(known)]
                rows[layers.start : layers.start + known] = self._rows(asked)
        self._held = []

    def _rows(self, logits: list[Tensor]) -> Tensor:
        """f16 [layers, B, J]: mean probabilities of each request's tokens."""
        assert self._mask is not None
        batch, length = self._mask.shape
        rows = self._moe.probabilities(torch.stack(logits)).reshape(len(logits), batch, length, -1)
        return self._mean(rows).half()

    def _mean(self, values: Tensor) -> Tensor:
        """Mean over the tokens of each request: [..., B, S, width] → [..., B, width]."""
        assert self._mask is not None
        if self._mask.shape[1] == 1:
            return values.squeeze(-2)
        # Not a product with the mask: what pads compute may be no number.
        kept = values.masked_fill(~self._mask.unsqueeze(-1), 0)
        return kept.sum(dim=-2) / self._tokens.unsqueeze(-1)


def routing_of(iterations: Sequence[Iteration], row: int) -> RequestRouting:
    """The routing of request `row` of the batch whose iterations these are."""
    counts = np.stack([iteration.counts[row] for iteration in iterations])
    used = counts > 0
    return RequestRouting(
        gate=np.stack([iteration.gate[row] for iteration in iterations]),
        experts=np.nonzero(used)[2].astype(np.uint16),
        token_counts=counts[used],
        offsets=np.concatenate((np.zeros(1, np.int64), np.cumsum(used.sum(axis=2).reshape(-1)))),
        embedding=np.stack([iteration.embedding[row] for iteration in iterations]),
        speculation={
            distance: np.stack([iteration.speculation[distance][row] for iteration in iterations])
            for distance in iterations[0].speculation
        },
    )

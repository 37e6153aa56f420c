"""Where a transformers model meets the runtime: hooks on the model, its embedding and its routers, and one
experts function for every MoE layer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .batch import Batch
from .versions import cache_argument

if TYPE_CHECKING:
    from .runtime import Runtime

FUNCTION = "finemoe"  # name in transformers' registry of experts functions
_ATTRIBUTE = "_finemoe_layer"  # of an experts module: (runtime, number of its MoE layer)


def experts_function(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' experts interface: hidden states [tokens, H], chosen experts and weights [tokens, K]."""
    runtime, layer = getattr(self, _ATTRIBUTE)
    with torch.no_grad():
        result: Tensor = runtime.compute(layer, self, hidden, chosen, weights)
    return result


def attach(model: Any, runtime: Runtime) -> None:
    """Let the runtime see the model's forward passes, and compute its experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(FUNCTION, experts_function)
    for layer in runtime.moe.layers:
        setattr(layer.experts, _ATTRIBUTE, (runtime, layer.index))
        layer.router.register_forward_hook(functools.partial(_routed, runtime))
    model.set_experts_implementation(FUNCTION)
    decoder = model.base_model  # what `model(...)` calls, and who wants hidden states
    requests = _Requests(runtime, cache_argument(decoder))
    decoder.register_forward_pre_hook(requests.expect, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(functools.partial(_embedded, runtime))
    model.generate = functools.partial(_generate, model, runtime, type(model).generate)


def _routed(runtime: Runtime, _: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    runtime.routed(inputs[0], runtime.moe.logits(output))


def _embedded(runtime: Runtime, _: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    runtime.begin(output)


def _generate(model: Any, runtime: Runtime, generate: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own `generate`; its requests are over when it returns."""
    result = generate(model, *args, **kwargs)
    runtime.finish()
    return result


class _Requests:
    """Tells requests of plain forward passes apart: a pass without a past begins as many as it has rows."""

    def __init__(self, runtime: Runtime, cache_argument: str) -> None:
        self._runtime = runtime
        self._cache_argument = cache_argument
        self._next = 0
        self._running: tuple[int, ...] = ()
        self._told: Batch | None = None

    def expect(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass of the whole model."""
        pending = self._runtime.expected
        if pending is not None and pending is not self._told:
            return  # somebody who knows the requests has told
        embedded = kwargs.get("inputs_embeds")
        given: Any = kwargs.get("input_ids", args[0] if args else None) if embedded is None else embedded
        if given is None or not given.shape[0]:
            return  # the model says what is wrong
        rows, tokens = int(given.shape[0]), int(given.shape[1])
        past = kwargs.get(self._cache_argument)
        begun = past is not None and past.get_seq_length() > 0
        if not begun or rows != len(self._running):
            self._running = tuple(range(self._next, self._next + rows))
            self._next += rows
        mask = kwargs.get("attention_mask")
        valid = None
        if tokens > 1 and mask is not None and mask.ndim == 2:
            valid = mask[:, -tokens:].bool()
            valid = None if bool(valid.all()) else valid
        self._told = Batch(self._running, not begun or tokens > 1, tokens, valid)
        self._runtime.expect(self._told)
        if embedded is not None:
            self._runtime.begin(embedded)

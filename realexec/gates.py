"""Where a transformers model's experts and routers are, and what its routers say.

One mechanism for every family of transformers 5: the model names its router class itself
(`_can_record_outputs["router_logits"]`, made for its own `output_router_logits`), routers return
(logits, weights, chosen experts), experts are 3-D tensors beside the router. How a router scores is found by
asking it: a router with random weights shows whether its experts' weights go with the softmax or with the
sigmoid of its logits. `EXCEPTIONS` holds what this does not find.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import SettingError

Scoring = Literal["softmax", "sigmoid"]
_PROBES = 32  # tokens shown to a router
_TOLERANCE = 1e-3  # of a log weight; fp32 stays below 1e-5


@dataclass(frozen=True)
class RouterForm:
    """How one family's router is read, where it differs from (logits, weights, chosen experts).

    `scoring`        known beforehand, where its weights do not show it
    `probabilities`  its first output has been through the softmax already
    `bias_argument`  its forward also takes a bias [J], which decides the choice and not the logits
    `refused`        why the family is not supported
    """

    scoring: Scoring | None = None
    probabilities: bool = False
    bias_argument: bool = False
    refused: str = ""


#: by `model_type`
EXCEPTIONS = {
    # sparsemixer: each chosen expert's weight is a softmax of its own, over the experts near it
    "phimoe": RouterForm(scoring="softmax"),
    "gemma4_text": RouterForm(probabilities=True),
    "minimax_m2": RouterForm(bias_argument=True),
    "hy_v3": RouterForm(bias_argument=True),
    "jetmoe": RouterForm(refused="its attention is routed to experts too, with a gate of its own"),
    "llama4_text": RouterForm(refused="every expert computes every token, with its input scaled"),
    "zaya": RouterForm(refused="a router reads the state of the router before it"),
    "switch_transformers": RouterForm(refused="it is an encoder and a decoder"),
    "nllb-moe": RouterForm(refused="it is an encoder and a decoder"),
}


@dataclass(frozen=True, eq=False)
class MoeLayer:
    """One MoE layer: `index` counts MoE layers only, from 0; `name` is the block that holds both modules."""

    index: int
    name: str
    experts: nn.Module
    router: nn.Module


@dataclass(frozen=True, eq=False)
class MoeModel:
    """The MoE layers of a model: `num_experts` J routed experts each, `top_k` K of them per token."""

    family: str
    layers: tuple[MoeLayer, ...]
    num_experts: int
    top_k: int
    scoring: Scoring
    form: RouterForm

    def expert_bytes(self) -> int:
        """Bytes of one routed expert's matrices, as they are held; the mean over the layers."""
        matrices = [
            p for layer in self.layers for p in layer.experts.parameters(recurse=False) if p.ndim == 3
        ]
        return int(sum(p.numel() * p.element_size() for p in matrices)) // (
            len(self.layers) * self.num_experts
        )

    def logits(self, output: tuple[Tensor, ...]) -> Tensor:
        """What a router's forward returned for all J experts: [tokens, J]."""
        return _ordered(output)[0].reshape(-1, self.num_experts)

    def chosen(self, output: tuple[Tensor, ...]) -> Tensor:
        """Ids of the experts that a router's forward chose: [tokens, K], in no order."""
        return _ordered(output)[2].reshape(-1, self.top_k)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The gate's distribution over all J experts, fp32, of the same shape as `logits` [..., J].

        Sigmoid scores are divided by their sum; correction biases and groups, which act on the choice only,
        are not in it.
        """
        logits = logits.float()
        if self.form.probabilities:
            return logits
        if self.scoring == "softmax":
            return torch.softmax(logits, dim=-1)
        scores = torch.sigmoid(logits)
        return scores / scores.sum(dim=-1, keepdim=True)

    def ask(self, layer: int, hidden: Tensor) -> Tensor:
        """Logits [tokens, J] of layer `layer`'s router for hidden states of another layer.

        Calls the router's forward itself, so hooks on it do not see the call.
        """
        router = self.layers[layer].router
        return self.logits(router.forward(hidden, *_bias(self.form, self.num_experts, hidden)))


def find_moe(model: Any) -> MoeModel:
    """The MoE layers of a transformers causal language model, loaded or on `meta`.

    Raises `SettingError` for a model without routed experts, and for one that is not supported, by name and
    with the reason.
    """
    config = model.config.get_text_config()
    family = str(config.model_type)
    form = EXCEPTIONS.get(family, RouterForm())
    if form.refused:
        raise _unsupported(family, form.refused)
    layers = tuple(
        MoeLayer(index, name, _experts(family, block, router), router)
        for index, (name, block, router) in enumerate(_routers(model, family))
    )
    with torch.no_grad(), torch.device("cpu"):  # the caller may build models on `meta` by default
        shapes = {_shape(family, layer, int(config.hidden_size), form) for layer in layers}
        if len(shapes) != 1:
            raise _unsupported(family, f"its layers differ: {sorted(shapes)} as (experts, top K)")
        num_experts, top_k = shapes.pop()
        scoring = form.scoring or _scoring(family, layers[0], config, form)
    return MoeModel(family, layers, num_experts, top_k, scoring, form)


def _unsupported(family: str, reason: str) -> SettingError:
    return SettingError(f"{family} models are not supported: {reason}. Take another model.")


def _routers(model: nn.Module, family: str) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(name of the block, block, router) in the order of the layers."""
    recorders = {
        _target(recorder)
        for module in model.modules()
        for recorder in _as_list((getattr(module, "_can_record_outputs", None) or {}).get("router_logits"))
    }
    if not recorders:  # before transformers 5.18, of some families
        recorders = {
            (type(module), None)
            for block in model.modules()
            if any(_packed(child) for child in block.children())
            for module in block.children()
            if type(module).__name__.endswith("Router")
        }
    if not recorders:
        raise SettingError(
            f"{family} models have no routed experts (transformers knows no router of theirs). "
            "Take a Mixture-of-Experts model."
        )
    modules = dict(model.named_modules())
    found = False
    for name, module in modules.items():
        for target, suffix in recorders:
            if type(module) is target and (suffix is None or name.endswith(suffix)):
                found = True
                block = name.rpartition(".")[0]
                yield block, modules[block], module
    if not found:
        raise SettingError(
            f"this {family} model has no layer with routed experts (its config.json turns them off). "
            "Take a Mixture-of-Experts model."
        )


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _target(recorder: Any) -> tuple[Any, str | None]:
    """A bare class, or transformers' OutputRecorder of one."""
    return getattr(recorder, "target_class", recorder), getattr(recorder, "layer_name", None)


def _experts(family: str, block: nn.Module, router: nn.Module) -> nn.Module:
    for module in block.modules():
        if _packed(module):
            return module
    raise _unsupported(family, f"no experts packed into one tensor beside its {type(router).__name__}")


def _packed(module: nn.Module) -> bool:
    """Whether these are experts, packed into one tensor."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.ndim == 3


def _ordered(output: Any) -> Any:
    """(logits, weights, chosen experts) of a router; in transformers 5.17 some return them in reverse."""
    if isinstance(output, tuple) and len(output) == 3 and not output[0].is_floating_point():
        return output[::-1]
    return output


def _bias(form: RouterForm, num_experts: int, hidden: Tensor) -> tuple[Tensor, ...]:
    return (torch.zeros(num_experts, device=hidden.device),) if form.bias_argument else ()


def _shape(family: str, layer: MoeLayer, hidden_size: int, form: RouterForm) -> tuple[int, int]:
    """(J, K) of a layer."""
    logits, _, chosen = _probe(family, layer, hidden_size, form)
    return logits.shape[-1], chosen.shape[-1]


def _probe(family: str, layer: MoeLayer, hidden_size: int, form: RouterForm) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, chosen) of the router with random weights, for random tokens; its own are not
    touched, and may be on `meta`."""
    router, kind = layer.router, type(layer.router).__name__
    num_experts = int(layer.experts.down_proj.shape[0])
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_PROBES, hidden_size, generator=generator, dtype=torch.float32)
    tensors = {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float32) * p.shape[-1] ** -0.5
        if p.ndim > 1
        else torch.ones(p.shape, dtype=torch.float32)
        for name, p in router.named_parameters()
    }
    tensors |= {name: torch.zeros(b.shape, dtype=b.dtype) for name, b in router.named_buffers()}
    training = router.training
    router.eval()
    try:
        output = _ordered(
            torch.func.functional_call(router, tensors, (hidden, *_bias(form, num_experts, hidden)))
        )
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise _unsupported(family, f"{kind} does not answer to hidden states alone ({reason})") from error
    finally:
        router.train(training)
    if not (
        isinstance(output, tuple)
        and len(output) == 3
        and all(isinstance(part, Tensor) and part.ndim == 2 and len(part) == _PROBES for part in output)
        and output[1].shape == output[2].shape
        and not output[2].is_floating_point()
    ):
        raise _unsupported(family, f"{kind} does not return logits, weights and chosen experts")
    if output[0].shape[-1] != num_experts:
        raise _unsupported(
            family, f"{kind} chooses among {output[0].shape[-1]} experts, {num_experts} have weights"
        )
    return output


def _scoring(family: str, layer: MoeLayer, config: Any, form: RouterForm) -> Scoring:
    """Whether the chosen experts' weights go with the softmax or with the sigmoid of their logits, up to a
    factor per token."""
    logits, weights, chosen = _probe(family, layer, int(config.hidden_size), form)
    weights = weights.double().log()

    def goes_with(scores: Tensor) -> bool:
        factor = weights - scores.gather(-1, chosen)
        # With one expert per token its factor alone says nothing: it must be that of the other tokens.
        center = factor.mean() if chosen.shape[-1] == 1 else factor.mean(dim=-1, keepdim=True)
        return bool(((factor - center).abs() < _TOLERANCE).all())

    logits = logits.double()
    if goes_with(logits.log() if form.probabilities else logits.log_softmax(dim=-1)):
        return "softmax"
    if goes_with(nn.functional.logsigmoid(logits)):
        return "sigmoid"
    if chosen.shape[-1] == 1 and bool((weights.abs() < _TOLERANCE).all()):  # normalised over one expert
        return "sigmoid" if getattr(config, "scoring_func", "softmax") == "sigmoid" else "softmax"
    raise _unsupported(family, f"{type(layer.router).__name__} scores by neither softmax nor sigmoid")

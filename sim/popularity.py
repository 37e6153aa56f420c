"""Which experts are popular, measured on requests that are not served: what `static` preloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..traces.routing import RequestRouting, RoutingSource
    from .cell import CellInputs

# Without training requests: as many others as these, as long as these. ASSUMED.
SAMPLE_REQUESTS = 32
SAMPLE_PROMPT_TOKENS = 256
SAMPLE_OUTPUT_TOKENS = 64


def sample_of(routing: RoutingSource, served: set[int]) -> list[int]:
    """Requests of the routing whose popularity may be measured: none of those served."""
    return routing.others(served, SAMPLE_REQUESTS)


def token_sums(routing: RequestRouting, experts: int) -> NDArray[np.int64]:
    """Tokens that each expert received over all iterations of a request: int64 [L, J]."""
    iterations, layers, _ = routing.gate.shape
    cells = np.repeat(np.tile(np.arange(layers), iterations), np.diff(routing.offsets))
    places = cells * experts + routing.experts
    sums = np.bincount(places, weights=routing.token_counts, minlength=layers * experts)
    return sums.astype(np.int64).reshape(layers, experts)


def popularity(inputs: CellInputs) -> NDArray[np.int64]:
    """Tokens per expert, int64 [L, J], of the training requests, or of a sample of unserved ones."""
    routing, experts = inputs.routing.afresh(), inputs.model.experts
    if inputs.training:
        found = [routing.routing_for(r.index, r.prompt_tokens, r.output_tokens) for r in inputs.training]
    else:
        served = {request.index for request in inputs.requests}
        found = [
            routing.routing_for(index, SAMPLE_PROMPT_TOKENS, SAMPLE_OUTPUT_TOKENS)
            for index in sample_of(routing, served)
        ]
    total = np.zeros((inputs.model.layers, experts), np.int64)
    for one in found:
        total += token_sums(one, experts)
    return total

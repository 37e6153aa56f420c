"""Which experts are popular, measured on requests that are not served: what `static` preloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..serving.selection import Requests
    from ..traces.routing import RoutingSource
    from .cell import CellInputs

# Without training requests: as many others as these, as long as these. ASSUMED.
SAMPLE_REQUESTS = 32
SAMPLE_PROMPT_TOKENS = 256
SAMPLE_OUTPUT_TOKENS = 64


def sample_of(routing: RoutingSource, served: Requests) -> list[int]:
    """Requests of the routing whose popularity may be measured: none of those served."""
    return routing.others((request.index for request in served), SAMPLE_REQUESTS)


def popularity(inputs: CellInputs) -> NDArray[np.int64]:
    """Tokens per expert, int64 [L, J], of the training requests, or of a sample of unserved ones."""
    routing = inputs.routing.afresh()
    if inputs.training:
        found = [routing.routing_for(r.index, r.prompt_tokens, r.output_tokens) for r in inputs.training]
    else:
        found = [
            routing.routing_for(index, SAMPLE_PROMPT_TOKENS, SAMPLE_OUTPUT_TOKENS)
            for index in sample_of(routing, inputs.requests)
        ]
    total = np.zeros((inputs.model.layers, inputs.model.experts), np.int64)
    for one in found:
        total += one.all_tokens()
    return total

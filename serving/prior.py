"""What a core is taught before its first iteration, in both worlds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..policy.core import Core, Options, Searcher, make_config

if TYPE_CHECKING:
    from ..policy.system import System
    from ..traces.routing import RequestRouting


def fill_store(core: Core, system: System, options: Options, requests: Iterable[RequestRouting]) -> None:
    """Fill the store with the expert maps or activation matrices of training requests; systems that store
    neither read no request."""
    if system.predictor not in ("map", "activation"):
        return
    searcher = Searcher(make_config(options))
    for routing in requests:
        if system.predictor == "map":
            searcher.fill(routing.gate, routing.embedding)
        else:
            searcher.fill_counts(routing.all_tokens())
    core.seed_store(*searcher.contents())

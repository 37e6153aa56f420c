"""From chosen experts and their probabilities, token by token, to the iterations of a routing trace."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .routing import RequestRouting, RoutingMeta
from .routing_check import ROW_SUM_TOLERANCE


def unchosen_mass(probabilities: npt.NDArray[Any]) -> Literal["even", "zero"]:
    """Where the probability of the experts goes that were not chosen, from recorded ones [..., k].

    "zero" if those of every token sum to 1: they are renormalised, and how much the others had is not known.
    """
    sums = probabilities.astype(np.float32).sum(axis=-1)
    return "even" if bool((np.abs(sums - 1) > ROW_SUM_TOLERANCE).any()) else "zero"


def routing_of_tokens(
    experts: npt.NDArray[Any], probabilities: npt.NDArray[Any], prompt_tokens: int, meta: RoutingMeta
) -> RequestRouting:
    """One request from its tokens' experts [n, L, k], in any order, and their probabilities [n, L, k].

    The first `prompt_tokens` tokens become one prefill iteration (mean of their rows, union of their experts
    with token counts; none if 0), every further token one decode iteration.
    """
    chosen, mass = experts.astype(np.int64), probabilities.astype(np.float32)
    rest = np.maximum(1 - mass.sum(axis=2), 0) / max(1, meta.experts - meta.top_k)
    rows = np.repeat((rest * (meta.unchosen_mass == "even"))[:, :, None], meta.experts, axis=2)
    rows = rows.astype(np.float32)
    np.put_along_axis(rows, chosen, mass, axis=2)
    chosen = np.sort(chosen, axis=2)

    prompt, (n, layers, top_k) = prompt_tokens, chosen.shape
    gate, lengths = rows[prompt:], np.full((n - prompt) * layers, top_k)
    required, counts = chosen[prompt:].reshape(-1), np.ones((n - prompt) * layers * top_k, np.int32)
    if prompt:
        place = chosen[:prompt] + np.arange(layers)[:, None] * meta.experts
        tokens = np.bincount(place.reshape(-1), minlength=layers * meta.experts).reshape(layers, -1)
        gate = np.concatenate((rows[:prompt].mean(axis=0, keepdims=True), gate))
        lengths = np.concatenate((np.count_nonzero(tokens, axis=1), lengths))
        required = np.concatenate((np.nonzero(tokens)[1], required))
        counts = np.concatenate((tokens[tokens > 0].astype(np.int32), counts))
    return RequestRouting(
        gate=gate.astype(np.float16),
        experts=required.astype(np.uint16),
        token_counts=counts,
        offsets=np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))),
        embedding=None,
        speculation={},
    )

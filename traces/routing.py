"""What a routing trace says, whether recorded, imported or synthesised.

A request has one prefill iteration (0) and then one decode iteration per further output token. Per iteration
and layer a trace holds the gate's probabilities over the J experts, and the experts that the iteration's
tokens activated with the number of tokens each received.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

Half = npt.NDArray[np.float16]
Counts = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]


class RoutingMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape and origin of a routing trace; stored as JSON in the file's schema metadata.

    `gate_content`: "full" rows are the gate's whole distribution; "chosen" rows hold the recorded
    probabilities of the activated experts, and `unchosen_mass` says where the rest went: "even" over the
    other experts, or "zero".
    `prefill`: "recorded", "derived" (aggregated from the first decode iterations) or "none".
    `embedding_width` is 0 where no embedding is known. `speculation` lists the distances that have rows.
    `notes` says where the data comes from, in words.
    """

    model: str
    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    embedding_width: int
    source: Literal["recorded", "imported", "synthetic"]
    gate_content: Literal["full", "chosen"]
    unchosen_mass: Literal["recorded", "even", "zero"] = "recorded"
    generator_seed: int | None = None
    prefill: Literal["recorded", "derived", "none"] = "recorded"
    speculation: tuple[int, ...] = ()
    notes: str = ""

    def __post_init__(self) -> None:
        if not (self.layers >= 1 and 1 <= self.top_k <= self.experts <= 65_535):
            raise ValueError(
                f"layers = {self.layers}, experts = {self.experts}, top_k = {self.top_k}: "
                "needs layers ≥ 1 and 1 ≤ top_k ≤ experts ≤ 65535"
            )
        if self.expert_bytes < 1:
            raise ValueError(f"expert_bytes = {self.expert_bytes}: the size of one expert must be stated")
        if self.embedding_width < 0:
            raise ValueError(f"embedding_width = {self.embedding_width} is negative")
        if any(not 1 <= distance < self.layers for distance in self.speculation):
            raise ValueError(f"speculation = {list(self.speculation)}: distances go from 1 to layers − 1")
        if (self.gate_content == "full") != (self.unchosen_mass == "recorded"):
            raise ValueError(
                'unchosen_mass is "recorded" for full gate rows, "even" or "zero" for chosen ones'
            )


@dataclass(frozen=True, slots=True, eq=False)
class RequestRouting:
    """Routing of one request: n iterations, L layers, J experts per layer.

    gate          f16 [n, L, J], gate probabilities; of several tokens, their mean
    experts       u16, flat: the activated experts of one (iteration, layer) after another, each ascending
    token_counts  i32, as `experts`: tokens that each received
    offsets       i64 [n·L + 1]: those of (iteration i, layer l) are offsets[i·L + l] … offsets[i·L + l + 1]
    embedding     f16 [n, h], semantic embedding of each iteration, or None
    speculation   distance → f16 [n, L, J]: row l is what layer l predicts for layer l + distance; rows of the
    last
                  `distance` layers are 0
    """

    gate: Half
    experts: npt.NDArray[np.uint16]
    token_counts: Counts
    offsets: Offsets
    embedding: Half | None
    speculation: dict[int, Half]

    @property
    def iterations(self) -> int:
        """n: the prefill iteration and the decode iterations."""
        return len(self.gate)

    def required(self, iteration: int, layer: int) -> tuple[npt.NDArray[np.uint16], Counts]:
        """Activated experts, ascending, and their token counts."""
        place = iteration * self.gate.shape[1] + layer
        part = slice(self.offsets[place], self.offsets[place + 1])
        return self.experts[part], self.token_counts[part]

    def token_totals(self, iterations: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens that each expert has received up to and including each of `iterations`: [rows, L, J]."""
        n, layers, experts = self.gate.shape
        cells = np.repeat(np.tile(np.arange(layers), n), np.diff(self.offsets)) * experts + self.experts
        found = np.empty((len(iterations), layers * experts), np.int64)
        total, start = np.zeros(layers * experts), 0
        for at in np.argsort(iterations, kind="stable"):
            end = int(self.offsets[(iterations[at] + 1) * layers])
            tokens = self.token_counts[start:end]
            total += np.bincount(cells[start:end], weights=tokens, minlength=layers * experts)
            found[at], start = total, end
        return found.reshape(-1, layers, experts)

    def all_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens that each expert received over the whole request: [L, J]."""
        return np.asarray(self.token_totals(np.array([self.iterations - 1]))[0])

    def tokens(self, top_k: int) -> npt.NDArray[np.int64]:
        """Tokens of each iteration [n]: every token activates `top_k` experts of the first layer."""
        layers = self.gate.shape[1]
        totals = np.concatenate(([0], np.cumsum(self.token_counts, dtype=np.int64)))
        return np.asarray(np.diff(totals[self.offsets])[::layers] // top_k)


class RoutingSource(Protocol):
    """Where a run gets its routing from."""

    @property
    def meta(self) -> RoutingMeta:
        """Shape and origin."""

    def routing_for(
        self, request: int, prompt_tokens: int, output_tokens: int, speculation: tuple[int, ...] = ()
    ) -> RequestRouting:
        """Routing of request number `request`: one prefill iteration of `prompt_tokens` tokens and
        `output_tokens` − 1 decode iterations, with speculation rows for the distances asked for."""

    def afresh(self) -> RoutingSource:
        """The same source, without remarks so far."""

    def others(self, served: Iterable[int], count: int) -> list[int]:
        """Up to `count` request numbers whose routing is that of none of `served`."""

    def remarks(self) -> tuple[str, ...]:
        """What the requests asked for so far got that was not recorded so, in sentences for the user."""


def arrange(
    routing: RequestRouting, order: npt.NDArray[np.int64], prompt_tokens: int, top_k: int
) -> RequestRouting:
    """The iterations `order` of `routing`, the first one scaled to a prompt of `prompt_tokens` tokens.

    Scaling keeps each expert's share of the tokens (largest remainders round up; experts left without a token
    drop out), so that the counts of every layer sum to prompt_tokens · top_k again.
    """
    layers = routing.gate.shape[1]
    lengths = np.diff(routing.offsets).reshape(-1, layers)[order].reshape(-1)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    starts = routing.offsets[:-1].reshape(-1, layers)[order].reshape(-1)
    place = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    experts, counts = routing.experts[place], routing.token_counts[place]
    if int(counts[: offsets[1]].sum()) != prompt_tokens * top_k:
        head = [
            _scaled(
                experts[offsets[i] : offsets[i + 1]],
                counts[offsets[i] : offsets[i + 1]],
                prompt_tokens * top_k,
            )
            for i in range(layers)
        ]
        rest = offsets[layers]
        experts = np.concatenate([*(e for e, _ in head), experts[rest:]])
        counts = np.concatenate([*(c for _, c in head), counts[rest:]])
        lengths[:layers] = [len(e) for e, _ in head]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
    return RequestRouting(
        gate=routing.gate[order],
        experts=experts,
        token_counts=counts,
        offsets=offsets,
        embedding=None if routing.embedding is None else routing.embedding[order],
        speculation={distance: rows[order] for distance, rows in routing.speculation.items()},
    )


def _scaled(
    experts: npt.NDArray[np.uint16], counts: Counts, total: int
) -> tuple[npt.NDArray[np.uint16], Counts]:
    # A share is at most 1/top_k of the total, so rounding up never gives an expert more tokens than the
    # prompt has.
    exact = counts.astype(np.int64) * total
    whole = exact // counts.sum()
    left = total - int(whole.sum())
    remainder = exact - whole * counts.sum()
    whole[np.argsort(-remainder, kind="stable")[:left]] += 1
    kept = whole > 0
    return experts[kept], whole[kept].astype(np.int32)

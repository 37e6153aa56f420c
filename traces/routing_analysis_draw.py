"""Which requests and iterations of a trace each seed's analysis uses, and reading them in two passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..errors import TraceError
from ..policy.core import Searcher
from .routing import Half, RoutingMeta
from .routing_analysis_patterns import Patterns, first_decode
from .routing_analysis_search import Fill, Served, map_searcher
from .routing_file import RoutingFile
from .routing_stats import Floats, chosen_experts

Int64s = npt.NDArray[np.int64]
_TELL = 100  # requests between two lines of progress


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """What the first pass keeps of each request that is analysed: those with a decode iteration.

    requests    their numbers, ascending
    decodes     i64, decode iterations of each
    counts      number → i64 [L, J], tokens per expert over the whole request
    mean_rows   f32 [N, L, J], mean row of the decode iterations
    embeddings  f16 [N, h] of the first iteration (zeros: none), None where the trace has none
    """

    patterns: Patterns
    requests: list[int]
    decodes: Int64s
    counts: dict[int, Int64s]
    mean_rows: Floats
    embeddings: Half | None


@dataclass(frozen=True, slots=True, eq=False)
class Picks:
    """Drawn decode iterations: place p is iteration `iteration[p]`, from 0, of request `request[p]`."""

    request: Int64s
    iteration: Int64s

    def of(self, request: int) -> tuple[Int64s, Int64s]:
        """Places and iterations drawn from one request."""
        places = np.flatnonzero(self.request == request)
        return places, self.iteration[places]


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """One seed's division: requests of the store, requests served, and what is drawn from them."""

    seed: int
    training: list[int]
    testing: list[int]
    training_iterations: int
    queries: Picks
    maps: Picks
    one_each: Picks


@dataclass(eq=False)
class Drawn:
    """What the second pass read for one seed."""

    served: Served
    one_each: Served
    sampled: Served | None
    filled: dict[int, Searcher]
    _contents: dict[int, tuple[Half, Half | None]] = field(default_factory=dict)

    def store(self, size: int) -> tuple[Half, Half | None]:
        """Maps [size, L, J] and embeddings of the store of that size."""
        if self.sampled is not None:
            embedding = self.sampled.embedding
            return self.sampled.gate[:size], None if embedding is None else embedding[:size]
        maps, embeddings, _ = self.filled[size].contents()
        return maps, embeddings


def first_pass(file: RoutingFile, most: int, seed: int, progress: Callable[[str], None]) -> Overview:
    """Read every request once; of more than `most`, as many drawn by `seed`."""
    meta = file.meta
    numbers = np.arange(file.requests)
    if len(numbers) > most:
        numbers = np.sort(np.random.default_rng(seed).permutation(len(numbers))[:most])
    patterns, first = Patterns(meta.layers, meta.experts), first_decode(meta.prefill)
    requests, decodes, means, embeddings = [], [], [], []
    counts: dict[int, Int64s] = {}
    for done, number in enumerate(numbers.tolist()):
        if done % _TELL == 0:
            progress(f"{file.path.name}: reading request {done} of {len(numbers)}")
        routing = file.recorded(number)
        if routing.iterations == first:
            continue
        patterns.add(routing.gate[first:], chosen_experts(routing, first))
        requests.append(number)
        decodes.append(routing.iterations - first)
        counts[number] = routing.all_tokens()
        means.append(routing.gate[first:].mean(axis=0, dtype=np.float32))
        if meta.embedding_width:
            empty = np.zeros(meta.embedding_width, np.float16)
            embeddings.append(empty if routing.embedding is None else routing.embedding[0].copy())
    if len(requests) < 4:
        raise TraceError(
            file.path,
            f"{len(requests)} requests with decode iterations; at least 4 are compared.",
            remedy="Record more requests, of two or more output tokens each.",
        )
    return Overview(
        patterns,
        requests,
        np.array(decodes),
        counts,
        np.stack(means),
        np.stack(embeddings) if embeddings else None,
    )


def split_requests(seed: int, served: Overview, stored: Overview, share: float, queries: int) -> Split:
    """The seed's training requests, and what it draws: queries first, then an order of all training maps."""
    rng = np.random.default_rng(seed)
    if served is stored:
        order = rng.permutation(len(served.requests))
        cut = int(share * len(order))
        training, testing = np.sort(order[:cut]), np.sort(order[cut:])
    else:
        training, testing = np.arange(len(stored.requests)), np.arange(len(served.requests))
    drawn = _draw(served, testing, queries, rng)
    maps = _draw(stored, training, None, rng)
    one = np.array([int(rng.integers(count)) for count in served.decodes])
    return Split(
        seed=seed,
        training=[stored.requests[i] for i in training],
        testing=[served.requests[i] for i in testing],
        training_iterations=int(stored.decodes[training].sum()),
        queries=Picks(
            *(part[np.lexsort((drawn.iteration, drawn.request))] for part in (drawn.request, drawn.iteration))
        ),
        maps=maps,
        one_each=Picks(np.array(served.requests), one),
    )


def _draw(
    overview: Overview, chosen: npt.NDArray[np.intp], count: int | None, rng: np.random.Generator
) -> Picks:
    ends = np.cumsum(overview.decodes[chosen])
    drawn = rng.permutation(int(ends[-1]))[:count]
    which = np.searchsorted(ends, drawn, side="right")
    starts = ends - overview.decodes[chosen]
    return Picks(np.array(overview.requests)[chosen][which], drawn - starts[which])


def second_pass(
    served: RoutingFile,
    training: RoutingFile,
    splits: Sequence[Split],
    sizes: Sequence[int],
    fill: Fill,
    distance: int,
    progress: Callable[[str], None],
) -> list[Drawn]:
    """Read the drawn iterations, and fill the stores of each size if `fill` is "rdy"."""
    meta, stored = served.meta, training.meta
    takers = [
        _Takers(
            _Taker(split.queries, meta, speculation=True),
            _Taker(split.one_each, meta),
            _Taker(Picks(split.maps.request[: sizes[-1]], split.maps.iteration[: sizes[-1]]), stored)
            if fill == "sample"
            else None,
            {size: map_searcher(stored, size, distance=distance) for size in sizes} if fill == "rdy" else {},
            frozenset(split.training),
        )
        for split in splits
    ]
    for file in dict.fromkeys((served, training)):
        for number in range(file.requests):
            if number % _TELL == 0:
                progress(f"{file.path.name}: drawing from request {number} of {file.requests}")
            for one in takers:
                one.offer(file, number, queries=file is served, maps=file is training)
    return [one.drawn() for one in takers]


class _Taker:
    """Collects the iterations of some picks, request by request."""

    def __init__(self, picks: Picks, meta: RoutingMeta, *, speculation: bool = False) -> None:
        count, shape = len(picks.request), (meta.layers, meta.experts)
        self._picks, self._first = picks, first_decode(meta.prefill)
        self.distances = meta.speculation if speculation else ()
        self.taken = Served(
            gate=np.empty((count, *shape), np.float16),
            chosen=np.empty((count, *shape), np.bool_),
            embedding=np.zeros((count, meta.embedding_width), np.float16) if meta.embedding_width else None,
            totals=np.empty((count if speculation else 0, *shape), np.int64),
            speculation={d: np.empty((count, *shape), np.float16) for d in self.distances},
        )

    def offer(self, file: RoutingFile, request: int) -> None:
        places, iterations = self._picks.of(request)
        if len(places) == 0:
            return
        routing, taken = file.recorded(request, self.distances), self.taken
        rows = iterations + self._first
        taken.gate[places] = routing.gate[rows]
        taken.chosen[places] = chosen_experts(routing, 0)[rows]
        if taken.embedding is not None and routing.embedding is not None:
            taken.embedding[places] = routing.embedding[rows]
        if len(taken.totals):
            taken.totals[places] = routing.token_totals(rows)
        for distance, into in taken.speculation.items():
            into[places] = routing.speculation[distance][rows]


@dataclass(frozen=True, slots=True, eq=False)
class _Takers:
    """All that one seed collects."""

    queries: _Taker
    one_each: _Taker
    maps: _Taker | None
    filled: dict[int, Searcher]
    training: frozenset[int]

    def offer(self, file: RoutingFile, request: int, *, queries: bool, maps: bool) -> None:
        if queries:
            self.queries.offer(file, request)
            self.one_each.offer(file, request)
        if maps and self.maps is not None:
            self.maps.offer(file, request)
        if maps and self.filled and request in self.training:
            routing, first = file.recorded(request), first_decode(file.meta.prefill)
            embedding = None if routing.embedding is None else routing.embedding[first:]
            for searcher in self.filled.values():
                searcher.fill(routing.gate[first:], embedding)

    def drawn(self) -> Drawn:
        sampled = None if self.maps is None else self.maps.taken
        return Drawn(self.queries.taken, self.one_each.taken, sampled, self.filled)

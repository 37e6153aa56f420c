"""Stream the requests of a selection: its window, its sample, its arrival times and lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..errors import SettingError, TraceError
from .request_cells import Int64s
from .request_formats import SECOND
from .request_trace import RequestBatch, RequestTrace

MAX_SPAN_S = 1e9
"""The last arrival, in seconds: a double still holds it to 0.1 µs."""

# Keep the draws apart from each other, and from those that a run makes with the same seed.
_SAMPLE_STREAM, _ARRIVAL_STREAM = 101, 102

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Recipe:
    """What was asked for. `window_count` is known where a sample is drawn; `scale`, the factor on arrival
    times, is None until the one that gives the rate is found."""

    trace: RequestTrace
    num_requests: int | None
    start: int
    sample: int | None
    window_count: int
    scale: float | None
    rate: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    seed: int
    prompts: bool
    keep: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Rows:
    """Requests in columns: `index` and `arrival_s` are final, and so are the lengths in `batch`."""

    index: Int64s
    arrival_s: Floats
    batch: RequestBatch


def selected_rows(recipe: Recipe) -> Iterator[Rows]:
    """The requests of a recipe, with arrival times and lengths as asked for."""
    origin: int | None = None
    gaps = np.random.default_rng([recipe.seed, _ARRIVAL_STREAM])
    drawn_s: float | None = None
    done = 0
    for index, batch in _picked(recipe):
        if not len(batch):
            yield Rows(index, batch.arrival_s, batch)
            continue
        if recipe.rate is not None and not recipe.trace.has_arrivals:
            arrival_s = _poisson(gaps, recipe.rate, drawn_s, len(batch))
            drawn_s = float(arrival_s[-1])
        else:
            origin = int(batch.ticks[0]) if origin is None else origin
            with np.errstate(over="ignore"):  # infinite times are refused below
                arrival_s = (batch.ticks - origin) / SECOND * (1.0 if recipe.scale is None else recipe.scale)
        if recipe.scale is not None:
            check_span(recipe, int(index[-1]), float(arrival_s[-1]))
        batch = replace(
            batch,
            prompt_tokens=_override(batch.prompt_tokens, recipe.prompt_tokens),
            output_tokens=_override(batch.output_tokens, recipe.output_tokens),
        )
        if recipe.keep is not None:
            places = np.flatnonzero(recipe.keep[done : done + len(batch)])
            done += len(batch)
            index, arrival_s, batch = index[places], arrival_s[places], batch.take(places)
        yield Rows(index, arrival_s, batch)


def _poisson(rng: np.random.Generator, rate: float, last_s: float | None, count: int) -> Floats:
    """The next `count` arrivals after `last_s`; the very first request arrives at 0 s."""
    # By inverse CDF: the stream of uniforms is the one that NumPy keeps stable.
    with np.errstate(over="ignore"):  # infinite times are refused by the caller
        gap_s = -np.log1p(-rng.random(count if last_s is not None else count - 1)) / rate
    arrivals: Floats = np.cumsum(np.concatenate([[last_s or 0.0], gap_s]))
    return arrivals if last_s is None else arrivals[1:]


def _override(tokens: Int64s, given: int | None) -> Int64s:
    return tokens if given is None else np.full(len(tokens), given, np.int64)


def _picked(recipe: Recipe) -> Iterator[tuple[Int64s, RequestBatch]]:
    """The window, or a sample of it."""
    batches = window(recipe.trace, recipe.num_requests, recipe.start, prompts=recipe.prompts)
    if recipe.sample is None:
        yield from batches
        return
    # One after the other, each with the chance that makes every subset equally likely (Knuth, volume 2,
    # algorithm S): no list of the chosen, however many.
    rng = np.random.default_rng([recipe.seed, _SAMPLE_STREAM])
    left, wanted = recipe.window_count, recipe.sample
    for index, batch in batches:
        chosen = []
        for place, draw in enumerate(rng.random(len(batch)).tolist()):
            if draw * left < wanted:
                chosen.append(place)
                wanted -= 1
            left -= 1
        places = np.array(chosen, np.int64)
        yield index[places], batch.take(places)


def window(
    trace: RequestTrace, num_requests: int | None, start: int, *, prompts: bool
) -> Iterator[tuple[Int64s, RequestBatch]]:
    """The requests from `start` on, with their places. Nothing is read beyond the last one's batch."""
    seen = left_out = 0
    stop = math.inf if num_requests is None else start + num_requests
    for batch in trace.batches(prompts=prompts):
        begin, end = max(start - seen, 0), int(min(stop - seen, len(batch)))
        if seen + len(batch) >= stop and batch.rows is not None:
            # What is left out behind the window does not count.
            batch = replace(batch, left_out=int(batch.rows[end - 1]) + 1 - (seen + end) - left_out)
        index = np.arange(seen, seen + len(batch))
        seen += len(batch)
        left_out += batch.left_out
        if begin == 0 and end == len(batch):
            yield index, batch
        else:
            places = np.arange(min(begin, end), end)
            yield index[places], batch.take(places)
        if seen >= stop:
            return
    if seen <= start:
        raise TraceError(
            trace.path,
            f"nothing to select: start = {start}, but the trace has {seen} requests.",
            remedy=f"Start below {seen}.",
        )


def check_span(recipe: Recipe, index: int, last_s: float) -> None:
    if last_s <= MAX_SPAN_S:  # false for NaN too
        return
    given = f"--time-scale is {recipe.scale:g}" if recipe.rate is None else f"--rate is {recipe.rate:g}"
    wanted = "smaller" if recipe.rate is None else "greater"
    raise SettingError(
        f"{given}: request {index} of {recipe.trace.path} would arrive at {last_s:g} s; "
        f"at most {MAX_SPAN_S:g} s are possible. Give a {wanted} one."
    )

"""Choose requests of a trace, and when they arrive. Streams: nothing is kept but a few sums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import repeat

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import SettingError, TraceError
from .request_cells import MAX_TOKENS
from .request_conversations import LENGTH_RULE
from .request_stream import Recipe, check_span, selected_rows, window
from .request_trace import RequestTrace


class Request(msgspec.Struct, frozen=True):
    """One request. `index` is its place among the trace's requests (0-based, after sorting; rows that are
    left out have none). `prompt` is its text, where that was asked for and the trace has it."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prompt: str | None = None


@dataclass(frozen=True, eq=False)
class RequestSelection:
    """Requests of a trace, in order of arrival; iterating reads the file again, and again gives the same.

    `first_index` is the place of the first in the trace, `span_s` first to last arrival, `longest_tokens` the
    most prompt and output tokens that one of them has together. `left_out` counts rows that hold no request
    (failed ones, unanswered conversations), up to the last request selected. `remarks` say in words what a
    reader must know: what was left out, drawn or ASSUMED.
    """

    trace: RequestTrace
    count: int
    first_index: int
    span_s: float
    prompt_tokens_mean: float
    output_tokens_mean: float
    longest_tokens: int
    left_out: int
    remarks: tuple[str, ...]
    _recipe: Recipe = field(repr=False)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        """Raises TraceError when the file no longer is what it was at the selection."""
        done = 0
        for rows in selected_rows(self._recipe):
            texts = repeat(None) if rows.batch.prompts is None else rows.batch.prompts.to_pylist()
            columns = (rows.index, rows.arrival_s, rows.batch.prompt_tokens, rows.batch.output_tokens)
            yield from map(Request, *(column.tolist() for column in columns), texts)
            done += len(rows.index)
        if done != self.count:
            raise _changed(self.trace, self.count, done)

    def part(self, keep: npt.NDArray[np.bool_]) -> RequestSelection:
        """The requests at the places where `keep`, one truth value a request, is true; arrivals stay.

        Raises SettingError where that is none.
        """
        if len(keep) != self.count or self._recipe.keep is not None:
            raise ValueError("`keep` needs one value for each request of a whole selection")
        if not keep.any():
            raise SettingError(f"no request is left of the {self.count} selected ones of {self.trace.path}.")
        return _summarise(replace(self._recipe, keep=keep), self.remarks)


def select_requests(
    trace: RequestTrace,
    *,
    num_requests: int | None,
    start: int = 0,
    sample: int | None = None,
    time_scale: float = 1.0,
    rate: float | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    seed: int = 0,
    prompts: bool = False,
) -> RequestSelection:
    """Select `num_requests` requests (None: all) from place `start` on; the first one arrives at 0 s.

    A trace with fewer requests gives those it has; none at all is a TraceError. `sample` then draws that many
    of them, uniformly and without repeating one; they keep their order and their arrival times. `time_scale`
    multiplies the arrival times (0.5: twice the load). `rate` instead scales them so that these very requests
    arrive at that mean rate in requests per second, (n − 1) / span: the trace keeps its bursts. In a trace
    without arrival times all arrive at 0 s, or with `rate` after exponential gaps (Poisson arrivals), drawn
    at random. All draws come from `seed`. `prompt_tokens` and `output_tokens` replace the length of every
    request; `prompts` reads the prompts' text, which stays as it is.

    Reads the selected part of the trace once, and once more to draw a `sample`.
    Raises TraceError for a bad row; SettingError for a value out of range, a last arrival beyond MAX_SPAN_S,
    a `sample` of more requests than there are, `rate` together with `time_scale`, and `time_scale` where
    there are no arrival times.
    """
    _at_least("num_requests", num_requests, 1)
    _at_least("start", start, 0)
    _at_least("sample", sample, 1)
    _at_least("prompt_tokens", prompt_tokens, 1)
    _at_least("output_tokens", output_tokens, 1)
    _at_least("seed", seed, 0, 2**63 - 1)
    _positive("time_scale", time_scale)
    if rate is not None:
        _positive("rate", rate)
        if time_scale != 1.0:
            raise SettingError(f"rate = {rate:g} and time_scale = {time_scale:g}: give one of them.")
    if time_scale != 1.0 and not trace.has_arrivals:
        raise SettingError(
            f"time_scale = {time_scale:g}, but {trace.path} has no arrival times to scale. "
            "Give a rate instead."
        )
    window_count = 0
    if sample is not None:
        window_count = sum(len(batch) for _, batch in window(trace, num_requests, start, prompts=False))
        if sample > window_count:
            raise SettingError(
                f"sample = {sample}, but only {window_count} requests of {trace.path} are selected. "
                f"Give at most {window_count}."
            )
    scale = None if rate is not None and trace.has_arrivals else time_scale
    recipe = Recipe(
        trace,
        num_requests,
        start,
        sample,
        window_count,
        scale,
        rate,
        prompt_tokens,
        output_tokens,
        seed,
        prompts,
    )
    remarks = []
    if trace.lengths_estimated:
        remarks.append(f"token counts are ASSUMED: {LENGTH_RULE} of the text")
    if sample is not None:
        remarks.append(f"{sample:,} of {window_count:,} requests, drawn at random (seed {seed})")
    if not trace.has_arrivals:
        drawn = f"Poisson at {rate:g} requests/s (seed {seed})" if rate else "all at 0 s"
        remarks.append(f"the trace has no arrival times; they are ASSUMED: {drawn}")
    return _summarise(recipe, tuple(remarks))


def _summarise(recipe: Recipe, remarks: tuple[str, ...]) -> RequestSelection:
    """Read the requests once. Without a scale, find the one that gives the rate."""
    count = prompt_sum = output_sum = longest = left_out = 0
    first: tuple[int, float] | None = None
    last_s = 0.0
    for rows in selected_rows(replace(recipe, prompts=False)):
        batch = rows.batch
        left_out += batch.left_out
        if len(batch):
            first = first or (int(rows.index[0]), float(rows.arrival_s[0]))
            last_s = float(rows.arrival_s[-1])
            last_index = int(rows.index[-1])
            count += len(batch)
            prompt_sum += int(batch.prompt_tokens.sum())
            output_sum += int(batch.output_tokens.sum())
            longest = max(longest, int((batch.prompt_tokens + batch.output_tokens).max()))
    if first is None:  # a window, a sample and a part hold at least one request
        raise _changed(recipe.trace, 1, 0)
    if recipe.scale is None:
        recipe = replace(recipe, scale=_scale_to_rate(recipe, count, last_s))
        last_s *= recipe.scale or 0.0
        check_span(recipe, last_index, last_s)
    if left_out and recipe.keep is None:
        remarks = (f"{left_out:,} {recipe.trace.form.left_out} are left out", *remarks)
    return RequestSelection(
        recipe.trace,
        count,
        first[0],
        last_s - first[1],
        prompt_sum / count,
        output_sum / count,
        longest,
        left_out,
        remarks,
        recipe,
    )


def _scale_to_rate(recipe: Recipe, count: int, span_s: float) -> float:
    rate = recipe.rate or 0.0
    if span_s > 0:
        return (count - 1) / span_s / rate
    if count == 1:
        return 1.0  # one request arrives at 0 s at any rate
    path = recipe.trace.path
    raise SettingError(f"rate = {rate:g}: the {count} selected requests of {path} all arrive at once.")


def _changed(trace: RequestTrace, before: int, now: int) -> TraceError:
    return TraceError(
        trace.path,
        f"the file changed while it was in use ({before} requests before, {now} now).",
        remedy="Start again, and leave it alone meanwhile.",
    )


def _at_least(name: str, value: int | None, least: int, most: int = MAX_TOKENS) -> None:
    if value is not None and not least <= value <= most:
        raise SettingError(f"{name} = {value}: must be {least} to {most}.")


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise SettingError(f"{name} = {value:g}: must be positive and finite.")

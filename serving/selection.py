"""Which requests of a trace a grid serves, and what its results say of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import SettingError
from ..traces.requests import RequestSelection, RequestTrace, select_requests

if TYPE_CHECKING:
    from ..traces.requests import Request
    from .settings import RunSettings


class Requests(Protocol):
    """Requests in order of arrival, read again from the beginning by every iteration over them."""

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...


def select(trace: RequestTrace, settings: RunSettings) -> dict[float | None, RequestSelection]:
    """The requests that the settings ask for, at each rate; None: the trace's own times."""
    return {
        rate: select_requests(
            trace,
            num_requests=None if settings.num_requests == "all" else settings.num_requests,
            start=settings.start,
            sample=settings.sample,
            time_scale=settings.time_scale,
            rate=rate,
            prompt_tokens=settings.prompt_tokens,
            output_tokens=settings.output_tokens,
            seed=settings.seed,
        )
        for rate in settings.rate or (None,)
    }


def check_warmup(settings: RunSettings, served: int) -> None:
    """Raise SettingError where every request would be a warm-up."""
    if settings.warmup >= served:
        raise SettingError(
            f"--warmup is {settings.warmup}, but {served} requests are served: none would be counted. "
            "Give a smaller number."
        )


def describe_trace(
    trace: RequestTrace, served: Mapping[float | None, RequestSelection], training: Requests
) -> dict[str, Any]:
    """What the results say of the requests; span and rate are null where several rates are swept."""
    requests = next(iter(served.values()))
    span_s = requests.span_s
    one_rate = len(served) == 1
    return {
        "path": str(trace.path),
        "format": trace.format,
        "synthetic": trace.synthetic,
        "requests": len(requests),
        "training_requests": len(training),
        "first_request": requests.first_index,
        "span_s": span_s if one_rate else None,
        "rate_per_s": (len(requests) - 1) / span_s if one_rate and span_s > 0 else None,
        "rates_per_s": [rate for rate in served if rate is not None],
        "prompt_tokens_mean": requests.prompt_tokens_mean,
        "output_tokens_mean": requests.output_tokens_mean,
        "left_out": requests.left_out,
        "remarks": list(dict.fromkeys(text for one in served.values() for text in one.remarks)),
    }


def trace_evidence(settings: RunSettings, trace: RequestTrace) -> dict[str, Any]:
    """The labels of the request trace."""
    changed = [
        name
        for name in ("rate", "prompt_tokens", "output_tokens")
        if getattr(settings, name) not in (None, ())
    ]
    if settings.time_scale != 1:
        changed.append("time_scale")
    return {"trace": "SYNTHETIC" if trace.synthetic else "RECORDED", "trace_changed_by": changed}

"""What the results say of their inputs: the requests served, and the evidence behind every figure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..calibration.profile import HardwareProfile
    from ..policy.models import ModelSpec
    from ..traces.requests import RequestSelection, RequestTrace
    from ..traces.routing import RoutingSource
    from .cell import Requests
    from .settings import RunSettings


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


def evidence_of(
    settings: RunSettings,
    trace: RequestTrace,
    routing: RoutingSource,
    profiles: tuple[HardwareProfile, ...],
    model: ModelSpec,
) -> dict[str, Any]:
    """Where the figures come from: the labels of every input."""
    changed = [
        name
        for name in ("rate", "prompt_tokens", "output_tokens")
        if getattr(settings, name) not in (None, ())
    ]
    if settings.time_scale != 1:
        changed.append("time_scale")
    prefill = {"derived": "DERIVED", "none": "absent"}.get(routing.meta.prefill)
    return {
        "figures": "SIMULATED",
        "trace": "SYNTHETIC" if trace.synthetic else "RECORDED",
        "trace_changed_by": changed,
        "routing": routing.meta.source.upper(),
        "routing_notes": routing.meta.notes,
        "routing_prefill": prefill or routing.meta.source.upper(),
        "hardware": {profile.name: _labels(profile) for profile in profiles},
        "hardware_sources": {profile.name: _sources(profile) for profile in profiles},
        "prefetch_distance": model.prefetch_distance_evidence
        if "prefetch_distance" in settings.assumed
        else "given",
        "model_notes": list(model.notes),
        "assumed": list(settings.assumed),
    }


def _labels(profile: HardwareProfile) -> dict[str, list[str]]:
    """Label of evidence → the figures of the profile that bear it."""
    found = defaultdict(list)
    for name, (_, _, label, _) in profile.evidence().items():
        found[label].append(name)
    return dict(sorted(found.items()))


def _sources(profile: HardwareProfile) -> dict[str, str]:
    """Figure of the profile → its value, its label and who says so."""
    return {
        name: f"{value:g}{'' if unit == '1' else ' ' + unit} {label}: {source}"
        for name, (value, unit, label, source) in profile.evidence().items()
    }

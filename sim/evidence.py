"""The evidence behind every figure of simulated results."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ..serving.selection import trace_evidence

if TYPE_CHECKING:
    from ..calibration.profile import HardwareProfile
    from ..policy.models import ModelSpec
    from ..serving.settings import RunSettings
    from ..traces.requests import RequestTrace
    from ..traces.routing import RoutingSource


def evidence_of(
    settings: RunSettings,
    trace: RequestTrace,
    routing: RoutingSource,
    profiles: tuple[HardwareProfile, ...],
    model: ModelSpec,
) -> dict[str, Any]:
    """Where the figures come from: the labels of every input."""
    prefill = {"derived": "DERIVED", "none": "absent"}.get(routing.meta.prefill)
    return {
        "figures": "SIMULATED",
        **trace_evidence(settings, trace),
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

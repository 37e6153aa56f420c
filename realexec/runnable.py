"""Which systems a real backend can run."""

from __future__ import annotations

from ..policy.system import System


def why_not(system: System) -> str:
    """Why a real model cannot be run with the system; empty where it can."""
    if system.predictor == "oracle" or system.eviction == "belady":
        return "it must know the routing of tokens that are not computed yet; use --backend sim"
    if system.write_back:
        return "it copies experts back to a host that has them anyway; use --backend sim"
    return ""

"""How far a run has come, as its world reports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """State of one run. Output tokens of all its requests measure how far it is."""

    simulated_s: float
    iterations: int
    output_tokens: int
    total_output_tokens: int

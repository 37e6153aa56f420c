"""The search for a preset's parameters: damped Gauss–Newton on the differences of figures.

Every evaluation makes the same random draws, so that differences between two of them come from the
parameters. Popularity and entropy by layer are not searched but set from what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from .fit_knobs import NAMES, knobs_of, with_entropy, with_knobs, with_skew
from .fit_sample import generated_requests
from .fit_statistics import RoutingFigures, measure
from .routing import RoutingMeta
from .routing_preset import RoutingPreset
from .synthetic import SyntheticRouting

Doubles = npt.NDArray[np.float64]

STEP = 0.3  # of a knob, for a difference
DAMPING = 1.0
LARGEST_STEP = 1.5
SEARCHES = 200

TOLERANCES = {
    "static_hit": 0.01,
    "overlap_1": 0.01,
    "overlap_2": 0.01,
    "overlap_4": 0.01,
    "overlap_16": 0.01,
    "overlap_64": 0.01,
    "early_overlap": 0.03,
    "nearest_1K_d1": 0.01,
    "nearest_1K_d3": 0.007,
    "nearest_1K_d6": 0.01,
    "nearest_10K_d3": 0.01,
    "blend_1K_d3": 0.007,
    "blend_10K_d3": 0.01,
    "spread_1K": 0.02,
    "spread_10K": 0.02,
    "own_request_hit": 0.02,
    "entropy_8": 0.1,
    "entropy_request": 0.1,
    "cosine_within": 0.02,
    "cosine_across": 0.02,
    "cosine_requests": 0.02,
}
"""A difference that counts 1 in the search."""


@dataclass(frozen=True)
class Goal:
    """What is to be reproduced: a recording's figures, and the lengths of its requests [stored], [served]."""

    recorded: RoutingFigures
    recording: RoutingMeta
    lengths: tuple[Sequence[int], Sequence[int]]
    seed: int


@dataclass(frozen=True)
class Candidate:
    """A preset, the figures of what it generates, and their distance from the goal."""

    preset: RoutingPreset
    figures: RoutingFigures
    residuals: Doubles

    @property
    def cost(self) -> float:
        """Mean of the squared residuals."""
        return float(np.square(self.residuals).mean())


def generated_figures(
    preset: RoutingPreset,
    recording: RoutingMeta,
    lengths: tuple[Sequence[int], Sequence[int]],
    seed: int,
    searches: int,
) -> RoutingFigures:
    """Figures of generated requests of these lengths, [stored] and [served]."""
    source = SyntheticRouting(preset, seed)
    stored = generated_requests(source, lengths[0], recording)
    served = generated_requests(source, lengths[1], recording, first=len(stored))
    return measure(stored, served, preset.top_k, searches=searches, rng=np.random.default_rng(seed))


def search(start: RoutingPreset, goal: Goal, progress: Callable[[str], None]) -> Candidate:
    """The best preset found: knobs at the start's latent dimensions, then other dimensions, then knobs."""
    best = _evaluate(start, goal)
    for turn in range(2):
        best = _improve(best, goal, f"step {turn + 1}, {best.preset.latent.dimensions} dimensions", progress)
    for direction in (-1, 1):
        while True:
            latent = best.preset.latent
            dimensions = latent.dimensions + direction
            if dimensions < 2:
                break
            other = msgspec.structs.replace(
                best.preset, latent=msgspec.structs.replace(latent, dimensions=dimensions)
            )
            tried = _improve(_evaluate(other, goal), goal, f"{dimensions} dimensions", progress)
            if tried.cost >= best.cost:
                break
            best = tried
    for turn in range(2):
        best = _improve(best, goal, f"last step {turn + 1}", progress)
    return best


def _evaluate(preset: RoutingPreset, goal: Goal) -> Candidate:
    preset = with_entropy(preset, goal.recorded.entropy, goal.recording, goal.seed)
    figures = generated_figures(preset, goal.recording, goal.lengths, goal.seed, SEARCHES)
    return Candidate(preset, figures, _residuals(goal.recorded, figures))


def _residuals(recorded: RoutingFigures, generated: RoutingFigures) -> Doubles:
    compared = [name for name in TOLERANCES if name in recorded.values and name in generated.values]
    if "cosine_within" in compared:
        compared.remove("cosine_requests")
    return np.array([(generated.values[n] - recorded.values[n]) / TOLERANCES[n] for n in compared])


def _improve(start: Candidate, goal: Goal, what: str, progress: Callable[[str], None]) -> Candidate:
    """One step from `start`, whose popularity is first set by the recorded load; never worse than it."""
    balanced = _evaluate(with_skew(start.preset, goal.recorded, start.figures), goal)
    knobs = knobs_of(balanced.preset)
    slopes = np.empty((len(balanced.residuals), len(NAMES)))
    for place, name in enumerate(NAMES):
        progress(f"{what}: {name}, distance {np.sqrt(balanced.cost):.2f}")
        moved = knobs.copy()
        moved[place] += STEP
        there = _evaluate(with_knobs(balanced.preset, moved), goal)
        slopes[:, place] = (there.residuals - balanced.residuals) / STEP
    best = min((start, balanced), key=lambda candidate: candidate.cost)
    damping = DAMPING
    for _ in range(3):
        square = slopes.T @ slopes + damping * np.eye(len(NAMES))
        step = np.linalg.solve(square, -slopes.T @ balanced.residuals)
        step *= min(1.0, LARGEST_STEP / max(1e-9, float(np.abs(step).max())))
        tried = _evaluate(with_knobs(balanced.preset, knobs + step), goal)
        if tried.cost < best.cost:
            return tried
        damping *= 10
    return best

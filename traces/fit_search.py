"""The search for a preset's parameters: damped Gauss–Newton on the differences of figures.

Every evaluation makes the same random draws, so that differences between two of them come from the
parameters. Popularity and entropy by layer are not searched but set from what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from .fit_knobs import NAMES, knobs_of, with_entropy, with_knobs, with_skew
from .fit_sample import generated_requests
from .fit_statistics import RoutingFigures, mean_figures, measure
from .routing import RoutingMeta
from .routing_preset import RoutingPreset
from .synthetic import SyntheticRouting

Doubles = npt.NDArray[np.float64]

STEP = 0.3  # of a knob, for a difference
DAMPING = 1.0
LARGEST_STEP = 1.5
SEARCHES = 200
WORLDS = 2  # generator's seeds whose mean is compared: they run beside one another

TOLERANCES = {
    "static_hit": 0.01,
    "overlap_1": 0.007,
    "overlap_2": 0.01,
    "overlap_4": 0.01,
    "overlap_16": 0.01,
    "overlap_64": 0.01,
    "early_overlap": 0.03,
    "nearest_1K_d1": 0.01,
    "nearest_1K_d3": 0.007,
    "nearest_1K_d6": 0.01,
    "nearest_10K_d3": 0.007,
    "blend_1K_d3": 0.007,
    "blend_10K_d3": 0.007,
    "spread_1K": 0.02,
    "spread_10K": 0.02,
    "own_request_hit": 0.02,
    "entropy_8": 0.1,
    "entropy_request": 0.1,
    "cosine_within": 0.015,
    "cosine_across": 0.015,
    "cosine_requests": 0.015,
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
    """The best preset found: two turns of knobs and of other numbers of latent dimensions, then knobs."""
    best = _evaluate(start, goal)
    for _ in range(2):
        best, slopes = _descend(best, _slopes(best, goal, progress), 5, goal, progress)
        for direction in (-1, 1):
            while best.preset.latent.dimensions + direction >= 2:
                latent = msgspec.structs.replace(
                    best.preset.latent, dimensions=best.preset.latent.dimensions + direction
                )
                other = _evaluate(msgspec.structs.replace(best.preset, latent=latent), goal)
                tried, there = _descend(other, slopes, 3, goal, progress)
                if tried.cost >= best.cost:
                    break
                best, slopes = tried, there
    return _descend(best, _slopes(best, goal, progress), 5, goal, progress)[0]


def _evaluate(preset: RoutingPreset, goal: Goal) -> Candidate:
    preset = with_entropy(preset, goal.recorded.entropy, goal.recording, goal.seed)
    with ThreadPoolExecutor(WORLDS) as pool:
        seeds = range(goal.seed, goal.seed + WORLDS)
        figures = mean_figures(
            list(
                pool.map(
                    lambda seed: generated_figures(preset, goal.recording, goal.lengths, seed, SEARCHES),
                    seeds,
                )
            )
        )
    return Candidate(preset, figures, _residuals(goal.recorded, figures))


def _residuals(recorded: RoutingFigures, generated: RoutingFigures) -> Doubles:
    compared = [name for name in TOLERANCES if name in recorded.values and name in generated.values]
    if "cosine_within" in compared:
        compared.remove("cosine_requests")
    return np.array([(generated.values[n] - recorded.values[n]) / TOLERANCES[n] for n in compared])


def _slopes(at: Candidate, goal: Goal, progress: Callable[[str], None]) -> Doubles:
    """Change of each residual by each knob [residuals, knobs]."""
    knobs = knobs_of(at.preset)
    slopes = np.empty((len(at.residuals), len(NAMES)))
    for place, name in enumerate(NAMES):
        progress(f"distance {np.sqrt(at.cost):.2f}; effect of {name}")
        moved = knobs.copy()
        moved[place] += STEP
        there = _evaluate(with_knobs(at.preset, moved), goal)
        slopes[:, place] = (there.residuals - at.residuals) / STEP
    return slopes


def _descend(
    best: Candidate, slopes: Doubles, steps: int, goal: Goal, progress: Callable[[str], None]
) -> tuple[Candidate, Doubles]:
    """The best of some steps, each by the slopes that the last ones have corrected (Broyden's update).

    With each step popularity is set anew from the recorded load.
    """
    damping = DAMPING
    for _ in range(steps):
        latent = best.preset.latent
        progress(f"distance {np.sqrt(best.cost):.2f}, {latent.dimensions} dimensions; a step")
        knobs = knobs_of(best.preset)
        square = slopes.T @ slopes + damping * np.eye(len(NAMES))
        step = np.linalg.solve(square, -slopes.T @ best.residuals)
        step *= min(1.0, LARGEST_STEP / max(1e-9, float(np.abs(step).max())))
        balanced = with_skew(best.preset, goal.recorded, best.figures)
        tried = _evaluate(with_knobs(balanced, knobs + step), goal)
        change = tried.residuals - best.residuals - slopes @ step
        slopes = slopes + np.outer(change, step) / max(1e-9, float(step @ step))
        if tried.cost < best.cost:
            best, damping = tried, max(damping / 3, 0.1)
        else:
            damping *= 8
    return best, slopes

"""One dense FFN becomes a router and experts, without training.

Copies: every expert is the whole FFN with a seeded perturbation, so any choice of experts gives about the
dense output, and yet a wrong expert changes it. Slices: see `slices.py`. All arithmetic is NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import SettingError
from .clustering import Floats, Router, make_router
from .dense import Ffn
from .slices import slice_ffn

COPY_MASS = 0.8
"""Mean top-K mass of a router over copies: about Mixtral's at top-2."""

SLICE_MASS = 0.5
"""The same over slices: fine-grained models spread their weights more."""

_MAX_EXPERTS = 1024


@dataclass(frozen=True)
class Upcycling:
    """What is made of each dense FFN."""

    experts: int = 8
    top_k: int = 2
    seed: int = 0
    slices: bool = False
    perturbation: float = 0.05  # of copies: standard deviation over the weight matrix's RMS

    @property
    def mass(self) -> float:
        """The mean top-K mass that routers are scaled to."""
        return SLICE_MASS if self.slices else COPY_MASS

    def check_counts(self) -> None:
        """Raise SettingError for counts that no FFN can be upcycled to."""
        if not 2 <= self.experts <= _MAX_EXPERTS:
            raise SettingError(f"--experts {self.experts}: choose from 2 to {_MAX_EXPERTS}.")
        if not 1 <= self.top_k <= self.experts:
            raise SettingError(f"--top-k {self.top_k}: choose from 1 to the {self.experts} experts.")
        if self.seed < 0:
            raise SettingError(f"--seed {self.seed}: choose a number from 0 on.")

    def check_width(self, ffn_width: int) -> None:
        """Raise SettingError where an FFN of `ffn_width` cannot be cut into equal slices."""
        if self.slices and ffn_width % self.experts:
            widths = [n for n in range(2, _MAX_EXPERTS + 1) if ffn_width % n == 0]
            near = sorted(sorted(widths, key=lambda n: abs(n - self.experts))[:4])
            raise SettingError(
                f"--experts {self.experts} --slices: the FFN's width of {ffn_width} is no multiple of it. "
                f"Its divisors near it are {', '.join(map(str, near))}."
            )


@dataclass(frozen=True)
class UpcycledLayer:
    """What a layer's FFN has become. `experts` makes the experts' weights one after another, once."""

    router: Router
    experts: Iterator[Ffn]
    error: float | None  # slices: ‖output − dense output‖ / ‖dense output‖ over the inputs; None for copies


def upcycle_layer(layer: int, ffn: Ffn, inputs: Floats, settings: Upcycling) -> UpcycledLayer:
    """Router and experts of a layer whose FFN saw `inputs` [n, h]. Layers draw from streams of their own."""
    rng = np.random.default_rng([settings.seed, layer])
    if len(inputs) < settings.experts:
        raise SettingError(
            f"{settings.experts} experts are to be made from {len(inputs)} prompt tokens. Give more prompts."
        )
    router = make_router(inputs, settings.experts, settings.top_k, settings.mass, rng)
    if settings.slices:
        sliced = slice_ffn(ffn, inputs, router.weight, settings.top_k)
        return UpcycledLayer(router, iter(sliced.experts), sliced.error)
    return UpcycledLayer(router, _copies(ffn, settings, rng), None)


def _copies(ffn: Ffn, settings: Upcycling, rng: np.random.Generator) -> Iterator[Ffn]:
    for _ in range(settings.experts):
        yield Ffn(
            *(_perturbed(weight, settings.perturbation, rng) for weight in (ffn.gate, ffn.up, ffn.down))
        )


def _perturbed(weight: Floats, share: float, rng: np.random.Generator) -> Floats:
    rms = np.sqrt(np.mean(np.square(weight), dtype=np.float64))
    noise = rng.standard_normal(weight.shape, dtype=np.float32)
    moved: Floats = weight + np.float32(share * rms) * noise
    return moved

"""Settings of the synthetic routing generator, one TOML file per model in traces/presets/."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import SettingError

_FOLDER = files(__package__) / "presets"


class Latent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The hidden state that all layers read, one vector per token.

    Each of its `dimensions` acts on all layers with weight `global_share`, and beyond that on the layers
    around a centre of its own with a Gaussian profile `layer_width` layers wide: close layers have more in
    common.
    Early layers know the token but not yet its context: the context's share of layer l is
    1 − exp(−(l + ½) / `context_layers`) of what it is deep in the model, and the token has the rest.
    """

    dimensions: int
    layer_width: float
    global_share: float
    context_layers: float


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the variance of a gate logit comes from deep in the model; the shares sum to 1.

    The context is the `topic` of the request, the `request` itself, a `drift` within it and the `iteration`;
    then there are the current `token`'s kind, and noise that each `layer` has for itself. The noise's share
    differs from iteration to iteration (`Rows.noise_concentration`); `layer` is its mean.
    """

    topic: float
    request: float
    drift: float
    iteration: float
    token: float
    layer: float


class Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What requests are about: `topics`; `kinds` of tokens with Zipf exponent `zipf`, a share `topical` of
    them drawn in the topic's own order; `drift_correlation` of the drift from one iteration to the next.

    Answers repeat passages: with chance `repeat` a decode iteration has kind and drift of an earlier one of
    its request or of one of the `stock` iterations that all requests of its topic know, and with chance `run`
    the next iteration then goes on with the one after that."""

    topics: int
    kinds: int
    zipf: float
    topical: float
    drift_correlation: float
    repeat: float
    run: float
    stock: int


class Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`entropy_bits`: mean entropy of a decode row at evenly spaced layers from the first to the last,
    interpolated between; `bias`, likewise: standard deviation of an expert's lasting popularity, uniformly
    distributed, in standard deviations of a logit. `noise_concentration`: how alike iterations are in the
    share of each layer's own noise, a Beta distribution's a + b; small: some have nearly none, others little
    else."""

    entropy_bits: tuple[float, ...]
    bias: tuple[float, ...]
    noise_concentration: float


class EmbeddingShares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the variance of the semantic embedding comes from; the shares sum to 1.

    What topic, request and token give it follows their latent vectors with a share `embedding_coupling` of
    its variance, so that tokens that are routed alike are alike in embedding; the rest is their own.
    """

    topic: float
    request: float
    token: float
    noise: float


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a group of parameters comes from."""

    label: Literal["MEASURED", "CALIBRATED", "DERIVED", "ASSUMED"]
    source: str


class RoutingPreset(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything `SyntheticRouting` needs to know about a model.

    `speculation_recall`: share of the true top K found in the speculated row at distance 1, 2, …; further
    distances fall by the last ratio. `prefill_sample`: prompt tokens that are drawn one by one, the others
    follow their distribution. `evidence` has an entry for each group of parameters, and says how far the
    routing is from what the preset was fitted to; `measured` holds
    statistics of the generated routing (definitions in routing_stats.py), kept by the tests.
    """

    model: str
    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    embedding_width: int
    prefill_sample: int
    speculation_recall: tuple[float, ...]
    latent: Latent
    shares: Shares
    tokens: Tokens
    rows: Rows
    embedding: EmbeddingShares
    embedding_coupling: float
    evidence: dict[str, Evidence]
    measured: dict[str, float]

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError("; ".join(problems))


def _problems(preset: RoutingPreset) -> list[str]:
    found = []

    def require(sound: bool, text: str) -> None:
        if not sound:
            found.append(text)

    require(1 <= preset.top_k < preset.experts <= 1024, "needs 1 ≤ top_k < experts ≤ 1024")
    for name in ("layers", "expert_bytes", "embedding_width", "prefill_sample"):
        require(getattr(preset, name) >= 1, f"{name} must be at least 1")
    for group in ("shares", "embedding"):
        values = msgspec.structs.asdict(getattr(preset, group))
        require(min(values.values()) >= 0, f"{group}: no share may be negative")
        require(abs(sum(values.values()) - 1) < 1e-6, f"{group}: sum to {sum(values.values()):g}, must be 1")
    require(preset.latent.dimensions >= 1, "latent.dimensions must be at least 1")
    require(preset.latent.layer_width > 0, "latent.layer_width must be positive")
    require(preset.latent.context_layers > 0, "latent.context_layers must be positive")
    require(0 <= preset.latent.global_share <= 1, "latent.global_share must be in [0, 1]")
    require(preset.tokens.topics >= 1 and preset.tokens.kinds >= 2, "tokens: topics ≥ 1 and kinds ≥ 2")
    require(preset.tokens.zipf >= 0, "tokens.zipf must not be negative")
    require(0 <= preset.tokens.topical <= 1, "tokens.topical must be in [0, 1]")
    require(0 <= preset.tokens.drift_correlation < 1, "tokens.drift_correlation must be in [0, 1)")
    require(0 <= preset.tokens.stock <= 100_000, "tokens.stock must be in 0 … 100000")
    require(0 <= preset.tokens.repeat <= 1, "tokens.repeat must be in [0, 1]")
    require(0 <= preset.tokens.run <= 1, "tokens.run must be in [0, 1]")
    require(
        bool(preset.rows.bias) and min(preset.rows.bias) >= 0, "rows.bias needs values, none of them negative"
    )
    require(preset.rows.noise_concentration > 0, "rows.noise_concentration must be positive")
    require(0 <= preset.embedding_coupling <= 1, "embedding_coupling must be in [0, 1]")
    most = math.log2(preset.experts)
    require(
        bool(preset.rows.entropy_bits) and all(0 < bits < most for bits in preset.rows.entropy_bits),
        f"rows.entropy_bits must be between 0 and log2(experts) = {most:.2f}",
    )
    least = preset.top_k / preset.experts
    require(
        bool(preset.speculation_recall) and all(least < r <= 1 for r in preset.speculation_recall),
        f"speculation_recall must be above chance ({least:.3f}) and at most 1",
    )
    return found


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    return sorted(
        entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml")
    )


def load_preset(name: str | Path) -> RoutingPreset:
    """A shipped preset by name, or one of the user's own by path of its TOML file.

    Raises `SettingError` for an unknown name, unknown keys and values out of range.
    """
    shipped = preset_names()
    source = _FOLDER / f"{name}.toml" if str(name) in shipped else Path(name)
    try:
        text = source.read_bytes()
    except OSError:
        raise SettingError(
            f"routing preset {str(name)!r}: neither a file nor one of {', '.join(shipped)}. "
            "Choose one of these or give the path of a TOML file."
        ) from None
    try:
        return msgspec.toml.decode(text, type=RoutingPreset)
    except msgspec.DecodeError as error:
        raise SettingError(f"routing preset {str(name)!r}: {error}. Correct the TOML file.") from None


def preset_for(model: str, layers: int, experts: int, top_k: int, expert_bytes: int) -> RoutingPreset:
    """The preset of a model: its own, one of the same shape, or the nearest in experts, reshaped.

    A reshaped preset keeps the dynamics of its origin and the share of the largest possible entropy; every
    parameter is then ASSUMED, and its `model` says so. Raises SettingError where no routing can be made up:
    a model whose tokens use every expert needs none.
    """
    if model in preset_names():
        return load_preset(model)
    if top_k >= experts:
        raise SettingError(
            f"--model {model} uses all {experts} experts of a layer for every token, so there is no routing "
            "to make up. Give a recorded one with --routing FILE."
        )
    presets = [load_preset(name) for name in preset_names()]
    same = [p for p in presets if (p.layers, p.experts, p.top_k) == (layers, experts, top_k)]
    origin = (same or sorted(presets, key=lambda p: abs(math.log(p.experts / experts))))[0]
    chance = top_k / experts
    recall = tuple(r if r > chance else (1 + chance) / 2 for r in origin.speculation_recall)
    scale = math.log2(experts) / math.log2(origin.experts)
    what = "of the same shape" if same else "reshaped"
    return msgspec.structs.replace(
        origin,
        model=f"{origin.model}, {what} as {model} (every parameter ASSUMED)",
        layers=layers,
        experts=experts,
        top_k=top_k,
        expert_bytes=expert_bytes,
        speculation_recall=recall,
        rows=msgspec.structs.replace(
            origin.rows, entropy_bits=tuple(bits * scale for bits in origin.rows.entropy_bits)
        ),
        evidence={name: Evidence(label="ASSUMED", source=e.source) for name, e in origin.evidence.items()},
        measured={},
    )

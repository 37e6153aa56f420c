"""What a built model is, measured: `BuildReport`, and the model card written of it."""

from __future__ import annotations

from dataclasses import dataclass

from .checkpoint import Dtype
from .upcycle import Upcycling


@dataclass(frozen=True)
class BuildReport:
    """What was built and measured; masses and shares over the prompt tokens that made the routers."""

    base: str
    source: str
    licence: str
    settings: Upcycling
    dtype: Dtype
    layers: int
    expert_width: int
    parameters: int
    total_bytes: int
    tokens: int
    top_k_mass: tuple[float, ...]  # mean per layer
    busiest_share: tuple[float, ...]  # per layer, of the K·n choices
    fit_errors: tuple[float, ...]  # per layer, slices only: distance to the dense FFN's output, relative


def model_card(report: BuildReport) -> str:
    """The checkpoint's README.md, in Markdown; the same report gives the same text."""
    settings = report.settings
    layers, experts, top_k = report.layers, settings.experts, settings.top_k
    slices = " --slices" if settings.slices else ""
    doing = "far worse" if settings.slices else "somewhat worse, at several times the memory"
    return f"""---
license: {report.licence}
tags: [mixture-of-experts, upcycled, untrained]
---
# {report.base} as a Mixture of Experts: {layers} layers x {experts} experts, top-{top_k}

Made by `finemoe model build --experts {experts} --top-k {top_k} --seed {settings.seed}{slices}`.

**This is not a trained Mixture of Experts.** It is the dense model {report.base}
({report.source}), modified:
each FFN was made into experts by arithmetic, and no weight was trained. It can do nothing that the dense
model cannot do, and does that {doing}.

## What it is for
A real model of Mixtral's architecture, with a tokenizer, that fits on a laptop and needs no hub: for
developing and testing expert offloading, recording routing, and measuring transfers. Its routing comes from
the text that it reads, so it has topics and continuity; but no training has shaped it. Do not quote it as the
routing of Mixtral or of any trained model, do not use it as an assistant, and do not compare its answers with
other models'.

## How it was made
- {_experts_text(report)}
- Each layer's router is a balanced spherical k-means of that layer's centred FFN inputs over
  {report.tokens:,} prompt tokens (FineMoE's own; what all begin with counts once), scaled so that
  the top {top_k} experts have a mean probability of {settings.mass:.2f} together.
- Attention, norms and embeddings are the dense model's.

## Figures
Measured during the build over the same prompt tokens, per layer:

| figure | mean | smallest | largest |
|---|---|---|---|
| top-{top_k} probability mass | {_row(report.top_k_mass)} |
| busiest expert's share of the choices (equal: {1 / experts:.3f}) | {_row(report.busiest_share)} |
{_error_row(report)}
{report.parameters:,} parameters, {report.dtype}, {report.total_bytes / 1e9:.2f} GB; experts are
{report.expert_width:,} neurons wide.

## Licence
{report.base} is under the Apache License 2.0, and so is this modification of it.
"""


def _experts_text(report: BuildReport) -> str:
    if report.settings.slices:
        return (
            f"Each expert is a slice of the dense FFN, {report.expert_width} neurons wide: neurons that are\n"
            "  active where the router chooses it. The down projections are fitted (ridge regression over\n"
            "  the prompt tokens), so that the chosen slices, with weights that sum to 1, come near\n"
            "  the whole FFN. They do not come very near (last row below): expect broken language."
        )
    return (
        f"Each expert is a copy of the dense FFN with a seeded {report.settings.perturbation:.0%} change: a\n"
        "  wrong expert changes the output, but any choice of the router gives about the dense one."
    )


def _row(values: tuple[float, ...]) -> str:
    return f"{sum(values) / len(values):.3f} | {min(values):.3f} | {max(values):.3f}"


def _error_row(report: BuildReport) -> str:
    if not report.fit_errors:
        return ""
    what = "distance to the dense FFN's output, relative, on the tokens it was fitted to"
    return f"| {what} | {_row(report.fit_errors)} |\n"

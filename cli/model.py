"""`finemoe model`: make a real small Mixture-of-Experts model, and guard a checkpoint's experts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .shell import help_without_command

model_app = typer.Typer(
    help="Make a real small Mixture-of-Experts model; checksums of a checkpoint.",
    invoke_without_command=True,
    callback=help_without_command,
)


@model_app.command("build")
def build_command(
    source: Annotated[
        str, typer.Option("--from", metavar="NAME", help="Dense model to start from: smollm2.")
    ] = "smollm2",
    experts: Annotated[int, typer.Option(help="Experts per layer.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts that each token uses.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of clusters and perturbation.")] = 0,
    slices: Annotated[
        bool,
        typer.Option("--slices", help="Experts are slices of the FFN, not copies: broken language."),
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    *,
    output: Annotated[Path, typer.Option(metavar="DIR", help="New directory for the checkpoint.")],
) -> None:
    """Make SmolLM2-135M-Instruct a Mixtral checkpoint, without training or a hub (docs/small-moe.md)."""
    from ..errors import SettingError
    from ..realexec.checkpoint import check_output
    from ..realexec.dense import load_smollm2, shipped_prompts
    from ..realexec.upcycle import Upcycling

    if source != "smollm2":
        raise SettingError(f"--from {source}: the one model known here is smollm2.")
    if dtype not in ("float32", "bfloat16"):
        raise SettingError(f"--dtype {dtype}: name float32 or bfloat16.")
    settings = Upcycling(experts, top_k, seed, slices)
    settings.check_counts()
    check_output(output)
    began_s = time.perf_counter()
    with _bar() as tell:
        tell("reading the dense model", 0, 0)
        dense = load_smollm2()
        from ..realexec.build import build_model

        prompts = [dense.tokens_of(prompt) for prompt in shipped_prompts()]
        report = build_model(
            dense,
            prompts,
            settings,
            output,
            dtype="bfloat16" if dtype == "bfloat16" else "float32",
            progress=tell,
        )
    kind = f"slices {report.expert_width} wide" if slices else "perturbed copies"
    print(
        f"{output}: Mixtral, {report.layers} layers x {experts} experts ({kind}), top-{top_k}; "
        f"{report.parameters / 1e6:,.1f} M parameters, {dtype}, {report.total_bytes / 1e9:.2f} GB"
    )
    mass, busiest = report.top_k_mass, report.busiest_share
    print(
        f"routers       over {report.tokens:,} prompt tokens: mean top-{top_k} mass "
        f"{sum(mass) / len(mass):.2f}, busiest expert {max(busiest):.1%} of its layer's choices "
        f"(equal: {1 / experts:.1%})"
    )
    if report.fit_errors:
        mean = sum(report.fit_errors) / len(report.fit_errors)
        print(f"slices        {mean:.0%} from the dense FFN's output on those tokens: expect broken language")
    print(f"took          {time.perf_counter() - began_s:,.0f} s")


@model_app.command("checksum")
def checksum_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint in safetensors.")],
) -> None:
    """Write finemoe-checksums.json: from then on a damaged expert is found when it is first read."""
    from ..realexec.extras import require

    require("finemoe model checksum", "torch", "transformers")
    from ..realexec.checksums import write_checksums
    from ..realexec.load import layout_of

    layout = layout_of(folder)
    experts = len(layout.file)
    with _bar() as tell:
        path = write_checksums(folder, layout, lambda expert: tell("reading experts", expert + 1, experts))
    print(f"{path}: CRC-32C of {experts} experts of {layout.slab_bytes:,} bytes")


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error where that is a terminal; of no length where the total is not known."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total or None
        )

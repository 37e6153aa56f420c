"""`finemoe trace`: look at request traces, convert them; import, record and analyse routing, fit to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .shell import help_without_command
from .status import status_line
from .trace_fit import fit_command
from .trace_record import record_command

if TYPE_CHECKING:
    from ..traces.request_info import TraceInfo

trace_app = typer.Typer(
    help="Look at request traces, convert them; record, import and analyse routing, fit presets to it.",
    invoke_without_command=True,
    callback=help_without_command,
)
trace_app.command("record")(record_command)
trace_app.command("fit")(fit_command)

Source = Annotated[Path, typer.Argument(metavar="FILE", help="Request trace in any known format.")]
Sort = Annotated[bool, typer.Option("--sort", help="Accept time stamps that go backward.")]


@trace_app.command("info")
def info_command(
    file: Source,
    sort: Sort = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Counts, span, rate, burstiness and token quantiles of a request trace."""
    from ..traces.request_info import trace_info

    info = trace_info(file, sort=sort)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(info), indent=2).decode())
    else:
        _print_info(info)


@trace_app.command("convert")
def convert_command(
    file: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="Parquet file to write.")],
    sort: Sort = False,
) -> None:
    """Convert a request trace to Parquet, which loads fastest and keeps the prompts."""
    from ..traces.request_info import convert_requests

    info = convert_requests(file, out, sort=sort)
    over = "" if info.span_s is None else f" over {info.span_s:,.1f} s"
    print(f"{out}: {info.requests:,} requests{over}, from {info.format} {info.container}")
    _print_left_out(info)


@trace_app.command("import")
def import_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Route CSV, npz of expert_ids, probs and offsets, responses of vLLM or SGLang with routed "
            "experts, or a converted SGLang recording.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="Routing trace to write.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model of the recording, or a config.json. [by its shape; CSV: its header's]",
        ),
    ] = None,
    no_prefill: Annotated[
        bool,
        typer.Option("--no-prefill", help="npz: derive no prefill iteration; TTFT is then undefined."),
    ] = False,
) -> None:
    """Make a routing trace for --routing from recorded choices of experts (docs/routing-format.md)."""
    from ..errors import SettingError
    from ..traces.npz_import import import_chosen_experts
    from ..traces.recorder_import import import_sglang_recording
    from ..traces.route_import import import_route_csv, recording_format
    from ..traces.routed_experts_import import import_routed_experts

    kind = recording_format(file)
    if no_prefill and kind != "npz":
        raise SettingError(f"--no-prefill is for npz files of expert_ids: this is {kind}. Leave it out.")
    if kind == "npz":
        prefill: Literal["none", "derived"] = "none" if no_prefill else "derived"
        meta = import_chosen_experts(file, out, model=model, prefill=prefill)
    elif kind == "routed experts":
        meta = import_routed_experts(file, out, model=model)
    elif kind == "SGLang recording":
        meta = import_sglang_recording(file, out, model=model)
    else:
        meta = import_route_csv(file, out, model=model)
    filled = "none" if meta.prefill == "none" else meta.prefill.upper()
    print(
        f"{out}: {meta.model}, {meta.layers} layers x {meta.experts} experts, top-{meta.top_k}; "
        f"unrecorded probability: {meta.unchosen_mass}; prefill: {filled}"
    )


@trace_app.command("analyze")
def analyze_command(
    routing: Annotated[Path, typer.Argument(metavar="ROUTING", help="Routing trace (Parquet).")],
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write pictures (PNG; needs matplotlib) here.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Routing trace whose requests fill the store. [70 % of ROUTING's]"),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the splits and draws.")] = "0,1,2,3,4",
    capacity: Annotated[str, typer.Option(help="Maps in the store.")] = "1000,10000",
    fill: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help="sample: that many maps drawn; rdy: all offered, the most redundant replaced (minutes).",
        ),
    ] = "sample",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How predictable routing is: entropy, similarity, hit rates by distance, scores by store size."""
    from ..errors import SettingError
    from ..report.figures import require_matplotlib
    from ..traces.routing_analysis import analyse_routing

    if fill not in ("sample", "rdy"):
        raise SettingError(f"--fill {fill}: name sample or rdy.")
    if output is not None:
        require_matplotlib()  # before minutes of work
    with status_line() as tell:
        analysis = analyse_routing(
            routing,
            store=store,
            seeds=_whole_numbers("--seeds", seeds),
            capacities=_whole_numbers("--capacity", capacity),
            fill="rdy" if fill == "rdy" else "sample",
            progress=tell,
        )
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(analysis), indent=2).decode())
    else:
        from .analysis_table import print_analysis

        print_analysis(analysis)
    if output is not None:
        from ..report.routing_plots import plot_routing

        pictures = plot_routing(analysis, output)
        print(f"pictures      {output}: {', '.join(path.name for path in pictures)}", file=sys.stderr)


def _whole_numbers(option: str, text: str) -> list[int]:
    from ..errors import SettingError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise SettingError(f"{option} {text}: whole numbers with commas between them are expected.")
    return [int(part) for part in parts]


def _print_info(info: TraceInfo) -> None:
    from rich.table import Table

    from ..traces.request_conversations import LENGTH_RULE
    from .formats import console, number

    evidence = "SYNTHETIC" if info.synthetic else "RECORDED"
    print(f"{info.path}: {info.format} {info.container}, {evidence}")
    print(f"requests      {info.requests:,}")
    _print_left_out(info)
    if info.span_s is None:
        print("arrivals      none in the trace; ASSUMED in a run: all at 0 s, or Poisson with --rate")
    else:
        print(f"span          {info.span_s:,.1f} s")
        print(f"rate          {number(info.rate_per_s)} requests/s")
        print(f"CV of gaps    {number(info.gap_cv)} (1 = Poisson)")
    if info.lengths_estimated:
        print(f"token counts  ASSUMED: {LENGTH_RULE} of the text")
    if info.has_prompts:
        print("prompts       with their text")
    table = Table(box=None, pad_edge=False)
    for name in ("", "mean", "min", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right" if name else "left")
    rows = {"prompt tokens": info.prompt_tokens, "output tokens": info.output_tokens}
    for name, row in rows.items():
        values = (row.mean, row.min, row.p50, row.p90, row.p99, row.max)
        table.add_row(name, *(f"{value:,.0f}" for value in values))
    if info.gap_s is not None:
        gap = info.gap_s
        table.add_row("gap, s", *(number(v) for v in (gap.mean, gap.min, gap.p50, gap.p90, gap.p99, gap.max)))
    console().print(table)


def _print_left_out(info: TraceInfo) -> None:
    if info.left_out:
        print(f"left out      {info.left_out:,} {info.left_out_reason}")

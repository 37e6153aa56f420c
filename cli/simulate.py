"""`finemoe-sim`, or `finemoe sim`: a grid of policies, expert caches, machines and rates, sim or real."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer

from .shell import InterruptTold, run, show_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..serving.grid import OnProgress, Plan
    from ..serving.results import Results
    from ..serving.settings import RunSettings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _option(text: str, metavar: str | None = None, *names: str) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, show_default=False)


# Every option is None when it is not given: the defaults stand in RunSettings, and are printed as ASSUMED.
# Numbers come as text, so that RunSettings says what is wrong with them, as it does for a TOML file.
Text: TypeAlias = str | None
Switch: TypeAlias = bool | None


@app.command()
def simulate_command(
    trace: Annotated[
        Text, _option("Request trace: CSV, JSON or Parquet; see docs/request-formats.md.", "FILE")
    ] = None,
    model: Annotated[
        Text, _option("Model by name, a config.json, or a checkpoint. [mixtral-8x7b]", "NAME|FILE|DIR")
    ] = None,
    hardware: Annotated[
        Text, _option("Machines by name, or profiles; a list. [rtx3090x6]", "NAME|FILE,…")
    ] = None,
    set: Annotated[
        list[str] | None,
        _option(
            "A figure of the machine, changed, such as link.bandwidth=55GB/s; repeat.", "A.B=VALUE", "--set"
        ),
    ] = None,
    host_memory: Annotated[
        Text, _option("Host memory; experts that do not fit are on the SSD. [the machine's]", "64GB")
    ] = None,
    dense: Annotated[
        Text, _option("Devices with dense weights and KV cache. [device0]", "device0|replicated")
    ] = None,
    peer_link: Annotated[
        Text, _option("What activations take between devices. [nvlink]", "nvlink|pcie")
    ] = None,
    policy: Annotated[
        Text,
        _option("Systems, or policies of your own, or all; a list. [finemoe]", "NAME|FILE.py:CLASS,…"),
    ] = None,
    expert_cache: Annotated[
        Text,
        _option(
            "Expert cache over all devices: bytes, fraction or slots; a list. [24GB]", "24GB|0.25|96slots"
        ),
    ] = None,
    expert_dtype: Annotated[Text, _option("Expert weights. [bf16]", "bf16|fp8|int4|mxfp4")] = None,
    routing: Annotated[Text, _option("Routing trace, or made up. [synthetic]", "FILE|synthetic")] = None,
    backend: Annotated[Text, _option("Where the commands of the policy go. [sim]", "sim|cpu|cuda")] = None,
    prompts: Annotated[
        Text, _option("Real backends: prompts, cut or repeated to the trace's lengths. [our own]", "FILE")
    ] = None,
    history: Annotated[
        Text, _option("Real backends: a routing trace that policies know beforehand.", "FILE")
    ] = None,
    source: Annotated[Text, _option("Real backends: where experts are read. [file]", "file|host")] = None,
    bandwidth_limit: Annotated[
        Text, _option("Real backends: at most so much per device, to be slow repeatably.", "2GB/s")
    ] = None,
    pinned_memory: Annotated[
        Text, _option("Backend cuda, --source host: pin at most so much. [all experts]", "16GB")
    ] = None,
    replay: Annotated[
        Path | None,
        _option("Simulate a real run's recorded iterations, and show where decisions differ.", "RESULTS"),
    ] = None,
    num_requests: Annotated[Text, _option("Requests taken from the trace. [256]", "N|all")] = None,
    start: Annotated[Text, _option("Requests left out at the beginning of the trace. [0]", "N")] = None,
    sample: Annotated[Text, _option("Draw this many of these requests at random.", "N")] = None,
    sort: Annotated[Switch, _option("Accept a trace whose time stamps go backward.")] = None,
    time_scale: Annotated[Text, _option("Factor on the gaps between arrivals. [1]", "X")] = None,
    rate: Annotated[
        Text, _option("Scale the arrivals to this many requests per second; a list sweeps.", "X,Y")
    ] = None,
    slo: Annotated[
        Text, _option("Limits on latencies, for goodput: metric_statistic<limit.", "ttft_p90<2s,…")
    ] = None,
    prompt_tokens: Annotated[Text, _option("Prompt length of every request.", "N")] = None,
    output_tokens: Annotated[Text, _option("Output length of every request.", "N")] = None,
    max_num_seqs: Annotated[Text, _option("Requests served at a time. [8]", "N")] = None,
    token_budget: Annotated[Text, _option("Prompt tokens of one prefill step. [8192]", "N")] = None,
    prefetch_distance: Annotated[Text, _option("Layers looked ahead. [the model's]", "N")] = None,
    store_capacity: Annotated[Text, _option("Expert maps in the store. [1000]", "N")] = None,
    frequency: Annotated[
        Text, _option("Visit counts kept over evictions, or not. [run]", "run|residency")
    ] = None,
    frequency_decay: Annotated[Text, _option("Factor on visit counts per iteration. [1]", "X")] = None,
    preempt_scope: Annotated[
        Text, _option("Devices whose prefetch a miss pauses. [device]", "device|all")
    ] = None,
    rank_prefill_by_tokens: Annotated[
        Switch, _option("Rank a prefill's experts by their chance over all its tokens.")
    ] = None,
    offline: Annotated[
        Switch, _option("One prompt after another; 70 % of the requests fill the store, 30 % are served.")
    ] = None,
    warmup: Annotated[Text, _option("Requests served and not counted. [0]", "N")] = None,
    seed: Annotated[Text, _option("Seed of everything random. [0]", "N")] = None,
    decisions: Annotated[Text, _option("Iterations whose decisions are kept. [1000]", "N|all|none")] = None,
    config: Annotated[
        Path | None, _option("Settings as TOML, named as these flags, which win.", "FILE.toml")
    ] = None,
    output: Annotated[
        Path | None, _option("Results directory. [a new one in finemoe-results]", "DIR")
    ] = None,
    as_json: Annotated[bool, _option("Print the results as JSON and nothing else.", None, "--json")] = False,
    dry_run: Annotated[
        bool, _option("Print the resolved settings and the memory split; run nothing.")
    ] = False,
    quiet: Annotated[
        bool, _option("Print nothing but errors, and the JSON if asked for.", None, "--quiet")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve a request trace with the experts of a MoE model offloaded: simulated, or with a real model.

    Example: finemoe-sim --trace azure.csv --policy lru,finemoe --expert-cache 24GB,0.5 --num-requests 64
    """
    options: dict[str, object] = {
        "trace": trace,
        "model": model,
        "hardware": hardware,
        "set": set or None,
        "host_memory": host_memory,
        "dense": dense,
        "peer_link": peer_link,
        "policy": policy,
        "expert_cache": expert_cache,
        "expert_dtype": expert_dtype,
        "routing": routing,
        "backend": backend,
        "prompts": prompts,
        "history": history,
        "source": source,
        "bandwidth_limit": bandwidth_limit,
        "pinned_memory": pinned_memory,
        "num_requests": num_requests,
        "start": start,
        "sample": sample,
        "sort": sort,
        "time_scale": time_scale,
        "rate": rate,
        "slo": slo,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "max_num_seqs": max_num_seqs,
        "token_budget": token_budget,
        "prefetch_distance": prefetch_distance,
        "store_capacity": store_capacity,
        "frequency": frequency,
        "frequency_decay": frequency_decay,
        "preempt_scope": preempt_scope,
        "rank_prefill_by_tokens": rank_prefill_by_tokens,
        "offline": offline,
        "warmup": warmup,
        "seed": seed,
        "decisions": decisions,
    }
    if replay is not None:
        from .against import print_against

        if config is not None or output is not None or dry_run:
            raise typer.BadParameter("--replay takes no --config, --output and --dry-run")
        print_against(replay, options, as_json=as_json)
        return
    _simulate(options, config, output, as_json=as_json, dry_run=dry_run, quiet=quiet)


def _simulate(
    options: dict[str, object],
    config: Path | None,
    output: Path | None,
    *,
    as_json: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    from ..serving.grid import Interrupted
    from ..serving.output_folder import check_output
    from ..serving.settings_file import resolve
    from . import table
    from .progress import ProgressBar

    if output is not None:
        check_output(output)
    with redirect_stdout(sys.stderr):  # what a policy of the user's prints is no result
        plan, run_plan = _prepared(resolve(options, config))
    human = not (as_json or quiet)
    if dry_run:
        print(table.plan_json(plan), end="") if as_json else table.print_plan(plan)
        return
    if human:
        table.print_header(plan)
    results: Results | None
    try:
        shown = not quiet and sys.stdout.isatty() and sys.stderr.isatty()
        with ProgressBar(plan, shown=shown) as bar, redirect_stdout(sys.stderr):
            results = run_plan(output, None if quiet else bar.update)
        interrupted = False
    except Interrupted as interrupt:
        results = interrupt.results
        interrupted = True
        if results is None:
            raise
        print(f"finemoe: interrupted; finished runs are kept in {results.directory}", file=sys.stderr)
    if as_json:
        print(results.to_json(), end="")
        if not quiet:
            print(f"results: {results.directory}", file=sys.stderr)
    elif not quiet:
        table.print_results(results, plan.warnings)
    if interrupted:
        raise InterruptTold


def _prepared(settings: RunSettings) -> tuple[Plan, Callable[[Path | None, OnProgress | None], Results]]:
    """The plan of the backend that the settings name, and what runs it."""
    if settings.backend == "sim":
        from ..sim.plan import make_plan
        from ..sim.run import run_plan

        plan = make_plan(settings)
        return plan, lambda output, on_progress: run_plan(plan, output, on_progress)
    from ..realexec.extras import require

    require(f"--backend {settings.backend}", "torch", "transformers")
    from ..realexec.serve import run_plan as run_real_plan
    from ..realexec.serving_plan import make_plan as make_real_plan

    real = make_real_plan(settings)
    return real, lambda output, on_progress: run_real_plan(real, output, on_progress)


def main() -> NoReturn:
    """Entry point of `finemoe-sim`."""
    run(app, "finemoe-sim")

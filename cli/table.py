"""What people read: the settings before a run, the table after it, the plan of a dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..serving.cells import cell_labels, cell_parts, rate_text
from .formats import console, gigabytes, grid_table, number, percent
from .slo_table import print_slo

if TYPE_CHECKING:
    from ..serving.grid import Plan
    from ..serving.metrics import CellSummary
    from ..serving.results import Results

_NAMED_CELLS = 4  # that a note or a reason names


def print_header(plan: Plan) -> None:
    """Trace and machine, what is ASSUMED, and warnings."""
    trace = plan.trace
    stored = f", {len(plan.training):,} more fill the store" if plan.training else ""
    print(
        f"trace     {trace['path']}: {trace['requests']:,} requests {_when(plan)}{stored}; mean prompt "
        f"{number(trace['prompt_tokens_mean'])} and output {number(trace['output_tokens_mean'])} tokens; "
        f"{plan.evidence['trace']}"
    )
    for remark in trace["remarks"]:
        print(f"note      {remark}")
    print(f"routing   {plan.evidence['routing']}: {plan.evidence['routing_notes']}")
    for name, description in plan.machines.items():
        labels = plan.evidence["hardware"].get(name)
        print(f"machine   {name}: {description}" + (f"; {_hardware(labels)}" if labels else ""))
    if plan.settings.slo is not None:
        print(f"SLO       {plan.settings.slo}")
    if plan.settings.assumed:
        print(f"ASSUMED   {_assumed(plan)}")
    for text in plan.warnings:
        print(f"warning   {text}")


def _when(plan: Plan) -> str:
    """When the requests arrive."""
    if plan.settings.offline:
        return "one prompt after another"
    trace = plan.trace
    if len(trace["rates_per_s"]) > 1:
        return f"at {', '.join(map(rate_text, trace['rates_per_s']))} requests/s"
    rate = "" if trace["rate_per_s"] is None else f" ({number(trace['rate_per_s'])}/s)"
    return f"over {number(trace['span_s'])} s{rate}"


def _assumed(plan: Plan) -> str:
    """Every default that nobody asked for."""
    parts = []
    for name in plan.settings.assumed:
        value = getattr(plan.settings, name)
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        parts.append(f"{name.replace('_', '-')} {text}")
    return ", ".join(parts)


def _hardware(labels: Any) -> str:
    """How many of a profile's figures bear which label."""
    total = sum(len(names) for names in labels.values())
    return ", ".join(f"{len(names)} of {total} figures {label}" for label, names in labels.items())


def print_results(results: Results, shown: tuple[str, ...]) -> None:
    """The tables of a grid, notes other than those already shown, evidence and the results directory."""
    runs = results.runs
    labels = cell_labels(run.key for run in runs)
    print()
    console().print(_table(runs))
    print("Means in seconds; percentiles are in summary.json. GB = 10^9 bytes.")
    print_slo(results)
    _print_reasons([(label, run.status) for label, run in zip(labels, runs, strict=True)])
    notes = [
        (label, note)
        for label, run in zip(labels, runs, strict=True)
        for note in run.notes
        if note not in shown
    ]
    for note in dict.fromkeys(text for _, text in notes):
        cells = [cell for cell, text in notes if text == note]
        print(f"note      {note}" + ("" if len(cells) == len(runs) else f" ({_some(cells)})"))
    evidence = results.evidence
    changed = evidence["trace_changed_by"]
    trace = evidence["trace"] + (f" (changed by {', '.join(changed)})" if changed else "")
    machines = evidence["hardware"]
    told = [
        f"machine{f' {name}' if len(machines) > 1 else ''}: {_hardware(labels)}; "
        for name, labels in machines.items()
    ]
    print(
        f"evidence  all figures {evidence['figures']}; trace {trace}; routing {evidence['routing']}; "
        f"{''.join(told)}{len(evidence['assumed'])} settings ASSUMED"
    )
    print(f"results   {results.directory}")


def _table(runs: tuple[CellSummary, ...]) -> Table:
    table = grid_table(run.key for run in runs)
    for name in ("TTFT", "service\nTTFT", "TPOT", "E2E", "hit\nrate", "late", "stall"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("demand\nGB", "prefetch GB\nuseful", "prefetch GB\nwasted"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    for parts, run in zip(cell_parts(run.key for run in runs), runs, strict=True):
        table.add_row(
            *parts,
            number(run.ttft_s.mean),
            number(run.ttft_service_s.mean),
            number(run.tpot_s.mean),
            number(run.e2e_s.mean),
            percent(run.hit_rate),
            percent(run.late_rate),
            percent(run.stall_share),
            gigabytes(run.demand_bytes),
            gigabytes(run.prefetch_useful_bytes),
            gigabytes(run.prefetch_wasted_bytes),
            _short(run.status),
        )
    return table


def _short(status: str) -> str:
    """A status without its reasons, which stand below the table."""
    return status.partition(":")[0]


def _print_reasons(statuses: list[tuple[str, str]]) -> None:
    """Each reason once, with the cells it holds for."""
    for status in dict.fromkeys(status for _, status in statuses if ":" in status):
        cells = [cell for cell, other in statuses if other == status]
        print(f"{status} ({_some(cells)})")


def _some(cells: list[str]) -> str:
    """The cells, or the first few of many."""
    more = len(cells) - _NAMED_CELLS
    return ", ".join(cells) if more <= 1 else f"{', '.join(cells[:_NAMED_CELLS])} and {more} more"


def print_plan(plan: Plan) -> None:
    """The resolved settings and the memory split of every cell."""
    from ..serving.settings_file import to_toml

    print_header(plan)
    print()
    print(to_toml(plan.settings), end="")
    print()
    keys = [cell.key for cell in plan.cells]
    table = grid_table(keys)
    sizes = next((cell.sizes() for cell in plan.cells if not cell.problem), {})
    for name in sizes:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    for parts, cell in zip(cell_parts(keys), plan.cells, strict=True):
        own = cell.sizes()
        cells = [
            (gigabytes(own[name]) if "GB" in name else f"{own[name]:,}") if own else "" for name in sizes
        ]
        table.add_row(*parts, *cells, _short(cell.problem) if cell.problem else "fits")
    console().print(table)
    _print_reasons([(cell.label, cell.problem) for cell in plan.cells if cell.problem])


def plan_json(plan: Plan) -> str:
    """The plan of a dry run as JSON."""
    import msgspec

    from .. import __version__
    from ..serving.settings import settings_dict

    cells = [
        {
            "policy": cell.system.name,
            "expert_cache": cell.expert_cache,
            "expert_cache_bytes": cell.expert_cache_bytes,
            "hardware": cell.hardware,
            "rate_per_s": cell.rate_per_s,
            "status": cell.problem or "fits",
            "memory": msgspec.to_builtins(cell.memory),
        }
        for cell in plan.cells
    ]
    payload = {
        "plan": cells,
        "config": settings_dict(plan.settings),
        "trace": plan.trace,
        "evidence": plan.evidence,
        "version": __version__,
    }
    return msgspec.json.format(msgspec.json.encode(payload), indent=2).decode() + "\n"

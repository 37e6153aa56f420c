"""What people read: the settings before a run, the table after it, the plan of a dry run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..serving.metrics import CellSummary
    from ..serving.results import Results
    from ..sim.plan import Plan

_PIPED_WIDTH = 160  # a pipe has no width: wide enough that no table wraps


def console() -> Console:
    """Standard output; plain text of a fixed width when it is piped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH, soft_wrap=False)


def number(value: float | None) -> str:
    """Three significant digits; n/a where there is none."""
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def print_header(plan: Plan) -> None:
    """Trace and machine, what is ASSUMED, and warnings."""
    trace = plan.trace
    rate = "" if trace["rate_per_s"] is None else f" ({number(trace['rate_per_s'])}/s)"
    span = "one prompt after another" if plan.settings.offline else f"over {number(trace['span_s'])} s{rate}"
    stored = f", {len(plan.training):,} more fill the store" if plan.training else ""
    print(
        f"trace     {trace['path']}: {trace['requests']:,} requests {span}{stored}; mean prompt "
        f"{number(trace['prompt_tokens_mean'])} and output {number(trace['output_tokens_mean'])} tokens; "
        f"{plan.evidence['trace']}"
    )
    print(f"routing   {plan.evidence['routing']}: {plan.evidence['routing_notes']}")
    print(f"machine   {plan.profile.name}: {plan.profile.description}; {_hardware(plan.evidence)}")
    if plan.settings.assumed:
        print(f"ASSUMED   {_assumed(plan)}")
    for text in plan.warnings:
        print(f"warning   {text}")


def _assumed(plan: Plan) -> str:
    """Every default that nobody asked for."""
    parts = []
    for name in plan.settings.assumed:
        value = getattr(plan.settings, name)
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        parts.append(f"{name.replace('_', '-')} {text}")
    return ", ".join(parts)


def _hardware(evidence: Any) -> str:
    labels = evidence["hardware"]
    total = sum(len(names) for names in labels.values())
    return ", ".join(f"{len(names)} of {total} figures {label}" for label, names in labels.items())


def print_results(results: Results, shown: tuple[str, ...]) -> None:
    """The table of a grid, notes other than those already shown, evidence and the results directory."""
    print()
    console().print(_table(results.runs))
    print("Means in seconds; percentiles are in summary.json. GB = 10^9 bytes.")
    _print_reasons([(f"{run.policy} {run.expert_cache}", run.status) for run in results.runs])
    notes = [
        (f"{run.policy} {run.expert_cache}", note)
        for run in results.runs
        for note in run.notes
        if note not in shown
    ]
    for note in dict.fromkeys(text for _, text in notes):
        cells = [cell for cell, text in notes if text == note]
        print(f"note      {note}" + ("" if len(cells) == len(results.runs) else f" ({', '.join(cells)})"))
    evidence = results.evidence
    changed = evidence["trace_changed_by"]
    trace = evidence["trace"] + (f" (changed by {', '.join(changed)})" if changed else "")
    print(
        f"evidence  all figures {evidence['figures']}; trace {trace}; routing {evidence['routing']}; "
        f"machine: {_hardware(evidence)}; {len(evidence['assumed'])} settings ASSUMED"
    )
    print(f"results   {results.directory}")


def _table(runs: tuple[CellSummary, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("policy", "cache"):
        table.add_column(name, no_wrap=True)
    for name in ("TTFT", "service\nTTFT", "TPOT", "E2E", "hit\nrate", "late", "stall"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("demand\nGB", "prefetch GB\nuseful", "prefetch GB\nwasted"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    for run in runs:
        table.add_row(
            run.policy,
            run.expert_cache,
            number(run.ttft_s.mean),
            number(run.ttft_service_s.mean),
            number(run.tpot_s.mean),
            number(run.e2e_s.mean),
            _percent(run.hit_rate),
            _percent(run.late_rate),
            _percent(run.stall_share),
            _gigabytes(run.demand_bytes),
            _gigabytes(run.prefetch_useful_bytes),
            _gigabytes(run.prefetch_wasted_bytes),
            _short(run.status),
        )
    return table


def _short(status: str) -> str:
    """A status without its reasons, which stand below the table."""
    return status.partition(":")[0]


def _print_reasons(statuses: list[tuple[str, str]]) -> None:
    """Each reason once, with the cells it holds for."""
    for status in dict.fromkeys(status for _, status in statuses if ":" in status):
        cells = ", ".join(cell for cell, other in statuses if other == status)
        print(f"{status} ({cells})")


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f}%"


def _gigabytes(count: int | None) -> str:
    return "n/a" if count is None else number(count / 1e9)


def print_plan(plan: Plan) -> None:
    """The resolved settings and the memory split of every cell."""
    from ..sim.settings import to_toml

    print_header(plan)
    print()
    print(to_toml(plan.settings), end="")
    print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("policy", "cache"):
        table.add_column(name, no_wrap=True)
    sizes = ("slots", "per\ndevice", "expert\nGB", "dense\nGB", "reserve\nGB", "KV cache\nGB", "KV\ntokens")
    for name in sizes:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    for cell in plan.cells:
        memory = cell.memory
        if memory is None:
            table.add_row(cell.system.name, cell.expert_cache, *[""] * len(sizes), _short(cell.problem))
            continue
        shares = memory.devices
        table.add_row(
            cell.system.name,
            cell.expert_cache,
            f"{memory.slots:,}",
            f"{memory.slots_per_device:,}",
            _gigabytes(sum(share.expert_slot_bytes for share in shares)),
            _gigabytes(sum(share.dense_bytes for share in shares)),
            _gigabytes(sum(share.reserve_bytes for share in shares)),
            _gigabytes(memory.kv_budget_bytes),
            f"{memory.max_kv_tokens:,}",
            "fits",
        )
    console().print(table)
    _print_reasons(
        [(f"{cell.system.name} {cell.expert_cache}", cell.problem) for cell in plan.cells if cell.problem]
    )


def plan_json(plan: Plan) -> str:
    """The plan of a dry run as JSON."""
    import msgspec

    from .. import __version__

    cells = [
        {
            "policy": cell.system.name,
            "expert_cache": cell.expert_cache,
            "expert_cache_bytes": cell.expert_cache_bytes,
            "status": "fits" if cell.memory else cell.problem,
            "memory": msgspec.to_builtins(cell.memory),
        }
        for cell in plan.cells
    ]
    payload = {
        "plan": cells,
        "config": msgspec.to_builtins(plan.settings),
        "trace": plan.trace,
        "evidence": plan.evidence,
        "version": __version__,
    }
    return msgspec.json.format(msgspec.json.encode(payload), indent=2).decode() + "\n"

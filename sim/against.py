"""The simulator against a real run: driven with the recorded iterations, what does it decide otherwise?"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow.parquet as pq
import simpy

from ..calibration.profile import HardwareProfile, load_machine
from ..errors import SettingError, TraceError
from ..policy.core import make_core, total_slots
from ..policy.models import load_model_spec
from ..policy.systems import find_system
from ..serving.cells import cell_names
from ..serving.decision_diff import Comparison, compare, told_by
from ..serving.decisions import FIRST_COMMAND, KINDS, Decisions, log_table, read_decisions
from ..serving.log_rows import LogRows
from ..serving.output_folder import SUMMARY, summary_keys
from .compute import ComputeModel
from .engine import Engine
from .events import ENGINE, Timer
from .memory import MemoryPlan
from .recorded import RecordedCompute, RecordedFeed, RecordedIteration, iterations_of

if TYPE_CHECKING:
    from ..policy.system import System

_AT_ONCE = 1e18  # a rate that takes no time
RECORDED = "as recorded"


@dataclass(frozen=True)
class CellAgainst:
    """One cell of a real run, and the simulator on its iterations. Seconds of stall are of the iterations
    compared; `None`: the run has no iterations.parquet."""

    name: str
    policy: str
    hardware: str
    iterations: int
    recorded_stall_s: float | None
    simulated_stall_s: float
    comparison: Comparison


def against(
    results: str | Path,
    hardware: str | None = None,
    overrides: tuple[str, ...] = (),
    on_cell: Callable[[str], None] = lambda _: None,
) -> list[CellAgainst]:
    """Simulate the recorded iterations of every cell of a real run's results directory.

    The simulator gets the log's gates, requests and pauses between iterations; loads, searches and computing
    take as long as the log says on average, or as `hardware` (a profile) says. Raises TraceError for what is
    no real run with a decision log, SettingError for a profile that cannot be used.
    """
    folder = Path(results)
    summary = _summary(folder)
    if summary["config"].get("backend", "sim") == "sim":
        raise SettingError(
            f"--replay {folder} is a simulated run. Give the results of --backend cpu or cuda."
        )
    if overrides and hardware is None:
        raise SettingError("--set changes a profile's figures. Give --hardware as well.")
    keys = summary_keys(summary)
    found = []
    for name, key, run in zip(cell_names(keys), keys, summary["runs"], strict=True):
        part = folder / name if len(keys) > 1 else folder
        if run["requests"] == 0 or not (part / "decisions.parquet").exists():
            continue
        on_cell(name)
        log = read_decisions(part / "decisions.parquet")
        found.append(_cell(name, key.policy, part, log, summary["config"]["model"], hardware, overrides))
    if not found:
        raise TraceError(
            folder,
            "no cell has a decision log.",
            remedy="Run it again without --decisions none.",
        )
    return found


def _summary(folder: Path) -> dict[str, Any]:
    try:
        summary = json.loads((folder / SUMMARY).read_text("utf-8"))
        summary_keys(summary), summary["config"]["model"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise TraceError(
            folder, "no results directory.", remedy="Give one of finemoe-sim --backend cpu."
        ) from None
    return dict(summary)


def _cell(
    name: str,
    policy: str,
    folder: Path,
    log: Decisions,
    model: str,
    hardware: str | None,
    overrides: tuple[str, ...],
) -> CellAgainst:
    options = log.options
    rows = LogRows(log.table, options["layers"], options["experts"])
    iterations = iterations_of(rows)
    if not iterations:
        raise TraceError(folder / "decisions.parquet", "no whole iteration.", remedy="Keep more --decisions.")
    system = find_system(str(options.get("policy", policy)))
    if hardware is None:
        profile = _recorded_profile(rows, int(options["devices"]))
        compute: Any = RecordedCompute(rows, iterations, prefetch_blocks=system.prefetch_blocks)
    else:
        profile = load_machine(hardware, (*overrides, f"devices={options['devices']}"))
        compute = ComputeModel(load_model_spec(model), "bf16", profile, peer_link="pcie")
    world = _World(rows, iterations, options, system, profile, compute)
    world.run()
    end = iterations[-1].end + 1
    recorded = LogRows(log.table.slice(0, end), rows.layers, rows.experts)
    simulated = LogRows(log_table(world.core.take_log()), rows.layers, rows.experts)
    return CellAgainst(
        name=name,
        policy=policy,
        hardware=hardware or RECORDED,
        iterations=len(iterations),
        recorded_stall_s=_stall_s(folder, len(iterations)),
        simulated_stall_s=float(world.engine.log.column("stall_s").sum()),
        comparison=compare(told_by(recorded), told_by(simulated)),
    )


def _stall_s(folder: Path, iterations: int) -> float | None:
    path = folder / "iterations.parquet"
    if not path.exists():
        return None
    return float(pq.read_table(path, columns=["stall_s"])["stall_s"].to_numpy()[:iterations].sum())


def _recorded_profile(rows: LogRows, devices: int) -> HardwareProfile:
    """A machine whose links and searches take what the log's took on average, and that is never slowed."""
    times, kind = rows.column("time_s"), rows.kind
    moved_bytes = copying_s = searching_s = 0.0
    searches = 0
    started: dict[int, int] = {}
    asked: dict[int, float] = {}
    free_s = 0.0
    for row in range(len(rows)):
        name = KINDS[kind[row]]
        expert = int(rows.column("expert")[row])
        if name == "Load":
            started[expert] = row
        elif name in ("loaded", "paused") and expert in started:
            load = started.pop(expert)
            offset, size = int(rows.column("offset")[load]), int(rows.column("bytes")[load])
            moved_bytes += size if name == "loaded" else int(rows.column("bytes")[row]) - offset
            copying_s += float(times[row] - times[load])
        elif name == "Search":
            asked[int(rows.column("ticket")[row])] = float(times[row])
        elif name == "search_done":
            began_s = max(asked.pop(int(rows.column("ticket")[row])), free_s)
            free_s = float(times[row])
            searching_s += free_s - began_s
            searches += 1
    return msgspec.structs.replace(
        load_machine("rtx3090"),
        name=RECORDED,
        devices=devices,
        link_latency_s=0.0,
        link_bandwidth=moved_bytes / copying_s if copying_s else _AT_ONCE,
        link_chunk_bytes=1 << 20,
        copy_slowdown=1.0,
        host_bandwidth=None,
        search_latency_s=searching_s / searches if searches else 0.0,
        search_rate=_AT_ONCE,
    )


class _World:
    """The simulator, served by a log in place of a scheduler and a routing trace."""

    def __init__(
        self,
        rows: LogRows,
        iterations: list[RecordedIteration],
        options: dict[str, Any],
        system: System,
        profile: HardwareProfile,
        compute: Any,
    ) -> None:
        self._iterations = iterations
        self._env = simpy.Environment()
        self.core = make_core(options, -1)
        for row in range(iterations[0].begin):  # what the core knew beforehand
            if rows.kind[row] < FIRST_COMMAND:
                rows.feed(self.core, row, 0.0)
        self.engine = Engine(
            self._env,
            self.core,
            RecordedFeed(rows, iterations),
            rows,
            compute,
            profile,
            system,
            int(options["prefetch_distance"]),
            _memory(options),
        )

    def run(self) -> None:
        """All iterations, with the pauses between them."""
        self._env.run(until=self._env.process(self._serve()))

    def _serve(self) -> Generator[simpy.Event, None, None]:
        for iteration in self._iterations:
            if iteration.idle_s > 0.0:
                yield Timer(self._env, ENGINE).start(iteration.idle_s)
            yield from self.engine.iterate(iteration.step)


def _memory(options: dict[str, Any]) -> MemoryPlan:
    """Slots as the log's core had them; host memory holds every expert."""
    layers, experts, devices = options["layers"], options["experts"], options["devices"]
    slots = total_slots(layers, experts, devices, options["slots_per_device"])
    return MemoryPlan(
        expert_bytes=options["expert_bytes"],
        slots_per_device=options["slots_per_device"],
        slots=slots,
        whole_model=slots == layers * experts,
        kv_budget_bytes=0,
        max_kv_tokens=0,
        kv_bytes_per_token=0,
        devices=(),
        warnings=(),
        host_slots=layers * experts,
        ssd=False,
    )

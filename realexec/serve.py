"""`serve`: a grid of policies × expert caches × rates over one request trace, on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import FineMoEError, SettingError
from ..policy.cache_size import parse_bandwidth
from ..serving.grid import Cell, CellSink, OnProgress, Served, run_grid
from ..serving.results import Results
from ..serving.settings_file import resolve
from ..traces.routing import RoutingMeta
from ..traces.routing_file import RoutingWriter
from .load import open_model
from .observed import InOrder, RoutingObserver
from .server import CellServer
from .serving_plan import RealCell, RealPlan, make_plan

ROUTING_FILE = "routing.parquet"


def serve(
    trace: str | Path | None = None,
    *,
    model: str | Path | None = None,
    backend: str = "cpu",
    config: str | Path | None = None,
    output: str | Path | None = None,
    on_progress: OnProgress | None = None,
    **options: object,
) -> Results:
    """Serve `trace` with the checkpoint in the folder `model`, for each policy, expert cache and rate.

    As `simulate`, but for real: `backend` is "cpu" or "cuda", requests arrive by the wall clock, figures are
    MEASURED. Each cell's folder has `routing.parquet` besides, what the gates said.
    """
    settings = resolve({"trace": trace, "model": model, "backend": backend, **options}, config)
    if settings.backend == "sim":
        raise SettingError("backend is sim: finemoe.simulate runs the simulator.")
    return run_plan(make_plan(settings), None if output is None else Path(output), on_progress)


def run_plan(plan: RealPlan, output: Path | None = None, on_progress: OnProgress | None = None) -> Results:
    """Run every cell that can run and write the results directory; see `serve`."""
    grid = _Grid(plan)
    try:
        return run_grid(plan, grid.serve, output, on_progress)
    finally:
        grid.close()


class _Grid:
    """One model for all cells: each begins with an empty cache, store and log."""

    def __init__(self, plan: RealPlan) -> None:
        self._plan = plan
        self._model: Any = None

    def close(self) -> None:
        """Stop the model's workers."""
        if self._model is not None:
            self._model.finemoe.close()

    def serve(self, cell: Cell, sink: CellSink) -> Served:
        """Run one cell."""
        assert isinstance(cell, RealCell)
        plan = self._plan
        model = self._fresh(cell, progress=sink.shown)
        observer = RoutingObserver(_complete_distances(cell, plan))
        path = sink.folder() / ROUTING_FILE
        with path.open("wb") as file, RoutingWriter(file, path, _meta(cell, plan)) as writer:
            server = CellServer(
                model, plan.settings, list(cell.requests), plan.prompts, observer, InOrder(writer), sink
            )
            outcome = server.run()
        return Served(outcome, len(plan.devices), outcome.run_s, outcome.notes)

    def _fresh(self, cell: RealCell, *, progress: bool) -> Any:
        """The model with the cell's system, and nothing cached."""
        plan, settings, options = self._plan, self._plan.settings, cell.options
        if options is None:
            raise FineMoEError(f"{cell.label} cannot run")
        log_iterations = -1 if settings.decisions == "all" else settings.decisions
        if self._model is not None:
            self._model.finemoe.use(
                cell.system, options, log_iterations=log_iterations, history=settings.history
            )
            return self._model
        limit = settings.bandwidth_limit
        self._model = open_model(
            plan.checkpoint,
            cell.system,
            options,
            plan.devices,
            settings.source,
            bandwidth_limit=None if limit is None else parse_bandwidth(limit, name="--bandwidth-limit"),
            log_iterations=log_iterations,
            history=settings.history,
            progress=progress,
        )
        return self._model


def _complete_distances(cell: RealCell, plan: RealPlan) -> tuple[int, ...]:
    """Distances at which every layer speculates, so that a routing trace can have them."""
    layers, distance = len(plan.checkpoint.moe.layers), plan.settings.prefetch_distance or 1
    system = cell.system
    return tuple(
        d
        for d in system.speculated_distances(layers, distance)
        if all(layer + d in system.speculated(layer, layers, distance) for layer in range(layers - d))
    )


def _meta(cell: RealCell, plan: RealPlan) -> RoutingMeta:
    checkpoint, settings = plan.checkpoint, plan.settings
    moe = checkpoint.moe
    return RoutingMeta(
        model=checkpoint.folder.resolve().name,
        layers=len(moe.layers),
        experts=moe.num_experts,
        top_k=moe.top_k,
        expert_bytes=checkpoint.layout.slab_bytes,
        embedding_width=checkpoint.hidden_size,
        source="recorded",
        gate_content="full",
        speculation=_complete_distances(cell, plan),
        notes=(
            f"{moe.family}; served by {cell.label} on {settings.backend}; request i is the i-th of "
            f"requests.parquet; prompts {settings.prompts or 'our own'}"
        ),
    )

"""`model.finemoe`: the core and engine behind a loaded model, its figures and its decision log."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import SettingError
from ..policy.core import make_core
from ..serving.decisions import decision_table
from .devices import engine_arena, make_arenas
from .history import prepare
from .runtime import Runtime

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from ..policy.core import Options
    from ..policy.system import System
    from .expert_layout import ExpertLayout
    from .experts_kernel import Arena
    from .gates import MoeModel


class Handle:
    """Runs a model's experts until `close()`, which the end of the model or of the process calls as well."""

    def __init__(
        self,
        moe: MoeModel,
        system: System,
        options: Options,
        source: Any,
        layout: ExpertLayout,
        devices: list[torch.device],
        *,
        bandwidth_limit: float | None = None,
        log_iterations: int = 0,
        history: str | Path | None = None,
    ) -> None:
        self.options = options
        self.layout = layout
        self.devices = devices
        self._source = source
        self._bandwidth_limit = bandwidth_limit
        self._log_iterations = log_iterations
        self._history = history
        self._system = system
        arenas = make_arenas(layout, options, devices)
        core, engine = self._start(arenas)
        self.runtime = Runtime(
            core=core,
            engine=engine,
            moe=moe,
            arenas=arenas,
            system=system,
            prefetch_distance=int(options["prefetch_distance"]),
        )
        self._finalizer = weakref.finalize(self, engine.close)

    @property
    def core(self) -> Any:
        """The policy core."""
        return self.runtime.core

    def close(self) -> None:
        """Stop the workers. The model computes no more."""
        self._finalizer()

    def reset(self) -> None:
        """Begin anew with an empty cache, store and log: also after an interrupted forward pass."""
        self._finalizer()
        self._restart()

    def use(
        self, system: System, options: Options, *, log_iterations: int, history: str | Path | None
    ) -> None:
        """Begin anew with another system or expert cache. `options`: of `load.model_options`."""
        self._finalizer()
        self.runtime.arenas.clear()  # their memory, before the new ones take it;
        self.runtime.engine = None  # the engine has it, too
        self._system, self.options = system, options
        self._log_iterations, self._history = log_iterations, history
        arenas = make_arenas(self.layout, options, self.devices)
        self.runtime.change(system, int(options["prefetch_distance"]), arenas)
        self._restart()

    def statistics(self) -> dict[str, Any]:
        """Counters of the core and the engine, and seconds of the forward passes, since the last reset."""
        core, times = self.runtime.core, self.runtime.times
        activated, hits, late, _ = core.totals()
        return {
            "iterations": times.iterations,
            "activated": activated,
            "hits": hits,
            "late": late,
            "policy_s": times.policy_s,
            "gate_wait_s": times.gate_wait_s,
            "stall_s": times.stall_s,
            "search_wait_s": times.search_wait_s,
            "counters": core.counters(),
            "engine": self.runtime.engine.statistics(),
        }

    def decisions(self) -> pa.Table:
        """Events and commands of the first `log_iterations` iterations, as of `decisions.parquet`; once."""
        self.runtime.finish()
        self.runtime.engine.drain()
        return decision_table(self.runtime.core.take_log(), self.options)

    def _restart(self) -> None:
        core, engine = self._start(self.runtime.arenas)
        self.runtime.restart(core, engine)
        self._finalizer = weakref.finalize(self, engine.close)

    def _start(self, arenas: list[Arena]) -> tuple[Any, Any]:
        for arena in arenas:
            arena.settle()
        core = make_core(self.options, self._log_iterations)
        engine = _core.TransferEngine(
            core,
            self._source,
            [engine_arena(arena) for arena in arenas],
            bandwidth_limit_bytes_per_s=self._bandwidth_limit,
        )
        kept = prepare(core, self._system, self.options, self._history)
        if kept:
            engine.preload(kept)
        engine.start()
        return core, engine


def refuse_to_save(*_: Any, **__: Any) -> None:
    """In place of the `save_pretrained` of an offloaded model, which would write a checkpoint without
    experts."""
    raise SettingError(
        "save_pretrained: the experts of an offloaded model are not in it. Copy the checkpoint's folder."
    )

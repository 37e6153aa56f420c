"""Tiny random checkpoints, traces and prompts to be served for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from finemoe.realexec.forward import BatchForward
from finemoe.realexec.gates import find_moe
from finemoe.realexec.generate import generate_recorded
from finemoe.realexec.load import open_model
from finemoe.realexec.observed import InOrder, RoutingObserver
from finemoe.realexec.recorder import GateRecorder
from finemoe.realexec.server import CellServer
from finemoe.realexec.serving_plan import RealPlan, make_plan
from finemoe.serving.outcome import CellOutcome, Progress
from finemoe.serving.settings_file import resolve
from finemoe.traces.routing import RequestRouting, RoutingMeta
from finemoe.traces.routing_file import RoutingFile, RoutingWriter
from tiny_models import tiny_model

SYSTEMS = ("finemoe", "moe-infinity", "promoe", "mixtral-offloading", "deepspeed", "lru", "lfu", "lfru")


def checkpoint(folder: Path, family: str = "mixtral", **overrides: Any) -> Path:
    """A tiny model, saved."""
    tiny_model(family, **overrides).save_pretrained(folder)
    return folder


def trace(path: Path, lengths: list[tuple[int, int]], gap_s: float = 0.0) -> Path:
    """Requests of (prompt, output) tokens, `gap_s` apart."""
    rows = "".join(f"{i * gap_s:.4f},{prompt},{output}\n" for i, (prompt, output) in enumerate(lengths))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    return path


def prompts(path: Path) -> Path:
    """Token ids, since tiny models have no tokenizer: five prompts of 4 to 8 tokens."""
    path.write_text(
        "".join(
            json.dumps({"token_ids": [(i * 7 + 3 * j) % 90 + 3 for j in range(4 + i)]}) + "\n"
            for i in range(5)
        )
    )
    return path


class Sink:
    """A cell's sink that keeps what it is given."""

    shown = False

    def __init__(self) -> None:
        self.reports: list[Progress] = []
        self.tables: list[Any] = []

    def progress(self, progress: Progress) -> None:
        self.reports.append(progress)

    def decisions(self, table: Any) -> None:
        self.tables.append(table)


def served(
    folder: Path, **options: object
) -> tuple[RealPlan, dict[int, list[int]], CellOutcome, RoutingFile]:
    """The first cell of a plan, served: the answers by request, what else came of it, and its routing trace,
    which is in `folder`."""
    answers: dict[int, list[int]] = {}
    finish = BatchForward.finish

    def keep(forward: BatchForward, request: int) -> list[int]:
        answers[request] = finish(forward, request)
        return answers[request]

    plan = make_plan(resolve({"backend": "cpu", **options}))
    cell = plan.cells[0]
    assert cell.options is not None
    model = open_model(
        plan.checkpoint, cell.system, cell.options, plan.devices, plan.settings.source, progress=False
    )
    moe = plan.checkpoint.moe
    meta = RoutingMeta(
        model="tiny",
        layers=len(moe.layers),
        experts=moe.num_experts,
        top_k=moe.top_k,
        expert_bytes=1,
        embedding_width=plan.checkpoint.hidden_size,
        source="recorded",
        gate_content="full",
    )
    path = folder / "routing.parquet"
    try:
        with (
            path.open("wb") as file,
            RoutingWriter(file, path, meta) as writer,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(BatchForward, "finish", keep)
            server = CellServer(
                model,
                plan.settings,
                list(cell.requests),
                plan.prompts,
                RoutingObserver(()),
                InOrder(writer),
                Sink(),  # type: ignore[arg-type]
            )
            outcome = server.run()
    finally:
        model.finemoe.close()
    return plan, answers, outcome, RoutingFile(path)


def alone(model: Any, plan: RealPlan, place: int) -> tuple[RequestRouting, list[int]]:
    """Routing and tokens of served request number `place`, made by the plain model without any batch."""
    request = list(plan.cells[0].requests)[place]
    ids = plan.prompts(place, request.prompt_tokens)
    with GateRecorder(model, find_moe(model)) as recorder, torch.no_grad():
        routings, new = generate_recorded(model, recorder, [ids], request.output_tokens, frozenset())
    return routings[0], new[0]

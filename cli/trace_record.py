"""`finemoe trace record`: routing of a real model over prompts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .shell import InterruptTold

if TYPE_CHECKING:
    from ..realexec.record import RecordProgress


def record_command(
    model: Annotated[Path, typer.Option(metavar="DIR", help="Folder of a transformers MoE model.")],
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="JSON lines with prompt, turns, messages, conversations or token_ids, or a prompt a line.",
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="OUT.parquet", help="Routing trace to write.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per answer.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Prompts computed together.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="auto (as the weights are), float32, bfloat16 or float16.")
    ] = "auto",
    distances: Annotated[
        str | None,
        typer.Option(help="Layers ahead that gates speculate on, or none. [1,3, where the model has them]"),
    ] = None,
) -> None:
    """Record which experts a real model chooses, for --routing (docs/recording.md). Stopped, it goes on where
    it was when the same command is run again."""
    from ..realexec.extras import require

    require("finemoe trace record", "torch", "transformers", "safetensors")
    from ..realexec.record import RecordSettings, record_routing

    settings = RecordSettings(
        model=model,
        prompts=prompts,
        output=output,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        distances=_distances(distances),
    )
    began_s = time.perf_counter()
    state: RecordProgress | None = None

    def follow(progress: RecordProgress) -> None:
        nonlocal state
        state = progress
        show(progress)

    try:
        with _bar(max_new_tokens) as show:
            recording = record_routing(settings, follow)
    except KeyboardInterrupt:
        kept = "nothing" if state is None else f"{state.finished:,} of {state.requests:,} requests"
        print(f"finemoe: interrupted; {kept} kept, the same command goes on from there", file=sys.stderr)
        raise InterruptTold from None
    meta = recording.meta
    speed = recording.new_tokens / (time.perf_counter() - began_s)
    before = f" ({recording.kept:,} of them by earlier runs)" if recording.kept else ""
    print(
        f"{output}: {meta.model}, {meta.layers} layers x {meta.experts} experts, top-{meta.top_k}, "
        f"{recording.scoring}; {recording.requests:,} requests{before}; {speed:,.1f} tokens/s with loading"
    )


def _distances(text: str | None) -> tuple[int, ...] | None:
    from ..errors import SettingError

    if text is None:
        return None
    if text == "none":
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise SettingError(f"--distances is {text!r}. Give whole numbers with commas between them, or none.")
    return tuple(int(part) for part in parts)


@contextmanager
def _bar(max_new_tokens: int) -> Iterator[Callable[[RecordProgress], None]]:
    """A line on standard error where that is a terminal: requests, tokens per second, ETA."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    began_s = 0.0
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[speed]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("loading the model", total=None, speed="")
        loading = True

        def show(progress: RecordProgress) -> None:
            nonlocal task, loading, began_s
            # In tokens, as if each request made as many as it may: a request's end is a step to there.
            now = max_new_tokens * progress.finished + progress.running_tokens
            if loading:
                bar.remove_task(task)
                loading = False
                began_s = time.perf_counter()
                total = max_new_tokens * progress.requests
                task = bar.add_task("", total=total, completed=now, speed="")
            speed = progress.new_tokens / max(time.perf_counter() - began_s, 1e-3)
            bar.update(
                task,
                completed=now,
                description=f"{progress.finished:,}/{progress.requests:,} requests",
                speed=f"{speed:,.1f} tokens/s",
            )

        yield show

"""Record the routing of a model over prompts, batch by batch, so that it can be stopped and gone on with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from ..errors import SettingError, TraceError
from ..traces.files import check_replaceable
from ..traces.routing import RoutingMeta
from .gates import MoeModel, find_moe
from .generate import generate_recorded
from .journal import Journal
from .prompts import known_tokens_of, read_prompts, tokens_of
from .recorder import GateRecorder
from .stock_model import (
    check_device,
    check_dtype,
    check_folder,
    end_tokens,
    fingerprint,
    load_outline,
    load_tokenizer,
    load_whole,
)

DEFAULT_DISTANCES = (1, 3)


@dataclass(frozen=True)
class RecordSettings:
    """What to record. `distances` None: 1 and 3, as far as the model has layers for them."""

    model: Path
    prompts: Path
    output: Path
    max_new_tokens: int = 128
    batch_size: int = 1
    device: str = "cpu"
    dtype: str = "auto"
    distances: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RecordProgress:
    """How far a recording is: requests in all and finished; tokens this run made, and those of them whose
    requests are not finished."""

    requests: int
    finished: int
    new_tokens: int
    running_tokens: int


@dataclass(frozen=True)
class Recording:
    """What was recorded; `kept` requests had been finished by earlier runs."""

    meta: RoutingMeta
    scoring: str
    requests: int
    kept: int
    new_tokens: int


@dataclass(frozen=True)
class _Prompts:
    """What a first reading of the prompts' file says."""

    count: int
    given_ids: int
    template: bool
    digest: str


def record_routing(
    settings: RecordSettings, progress: Callable[[RecordProgress], None] = lambda _: None
) -> Recording:
    """Write `settings.output`, a routing trace of the model's greedy answers to the prompts.

    An earlier run of the same arguments that was stopped is gone on with: its finished batches are kept in
    `OUTPUT.recording` until the output is complete. Raises `SettingError` and `TraceError` for what cannot be
    used, before the first forward pass where it can be known by then.
    """
    _check(settings)
    tokenizer = load_tokenizer(settings.model)
    outline = load_outline(settings.model)
    distances = _distances(settings, len(find_moe(outline).layers))
    prompts = _first_reading(settings, tokenizer, outline.config.get_text_config())
    model = load_whole(settings.model, settings.device, settings.dtype)
    moe = find_moe(model)
    meta = _meta(settings, model, moe, prompts, distances)
    ends = end_tokens(model, tokenizer)
    batches = -(-prompts.count // settings.batch_size)
    with (
        Journal(settings.output, _arguments(settings, meta, prompts)) as journal,
        GateRecorder(model, moe, distances) as recorder,
    ):
        sizes = [min(settings.batch_size, prompts.count - b * settings.batch_size) for b in range(batches)]
        missing = [b for b in range(batches) if not journal.has(b, sizes[b], meta)]
        kept = prompts.count - sum(sizes[b] for b in missing)
        finished, made, running = kept, 0, 0

        def count(new: int) -> None:
            nonlocal made, running
            made += new
            running += new
            progress(RecordProgress(prompts.count, finished, made, running))

        count(0)
        for batch, ids in enumerate(_batches(settings, tokenizer)):
            if batch not in missing:
                continue
            requests, _ = generate_recorded(model, recorder, ids, settings.max_new_tokens, ends, count)
            journal.add(batch, requests, meta)
            finished += len(ids)
            running = 0
            count(0)
        journal.assemble(batches, meta)
    return Recording(meta, moe.scoring, prompts.count, kept, made)


def _check(settings: RecordSettings) -> None:
    """What can be refused before the model is loaded."""
    for name, value in (("--max-new-tokens", settings.max_new_tokens), ("--batch-size", settings.batch_size)):
        if value < 1:
            raise SettingError(f"{name} is {value}. Give 1 or more.")
    check_folder(settings.model)
    check_device(settings.device)
    check_dtype(settings.dtype)
    check_replaceable(settings.output)
    if not settings.output.parent.is_dir():
        raise TraceError(settings.output, "its folder does not exist.", remedy="Make the folder first.")
    next(read_prompts(settings.prompts))


def _distances(settings: RecordSettings, layers: int) -> tuple[int, ...]:
    distances = settings.distances
    if distances is None:
        return tuple(d for d in DEFAULT_DISTANCES if d < layers)
    if any(not 1 <= d < layers for d in distances) or len(set(distances)) < len(distances):
        raise SettingError(
            f"--distances {','.join(map(str, distances))}: the model has {layers} MoE layers. "
            f"Give different distances from 1 to {layers - 1}, or none."
        )
    return distances


def _first_reading(settings: RecordSettings, tokenizer: Any, config: Any) -> _Prompts:
    """Count and check all prompts, so that none stops the recording later. `config` is the text model's."""
    longest = getattr(config, "max_position_embeddings", None)
    count = given = 0
    for prompt in read_prompts(settings.prompts):
        count += 1
        given += bool(prompt.token_ids)
        ids = known_tokens_of(prompt, tokenizer, settings.prompts, config.vocab_size)
        if longest is not None and len(ids) + settings.max_new_tokens - 1 > longest:
            raise TraceError(
                settings.prompts,
                f"{len(ids)} tokens and {settings.max_new_tokens} new ones, the model takes {longest}.",
                place=f"row {prompt.row}",
                remedy="Leave it out, shorten it, or lower --max-new-tokens.",
            )
    with settings.prompts.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return _Prompts(count, given, bool(getattr(tokenizer, "chat_template", None)), digest)


def _meta(
    settings: RecordSettings, model: Any, moe: MoeModel, prompts: _Prompts, distances: tuple[int, ...]
) -> RoutingMeta:
    text = prompts.count - prompts.given_ids
    form = "chat template" if prompts.template else "no chat template"
    kinds = [f"{form}: {text} prompts"] if text else []
    kinds += [f"token ids given: {prompts.given_ids} prompts"] if prompts.given_ids else []
    gate = (
        "softmax of the router logits" if moe.scoring == "softmax" else "sigmoid scores divided by their sum"
    )
    return RoutingMeta(
        model=settings.model.resolve().name,
        layers=len(moe.layers),
        experts=moe.num_experts,
        top_k=moe.top_k,
        expert_bytes=moe.expert_bytes(),
        embedding_width=int(model.get_input_embeddings().weight.shape[-1]),
        source="recorded",
        gate_content="full",
        speculation=distances,
        notes=(
            f"{moe.family}; gate: {gate}; {'; '.join(kinds)}; greedy, at most {settings.max_new_tokens} new "
            f"tokens; {str(model.dtype).removeprefix('torch.')} on {settings.device}"
        ),
    )


def _arguments(settings: RecordSettings, meta: RoutingMeta, prompts: _Prompts) -> dict[str, str]:
    """All that a recording depends on, by the names that its user knows."""
    return {
        "--model": f"{settings.model.resolve()} ({fingerprint(settings.model)})",
        "--prompts": f"{settings.prompts.resolve()} ({prompts.digest})",
        "--max-new-tokens": str(settings.max_new_tokens),
        "--batch-size": str(settings.batch_size),
        "--device": settings.device,
        "--dtype": settings.dtype,
        "--distances": ",".join(map(str, meta.speculation)) or "none",
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
    }


def _batches(settings: RecordSettings, tokenizer: Any) -> Iterator[list[list[int]]]:
    prompts = read_prompts(settings.prompts)
    while batch := list(islice(prompts, settings.batch_size)):
        yield [tokens_of(prompt, tokenizer, settings.prompts) for prompt in batch]

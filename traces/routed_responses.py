"""Routed experts in the JSON responses of vLLM and SGLang servers (docs/routed-experts.md)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import TraceError
from ..policy.model_spec import ModelSpec
from .npz_file import NPY_MAGIC, load_npy
from .route_csv import first_bytes

Ids = npt.NDArray[Any]
REMEDY = "docs/routed-experts.md says how to save it."
_BOM = b"\xef\xbb\xbf"
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_WHOLE = "Ask for the routing of the whole sequence, and keep the response as it is."


class Recorded(NamedTuple):
    """One request: ids [n, L, k], of which the first `prompt` rows are its prompt's."""

    place: str
    ids: Ids
    prompt: int


class _Experts(msgspec.Struct):
    routed_experts: str | None = None


class _Choice(msgspec.Struct):
    routed_experts: str | list[list[list[int]]] | None = None
    sgl_ext: _Experts | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _MetaInfo(msgspec.Struct):
    routed_experts: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Response(msgspec.Struct):
    model: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_routed_experts: list[list[list[int]]] | None = None
    meta_info: _MetaInfo | None = None


def from_responses(path: Path, spec: ModelSpec | None) -> Iterator[Recorded]:
    """The requests of a file of responses, one per choice. `spec` gives SGLang's ids their shape."""
    served: str | None = None
    for place, response in _responses(path):
        if served and response.model and response.model != served:
            raise TraceError(
                path,
                f"model {response.model!r}, the responses before are of {served!r}.",
                place=place,
                remedy="Keep each model's responses in a file of their own.",
            )
        served = served or response.model
        yield from _requests_of(path, place, response, spec)


def _responses(path: Path) -> Iterator[tuple[str, _Response]]:
    """The responses of a JSON Lines file, or of one JSON document that is a response or a list of them."""
    one, many = msgspec.json.Decoder(_Response), msgspec.json.Decoder(list[_Response])
    with path.open("rb") as file:
        lines = ((number, line.removeprefix(_BOM).strip()) for number, line in enumerate(file, 1))
        lines = ((number, line) for number, line in lines if line)
        first = next(lines, None)
        if first is None:
            raise TraceError(path, "empty.", remedy=REMEDY)
        whole = first_bytes(path, None) if _spans_lines(first[1]) else None
        try:
            if whole is not None:
                whole = whole.removeprefix(_BOM).strip()
                found = many.decode(whole) if whole.startswith(b"[") else [one.decode(whole)]
                yield from ((f"response {number}", item) for number, item in enumerate(found))
                return
        except _NO_JSON as error:
            raise _no_response(path, "", error) from None
        for number, line in chain([first], lines):
            place = f"line {number}"
            try:
                found = many.decode(line) if line.startswith(b"[") else [one.decode(line)]
            except _NO_JSON as error:
                raise _no_response(path, place, error) from None
            yield from ((place, item) for item in found)


def _spans_lines(line: bytes) -> bool:
    """Whether a document goes on after its first line."""
    try:
        msgspec.json.decode(line)
    except _NO_JSON:
        return True
    return False


def _no_response(path: Path, place: str, error: Exception) -> TraceError:
    reason = (str(error).splitlines() or ["not UTF-8"])[0].rstrip(".")
    return TraceError(path, f"not a response ({reason}).", place=place, remedy=REMEDY)


def _requests_of(path: Path, place: str, response: _Response, spec: ModelSpec | None) -> Iterator[Recorded]:
    info = response.meta_info
    if info is not None:  # SGLang's own endpoint
        prompt, generated = _counts(path, place, info.prompt_tokens, info.completion_tokens)
        if info.routed_experts is None:
            raise _none_there(path, place)
        rows = prompt + generated - 1
        yield Recorded(place, _decoded(path, place, info.routed_experts, rows, spec), prompt)
        return
    usage = response.usage or _Usage()
    prompt, generated = _counts(path, place, usage.prompt_tokens, usage.completion_tokens)
    parts = []
    for number, choice in enumerate(response.choices):
        found = choice.routed_experts or (choice.sgl_ext.routed_experts if choice.sgl_ext else None)
        where = f"{place}, choice {number}"
        if found is None:
            raise _none_there(path, where)
        if isinstance(found, str):
            alone = prompt + generated - 1 if len(response.choices) == 1 else None
            parts.append((where, _decoded(path, where, found, alone, spec)))
        else:
            parts.append((where, _nested(path, where, found)))
    if not parts:
        raise _none_there(path, place)
    if response.prompt_routed_experts is not None:
        yield from _joined(path, place, response.prompt_routed_experts, parts, prompt, generated)
        return
    rows = sum(len(ids) for _, ids in parts)
    if rows != len(parts) * (prompt - 1) + generated or min(len(ids) for _, ids in parts) < prompt:
        raise TraceError(
            path,
            f"{rows} rows in {len(parts)} choices, but {prompt} prompt and {generated} completion tokens.",
            place=place,
            remedy=_WHOLE,
        )
    for where, ids in parts:
        yield Recorded(where, ids, prompt)


def _joined(
    path: Path, place: str, prompt_ids: Any, parts: list[tuple[str, Ids]], prompt: int, generated: int
) -> Iterator[Recorded]:
    """vLLM 0.21: prompt and completions apart. A completion's last token was not yet run: its row is no
    routing."""
    shared = _nested(path, f"{place}, prompt", prompt_ids)
    rows = sum(len(ids) for _, ids in parts)
    if len(shared) != prompt or rows not in (generated, generated - len(parts)):
        raise TraceError(
            path,
            f"{len(shared)} prompt and {rows} completion rows, "
            f"but {prompt} prompt and {generated} completion tokens.",
            place=place,
            remedy=_WHOLE,
        )
    last = rows == generated
    for where, ids in parts:
        ran = ids[: len(ids) - 1] if last else ids
        if len(ran) and ran.shape[1:] != shared.shape[1:]:
            raise TraceError(
                path,
                f"{list(ran.shape[1:])} per token, the prompt has {list(shared.shape[1:])}.",
                place=where,
                remedy=REMEDY,
            )
        yield Recorded(where, np.concatenate((shared, ran)) if len(ran) else shared, prompt)


def _counts(path: Path, place: str, prompt: int | None, generated: int | None) -> tuple[int, int]:
    if prompt is None or generated is None or prompt < 1 or generated < 1:
        raise TraceError(
            path,
            f"prompt_tokens = {prompt}, completion_tokens = {generated}: both must be known, and 1 or more.",
            place=place,
            remedy="Keep the whole response, with its usage or meta_info.",
        )
    return prompt, generated


def _none_there(path: Path, place: str) -> TraceError:
    return TraceError(
        path,
        "no routed_experts.",
        place=place,
        remedy="Start the server with --enable-return-routed-experts; for SGLang also ask for "
        "return_routed_experts in the request.",
    )


def _nested(path: Path, place: str, rows: list[list[list[int]]]) -> Ids:
    try:
        return np.array(rows, dtype=np.int64).reshape(
            (0, 0, 0) if not rows else (len(rows), len(rows[0]), -1)
        )
    except (ValueError, OverflowError):
        raise TraceError(
            path, "lists of different lengths, or ids out of range.", place=place, remedy=REMEDY
        ) from None


def _decoded(path: Path, place: str, text: str, rows: int | None, spec: ModelSpec | None) -> Ids:
    """Base64 of an npy file (vLLM), or of int32 without a shape (SGLang)."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise TraceError(path, "routed_experts is not base64.", place=place, remedy=REMEDY) from None
    if content.startswith(NPY_MAGIC):
        return load_npy(path, content, place, REMEDY)
    if spec is None:
        raise TraceError(
            path,
            "ids without a shape, as SGLang returns them.",
            place=place,
            remedy="Name the model: --model NAME or its config.json.",
        )
    if rows is None:
        raise TraceError(
            path, "several choices without a shape.", place=place, remedy="Ask SGLang for one choice (n = 1)."
        )
    for layers in (spec.decoder_layers, spec.layers):
        if len(content) == rows * layers * spec.top_k * 4:
            return np.frombuffer(content, "<i4").reshape(rows, layers, spec.top_k)
    expected = rows * spec.decoder_layers * spec.top_k * 4
    raise TraceError(
        path,
        f"{len(content):,} bytes; {rows} tokens of {spec.name} ({spec.decoder_layers} layers, "
        f"{spec.top_k} experts per token) are {expected:,}.",
        place=place,
        remedy="Name the model that was recorded (--model), and ask for the whole sequence.",
    )

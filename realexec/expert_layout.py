"""One contiguous slab per expert: which bytes of which files make it up, and where its parameters lie in it.

transformers packs the experts of a layer into tensors [J, …], but many checkpoints keep a tensor per expert
and matrix. transformers' own conversion rules say which of these belong together; here they are read, not
run, so that an expert is copied from the files into its slot and never passes through Python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SettingError
from .safetensors_index import CheckpointIndex, TensorPlace

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT = 64  # bytes; of parameters in a slab and of slabs
_DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}


@dataclass(frozen=True)
class ExpertParameter:
    """A parameter of one expert: `shape` without the leading J, `place` in bytes from the slab's begin."""

    name: str
    shape: tuple[int, ...]
    place: int


@dataclass(frozen=True)
class ExpertLayout:
    """The slabs of all L·J experts. Expert e has P pieces: piece p is `length[p]` bytes from `offset[e, p]`
    of `files[file[e, p]]`, at byte `place[p]` of its slab."""

    parameters: tuple[ExpertParameter, ...]
    dtype: str  # torch's name
    itemsize: int
    slab_bytes: int
    files: tuple[Path, ...]
    file: NDArray[np.int32]  # [L·J, P]
    offset: NDArray[np.int64]  # [L·J, P]
    length: NDArray[np.int64]  # [P]
    place: NDArray[np.int64]  # [P]


def expert_layout(
    index: CheckpointIndex,
    blocks: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    rename: Any,
    family: str,
) -> ExpertLayout:
    """The layout of the experts modules `blocks` (names in layer order), whose parameters have `shapes`
    [J, …].

    rename: checkpoint name → name in the model, converter and its pattern (or None and ""), by transformers.
    Raises SettingError for a checkpoint whose experts are not copied as they are.
    """
    found = _sources(index, blocks, shapes, rename, family)
    dtypes = sorted({piece.dtype for pieces in found.values() for piece in pieces})
    if len(dtypes) != 1 or dtypes[0] not in _DTYPES:
        raise SettingError(
            f"{index.folder}: experts have dtype {', '.join(dtypes)}. Save them all in one of "
            f"{', '.join(_DTYPES)}: quantised experts are not supported."
        )
    dtype, itemsize = _DTYPES[dtypes[0]]
    parameters, place, length, at = [], [], [], 0
    for name, shape in shapes.items():
        parameters.append(ExpertParameter(name, shape[1:], at))
        start = at
        for piece in found[0, name, 0]:
            place.append(at)
            length.append(piece.length)
            at += piece.length
        needed = math.prod(shape[1:]) * itemsize
        if at - start != needed:
            raise SettingError(
                f"{index.folder}: {blocks[0]}.{name} of one expert has {at - start} bytes, shape "
                f"{list(shape[1:])} needs {needed}. The checkpoint does not fit its config.json."
            )
        at = -(-at // ALIGNMENT) * ALIGNMENT
    experts = next(iter(shapes.values()))[0]
    rows = [
        [piece for name in shapes for piece in found[layer, name, j]]
        for layer in range(len(blocks))
        for j in range(experts)
    ]
    for row in rows:
        if [piece.length for piece in row] != length:
            raise SettingError(f"{index.folder}: experts differ in size. Only equal ones can share slots.")
    return ExpertLayout(
        parameters=tuple(parameters),
        dtype=dtype,
        itemsize=itemsize,
        slab_bytes=at,
        files=index.files,
        file=np.array([[piece.file for piece in row] for row in rows], np.int32),
        offset=np.array([[piece.offset for piece in row] for row in rows], np.int64),
        length=np.array(length, np.int64),
        place=np.array(place, np.int64),
    )


def _sources(
    index: CheckpointIndex,
    blocks: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    rename: Any,
    family: str,
) -> dict[tuple[int, str, int], list[TensorPlace]]:
    """(layer, parameter, expert) → the places that follow one another in the slab."""
    wanted = {f"{block}.{name}": (layer, name) for layer, block in enumerate(blocks) for name in shapes}
    pieces: dict[tuple[int, str, int], dict[int, TensorPlace]] = {}
    for source, tensor in index.tensors.items():
        target, converter, pattern = rename(source)
        if target not in wanted:
            continue
        layer, name = wanted[target]
        experts = shapes[name][0]
        if converter is None:  # all experts in one tensor
            if tensor.shape != shapes[name]:
                raise SettingError(
                    f"{index.folder}: {source} has shape {list(tensor.shape)}, the model needs "
                    f"{list(shapes[name])}. The checkpoint does not fit its config.json."
                )
            step = tensor.length // experts
            for j in range(experts):
                part = TensorPlace(
                    tensor.file, tensor.offset + j * step, step, tensor.dtype, tensor.shape[1:]
                )
                pieces.setdefault((layer, name, j), {})[0] = part
        else:
            order, j = _part(converter, pattern, source, family)
            if j < experts:
                pieces.setdefault((layer, name, j), {})[order] = tensor
    for target, (layer, name) in wanted.items():
        for j in range(shapes[name][0]):
            if (layer, name, j) not in pieces:
                raise SettingError(
                    f"{index.folder} has no weights of expert {j} for {target}. Copy the checkpoint again."
                )
    return {key: [parts[order] for order in sorted(parts)] for key, parts in pieces.items()}


def _part(converter: Any, pattern: str, source: str, family: str) -> tuple[int, int]:
    """Which part of its expert's parameter a tensor is, and which expert's.

    Experts are stacked along a new first axis, and parts joined along what is then the second: along an
    expert's own first axis, so that the bytes of its parts follow one another.
    """
    plain = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    _, star, tail = pattern.partition("*")
    match = re.search(r"(\d+)" + re.escape(tail) + "$", source) if star else None
    if match is None or plain not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        raise SettingError(
            f"{family} checkpoints keep experts in a form that has to be converted, not copied ({source}). "
            "Load it with transformers and save it with save_pretrained(save_original_format=False)."
        )
    return converter.source_patterns.index(pattern), int(match[1])

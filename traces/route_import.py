"""Import recordings of chosen experts from route CSVs, and tell the kinds of recordings apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import TraceError
from .chosen_experts import routing_of_tokens, unchosen_mass
from .files import check_replaceable
from .npz_file import NPY_MAGIC, array_names
from .route_csv import MAGIC, PREFILL, RouteTrace, first_bytes, read_route_csv
from .routing import RequestRouting, RoutingMeta
from .routing_file import write_routing

Format = Literal["npz", "route CSV", "routed experts", "SGLang recording"]


def recording_format(path: Path) -> Format:
    """What a recording of chosen experts is, by its content. Raises `TraceError` for anything else."""
    head = first_bytes(path, 64)
    if head.startswith(b"PK"):
        names = array_names(path)
        if any(name.endswith("data.pkl") for name in names):
            raise _pickle(path)
        if "routed_experts" in names:
            return "routed experts"
        return "SGLang recording" if any(name.startswith("sglang_") for name in names) else "npz"
    if head.startswith(b"\x80"):
        raise _pickle(path)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(MAGIC):
        return "route CSV"
    if head.startswith(NPY_MAGIC) or text.startswith((b"{", b"[")):
        return "routed experts"
    raise TraceError(
        path,
        f"neither an npz archive, a route CSV nor a server's responses (it begins with {head[:16]!r}).",
        remedy="docs/routing-format.md describes what is read.",
    )


def _pickle(path: Path) -> TraceError:
    return TraceError(
        path,
        "a pickle, which may run code when it is loaded: it is never read.",
        remedy="Convert an SGLang dump with scripts/sglang_to_npz.py, where SGLang runs.",
    )


def import_route_csv(
    csv_path: str | Path, out_parquet: str | Path, *, model: str | None = None, notes: str = ""
) -> RoutingMeta:
    """Write the routing trace `out_parquet` from a route CSV and return its meta.

    Each turn becomes a request: its prompt one prefill iteration, every further token a decode iteration. An
    engine that computes the last layer for the prompt's last token only has recorded only that one: it then
    stands for the whole prompt there. `expert_bytes` is the mean over the layers. `model` is by default the
    name of the model's file. Raises `TraceError` with row, column and value for a file that breaks a rule.
    """
    check_replaceable(Path(out_parquet))  # before the rows are read
    trace = read_route_csv(csv_path)
    meta = RoutingMeta(
        model=model or trace.model,
        layers=trace.layers,
        experts=trace.experts,
        top_k=trace.top_k,
        expert_bytes=round(float(trace.expert_bytes.mean())),
        embedding_width=0,
        source="imported",
        gate_content="chosen",
        unchosen_mass=unchosen_mass(trace.weight),
        prefill="recorded",
        notes=notes or f"chosen experts of {trace.path.name}",
    )
    write_routing(out_parquet, meta, _requests(trace, meta))
    return meta


def _requests(trace: RouteTrace, meta: RoutingMeta) -> Iterator[RequestRouting]:
    for turn in np.unique(trace.turn).tolist():
        cells = np.flatnonzero(trace.turn == turn)
        prompt, cell_of = _tokens(trace, turn, cells)
        yield routing_of_tokens(trace.expert[cell_of], trace.weight[cell_of], prompt, meta)


def _tokens(trace: RouteTrace, turn: int, cells: npt.NDArray[np.intp]) -> tuple[int, npt.NDArray[np.intp]]:
    """Prompt tokens of a turn, and the cell of each of its tokens and layers [n, L]."""

    def bad(place: str, problem: str) -> TraceError:
        return TraceError(
            trace.path, problem, place=f"turn {turn}{place}", remedy="Record the whole turn again."
        )

    steps, layers = np.unique(trace.step[cells]), trace.layers
    prompt = int(np.count_nonzero(np.isin(steps, trace.step[cells[trace.phase[cells] == PREFILL]])))
    token = np.searchsorted(steps, trace.step[cells])
    if steps[-1] - steps[0] != len(steps) - 1:
        gap = int(steps[np.argmax(np.diff(steps) > 1)]) + 1
        raise bad(f", step {gap}", f"no rows; steps go from {steps[0]} to {steps[-1]}.")
    late = (trace.phase[cells] == PREFILL) != (token < prompt)
    if prompt == 0 or late.any():
        raise bad("", "the steps are not a prompt (phase 0) followed by decode steps (phase 1).")
    at = token * layers + trace.layer[cells]
    times = np.bincount(at, minlength=len(steps) * layers).reshape(-1, layers)
    flat = np.full(len(steps) * layers, -1)
    flat[at] = cells
    cell_of = flat.reshape(-1, layers)
    if not times[: prompt - 1, -1].any() and times[prompt - 1, -1]:  # the last token's stands for the prompt
        cell_of[: prompt - 1, -1] = cell_of[prompt - 1, -1]
        times[: prompt - 1, -1] = 1
    if (times != 1).any():
        row, layer = (int(x) for x in np.argwhere(times != 1)[0])
        rows = times[row, layer] * trace.top_k
        place = f", step {steps[row]}, layer {trace.layer_numbers[layer]}"
        raise bad(place, f"{rows} rows, not {trace.top_k}.")
    return prompt, cell_of

"""decisions.parquet: the policy core's events and commands in one total order, with its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import TraceError

#: by the numbers of csrc/types.hpp: RecordKind
KINDS = (
    "seed_store",
    "begin_iteration",
    "gate",
    "speculation",
    "search_done",
    "loaded",
    "paused",
    "load_failed",
    "computed",
    "end_iteration",
    "foresight",
    "Search",
    "WaitSearch",
    "PreemptPrefetch",
    "Wait",
    "Load",
    "Abort",
)
FIRST_COMMAND = KINDS.index("Search")
_LOAD_KINDS = ("demand", "prefetch")
_SEARCH_KINDS = ("semantic", "trajectory", "update")
_CORE_KEY = b"finemoe.core"
#: whole-number columns; −1 where one does not apply
NUMBERS = ("layer", "target", "expert", "device", "slot", "evicts", "ticket", "offset", "bytes", "work")
#: list columns
LISTS = {
    "experts": pa.int32(),
    "token_counts": pa.int32(),
    "requests": pa.int64(),
    "tokens": pa.int32(),
    "phases": pa.uint8(),
    "values": pa.float16(),
}


def decision_table(log: Mapping[str, Any], options: Mapping[str, int | float | str | bool]) -> pa.Table:
    """The core's log (`Core.take_log`) as a table; the core's options go into its metadata.

    One row per event or command. `sub_kind` is demand or prefetch of a Load, semantic, trajectory or
    update of a Search. `values` holds f16 gate rows, embeddings or stored maps. −1 and empty lists: not
    applicable.
    """
    kind, detail = log["kind"], log["detail"]
    sub_kind = np.full(len(kind), -1, np.int8)
    load, search = kind == KINDS.index("Load"), kind == KINDS.index("Search")
    sub_kind[load] = detail[load]
    sub_kind[search] = detail[search] + len(_LOAD_KINDS)
    columns: dict[str, pa.Array] = {
        "sequence": pa.array(np.arange(len(kind))),
        "time_s": pa.array(log["time_s"]),
        "iteration": pa.array(log["iteration"]),
        "kind": pa.DictionaryArray.from_arrays(pa.array(kind.astype(np.int8)), pa.array(KINDS)),
        "sub_kind": pa.DictionaryArray.from_arrays(
            pa.array(sub_kind, mask=sub_kind < 0), pa.array(_LOAD_KINDS + _SEARCH_KINDS)
        ),
        "blocking": pa.array(log["blocking"]),
    }
    for name in NUMBERS:
        columns[name] = pa.array(log[name])
    for name, kind_of in LISTS.items():
        values, ends = log[name]
        array = pa.array(values.view(np.float16) if name == "values" else values, type=kind_of)
        columns[name] = pa.LargeListArray.from_arrays(_offsets(ends), array)
    text, ends = log["reason"]
    columns["reason"] = pa.LargeStringArray.from_buffers(
        len(ends), pa.py_buffer(_offsets(ends).to_numpy()), pa.py_buffer(text)
    )
    metadata = {_CORE_KEY: json.dumps(options, sort_keys=True).encode()}
    return pa.table(columns).replace_schema_metadata(metadata)


def _offsets(ends: Any) -> pa.Array:
    return pa.array(np.concatenate([np.zeros(1, np.int64), np.asarray(ends, np.int64)]))


def read_decisions(path: Path) -> tuple[pa.Table, dict[str, int | float | str | bool]]:
    """A decision log and the options of the core that wrote it; TraceError for anything else."""
    remedy = "Give the results directory of a finemoe run, or its decisions.parquet."
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise TraceError(
            path, "there is no decision log (--decisions none writes none).", remedy=remedy
        ) from None
    except (OSError, pa.ArrowInvalid) as error:
        raise TraceError(path, f"not a readable Parquet file ({error}).", remedy=remedy) from None
    metadata = table.schema.metadata or {}
    if _CORE_KEY not in metadata:
        raise TraceError(path, "a Parquet file, but no decision log.", remedy=remedy)
    return table, json.loads(metadata[_CORE_KEY])

"""`finemoe replay` finds altered rows, columns and options of a decision log, and refuses what is no log."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finemoe.errors import TraceError
from finemoe.serving.decisions import FIRST_COMMAND, KINDS, LISTS, NUMBERS, SCHEMA
from finemoe.serving.replay import ReplayReport, replay
from finemoe.traces.requests import Request
from world_case import MadeRouting, cell, decisions_of, serve, small_machine, small_model

SYSTEMS = ("finemoe", "lru", "oracle")
CORE, WRITTEN = b"finemoe.core", b"finemoe.written"


@cache
def log_of(system: str) -> pa.Table:
    """Three requests on two devices, with embeddings, prefetches and evictions where the system has them."""
    model = small_model(3, 6, 2)
    requests = tuple(Request(n, 0.0005 * n, 5 + n, 4) for n in range(3))
    inputs = cell(
        system,
        model,
        small_machine(2),
        MadeRouting(model, embedding_width=3, seed=1),
        requests,
        slots=8,
        training=tuple(Request(n, 0.0, 4, 3) for n in range(2)) if system == "finemoe" else (),
        settings={"max_num_seqs": 2},
    )
    return decisions_of(serve(inputs))


def replayed(table: pa.Table, folder: Path) -> ReplayReport:
    pq.write_table(table, folder / "decisions.parquet")
    return replay(folder)


def refused(table: pa.Table, folder: Path) -> str:
    """The refusal's text, without the path."""
    with pytest.raises(TraceError) as caught:
        replayed(table, folder)
    text = str(caught.value)
    assert text.startswith(f"{folder / 'decisions.parquet'}: ")
    assert "\n" not in text
    return text.partition("decisions.parquet: ")[2]


def with_column(table: pa.Table, name: str, values: Any, kind: pa.DataType | None = None) -> pa.Table:
    """The table with another column of that name; of the same type unless one is given."""
    place = table.schema.get_field_index(name)
    wanted = kind or table.schema.field(name).type
    if pa.types.is_dictionary(wanted):
        array = pa.array(values, pa.string()).dictionary_encode().cast(wanted)
    else:
        array = pa.array(values, wanted)
    return table.set_column(place, pa.field(name, wanted), array)


def with_value(table: pa.Table, name: str, row: int, alter: Callable[[Any], Any]) -> pa.Table:
    values = table[name].to_pylist()
    values[row] = alter(values[row])
    return with_column(table, name, values)


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def with_metadata(table: pa.Table, key: bytes, value: bytes | None) -> pa.Table:
    kept = {k: v for k, v in table.schema.metadata.items() if k != key}
    return table.replace_schema_metadata(kept if value is None else {**kept, key: value})


def with_options(table: pa.Table, **changes: Any) -> pa.Table:
    """Changed options of the core; None removes one."""
    options = json.loads(table.schema.metadata[CORE]) | changes
    kept = {key: value for key, value in options.items() if value is not None}
    return with_metadata(table, CORE, json.dumps(kept, sort_keys=True).encode())


def first_row(table: pa.Table, kind: str) -> int:
    return int(table["kind"].to_pylist().index(kind))


def kinds_in(table: pa.Table) -> list[str]:
    return sorted(set(table["kind"].to_pylist()))


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_untouched_log_is_identical(system: str, tmp_path: Path) -> None:
    table = log_of(system)
    assert table.schema.equals(SCHEMA)
    report = replayed(table, tmp_path)
    assert report.identical
    assert (report.divergence, report.alterations) == (None, ())
    assert report.events + report.commands == table.num_rows
    assert report.iterations == table["kind"].to_pylist().count("begin_iteration") > 5


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_layout_of_the_file_does_not_matter(system: str, tmp_path: Path) -> None:
    """Row groups, other dictionaries and another order of columns hold the same log."""
    table = log_of(system)
    parts = [table.slice(0, 7), table.slice(7)]
    kinds = [
        part["kind"].cast(pa.string()).dictionary_encode().cast(SCHEMA.field("kind").type) for part in parts
    ]
    made = [part.set_column(3, SCHEMA.field("kind"), kind) for part, kind in zip(parts, kinds, strict=True)]
    whole = pa.concat_tables(made).select(SCHEMA.names[::-1])
    pq.write_table(whole, tmp_path / "decisions.parquet", row_group_size=11)
    assert replay(tmp_path).identical


def test_the_folder_name_is_no_column(tmp_path: Path) -> None:
    folder = tmp_path / "seed=3"
    folder.mkdir()
    assert replayed(log_of("lru"), folder).identical


@pytest.mark.parametrize("system", SYSTEMS)
def test_missing_and_added_rows(system: str, tmp_path: Path) -> None:
    table = log_of(system)
    n = table.num_rows
    empty = replayed(table.slice(0, 0), tmp_path)
    assert not empty.identical
    assert empty.alterations == (f"{n:,} of {n:,} rows are missing at the end",)
    assert empty.events == empty.commands == empty.iterations == 0

    place = first_row(table.slice(n // 2), "begin_iteration") + n // 2
    cut = replayed(table.slice(0, place), tmp_path)  # whole iterations: the core finds nothing
    assert cut.divergence is None
    assert cut.alterations == (f"{n - place:,} of {n:,} rows are missing at the end",)

    longer = replayed(pa.concat_tables([table, table.slice(n - 1)]), tmp_path)
    assert longer.divergence is not None
    assert longer.divergence.sequence == n
    assert longer.divergence.replayed.startswith("nothing" if system == "finemoe" else "rejected: ")
    assert longer.alterations == (
        f"row {n} has the sequence {n - 1}",
        f"1 rows follow the {n:,} that were written",
    )

    for kind in kinds_in(table):
        row = first_row(table, kind)
        without = replayed(pa.concat_tables([table.slice(0, row), table.slice(row + 1)]), tmp_path)
        places = {f"row {row} has the sequence {row + 1}", f"1 of {n:,} rows are missing"}
        assert places <= set(without.alterations) or row == n - 1


@pytest.mark.parametrize("system", SYSTEMS)
def test_swapped_rows(system: str, tmp_path: Path) -> None:
    """Also with `sequence` put right again."""
    table = log_of(system)
    row = first_row(table, "computed")
    order = np.arange(table.num_rows)
    order[[row, row + 1]] = order[[row + 1, row]]
    swapped = table.take(pa.array(order))
    assert f"row {row} has the sequence {row + 1}" in replayed(swapped, tmp_path).alterations
    renumbered = with_column(swapped, "sequence", range(table.num_rows))
    assert "column kind was altered" in replayed(renumbered, tmp_path).alterations


def other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, list):
        return [*value[:-1], other(value[-1])] if value else [1]
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2 if value else 0.25
    return value + "x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("name", [n for n in SCHEMA.names if n not in ("kind", "sub_kind")])
@pytest.mark.parametrize("system", SYSTEMS)
def test_one_altered_value_per_kind(system: str, name: str, tmp_path: Path) -> None:
    """The column is named; a command is found at its row, what decides there or at the first that follows."""
    table = log_of(system)
    for kind in kinds_in(table):
        row = first_row(table, kind)
        report = replayed(with_value(table, name, row, other), tmp_path)
        assert f"column {name} was altered" in report.alterations, kind
        assert len(report.alterations) == 1 + (name == "sequence")
        if report.divergence is not None:
            assert report.divergence.sequence >= row
        if name != "sequence" and KINDS.index(kind) >= FIRST_COMMAND:
            assert report.divergence is not None
            assert report.divergence.sequence == row, kind


@pytest.mark.parametrize("system", SYSTEMS)
def test_altered_kinds(system: str, tmp_path: Path) -> None:
    table = log_of(system)
    for kind in kinds_in(table):
        row = first_row(table, kind)
        for into in ("gate", "loaded", "end_iteration", "Wait"):
            if into != kind:
                report = replayed(with_value(table, "kind", row, always(into)), tmp_path)
                assert report.divergence is not None
                assert report.divergence.sequence <= row + 1
                assert report.alterations == ("column kind was altered",)
    row = table["sub_kind"].to_pylist().index("demand")
    for new in ("prefetch", "semantic", "no such", None):
        report = replayed(with_value(table, "sub_kind", row, always(new)), tmp_path)
        assert report.divergence is not None
        assert report.divergence.sequence == row


CANNOT_DECIDE = [("gate", "token_counts"), *(("begin_iteration", n) for n in ("requests", "tokens"))]


@pytest.mark.parametrize("system", ["lru", "oracle"])
@pytest.mark.parametrize(("kind", "name"), [*CANNOT_DECIDE, ("begin_iteration", "values")])
def test_what_decides_nothing_is_found_by_its_digest(
    system: str, kind: str, name: str, tmp_path: Path
) -> None:
    table = log_of(system)
    report = replayed(with_value(table, name, first_row(table, kind), other), tmp_path)
    assert report.divergence is None
    assert report.alterations == (f"column {name} was altered",)
    assert not report.identical


EXTREME: dict[str, list[Any]] = {
    **{
        name: [-(2**31), 2**31 - 1] + ([2**62, -(2**63)] if kind == pa.int64() else [])
        for name, kind in NUMBERS.items()
    },
    **{name: [[], [-1], [2**31 - 1] * 2] for name in LISTS},
    "phases": [[], [255], [2] * 3],
    "values": [[], [math.nan] * 18, [math.inf] * 6, [-1.0] * 12, [1.0] * 5],
    "requests": [[], [2**62], [-(2**63)] * 3],
    "time_s": [math.nan, math.inf, -1.0],
    "iteration": [-(2**31), 2**31 - 1],
    "reason": ["a reason\nof two lines", "\x00"],
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_extreme_values_do_not_crash(system: str, tmp_path: Path) -> None:
    """Whatever an event holds: rejected at its row, or found by comparison."""
    table = log_of(system)
    for kind in set(kinds_in(table)) & set(KINDS[:FIRST_COMMAND]):
        row = first_row(table, kind)
        for name, values in EXTREME.items():
            before = table[name][row].as_py()
            for value in values:
                if value == before:
                    continue
                report = replayed(with_value(table, name, row, always(value)), tmp_path)
                assert report.alterations == (f"column {name} was altered",)
                if report.divergence is not None:
                    assert report.divergence.sequence >= row


def test_values_that_no_event_can_have_are_rejected_at_their_row(tmp_path: Path) -> None:
    table = log_of("lru")
    row = first_row(table, "begin_iteration")
    report = replayed(with_value(table, "requests", row, lambda ids: [*ids, 1]), tmp_path)
    assert report.divergence is not None
    assert (report.divergence.sequence, report.divergence.iteration) == (row, 0)
    assert report.divergence.replayed == "rejected: 2 requests, 1 tokens and 1 phases"
    row = first_row(table, "gate")
    report = replayed(with_value(table, "values", row, lambda values: [*values, 0.5]), tmp_path)
    assert report.divergence is not None
    assert report.divergence.replayed == "rejected: 7 values are no rows of 6 probabilities"
    report = replayed(with_value(table, "layer", row, always(7)), tmp_path)
    assert report.divergence is not None
    assert report.divergence.sequence == row
    assert report.divergence.replayed.startswith("rejected: ")


@pytest.mark.parametrize("system", SYSTEMS)
def test_altered_options(system: str, tmp_path: Path) -> None:
    table = log_of(system)
    harmless = replayed(with_options(table, embedding_work=17), tmp_path)
    assert "the core's options were altered" in harmless.alterations
    assert harmless.divergence is None or system == "finemoe"
    fewer = replayed(with_options(table, slots_per_device=3), tmp_path)
    assert fewer.divergence is not None
    assert fewer.alterations == ("the core's options were altered",)
    spaced = table.schema.metadata[CORE].replace(b", ", b",")
    assert replayed(with_metadata(table, CORE, spaced), tmp_path).alterations == fewer.alterations


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layers": None}, "the option layers is missing"),
        ({"speed": 1}, "speed is no option of the core"),
        ({"layers": 0}, "layers and experts must be at least 1"),
        ({"layers": "3"}, "layers is '3', which is not of type int"),
        ({"layers": True}, "layers is True, which is not of type int"),
        ({"layers": 1.5}, "layers is 1.5, which is not of type int"),
        ({"layers": 2**40}, "layers is 1099511627776, beyond 32 bits"),
        ({"expert_bytes": 2**63}, "expert_bytes is 9223372036854775808, beyond 64 bits"),
        ({"layers": 4096, "experts": 65536}, "more than 4096 layers, 65536 experts or 2^24 experts in all"),
        ({"store_capacity": 2**31 - 1}, "store_capacity must lie between 1 and 1,000,000"),
        ({"semantic": 1}, "semantic is 1, which is not of type bool"),
        ({"frequency_decay": math.nan}, "frequency_decay must lie in"),
        ({"eviction": "fifo"}, "eviction: unknown value fifo"),
        ({"eviction": [1]}, "eviction is [1], which is not of type str"),
    ],
)
def test_options_of_no_core(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    text = refused(with_options(log_of("finemoe"), **changes), tmp_path)
    assert text.startswith("metadata finemoe.core: ")
    assert problem in text


@pytest.mark.parametrize("key", [CORE, WRITTEN])
@pytest.mark.parametrize("value", [b"", b"{", b"\xff\xfe", b"[1]", b"[" * 100_000, b"1" * 5000])
def test_metadata_that_is_no_json_object(key: bytes, value: bytes, tmp_path: Path) -> None:
    text = refused(with_metadata(log_of("lru"), key, value), tmp_path)
    assert text.startswith(f"metadata {key.decode()}: not ")
    assert len(text) < 300


@pytest.mark.parametrize(
    "value", [b"{}", b'{"rows": 1}', b'{"rows": true, "columns": {}}', b'{"columns": 1}']
)
def test_metadata_without_digests(value: bytes, tmp_path: Path) -> None:
    assert refused(with_metadata(log_of("lru"), WRITTEN, value), tmp_path).startswith(
        "metadata finemoe.written: it must hold the number of rows and a digest of every column."
    )


def test_missing_metadata(tmp_path: Path) -> None:
    table = log_of("lru")
    assert "no decision log" in refused(with_metadata(table, CORE, None), tmp_path)
    assert "does not say how many rows" in refused(with_metadata(table, WRITTEN, None), tmp_path)


def test_columns_of_no_log(tmp_path: Path) -> None:
    table = log_of("lru")
    for name in SCHEMA.names:
        assert refused(table.drop_columns([name]), tmp_path).startswith(
            f"column {name}: the column is missing"
        )
        text = refused(with_column(table, name, [b"x"] * table.num_rows, pa.binary()), tmp_path)
        assert text.startswith(f"column {name}: its type is binary, that of a decision log is ")
    wide = with_column(table, "layer", [2**40] * table.num_rows, pa.int64())
    assert "its type is int64, that of a decision log is int32" in refused(wide, tmp_path)
    more = table.append_column("speed", table["layer"])
    assert refused(more, tmp_path).startswith("column speed: no column of a decision log")
    twice = table.append_column("layer", table["layer"])
    assert refused(twice, tmp_path).startswith("column layer: the column is there twice")


def test_nulls_and_unknown_kinds(tmp_path: Path) -> None:
    table = log_of("finemoe")
    for name in SCHEMA.names:
        if name != "sub_kind":
            text = refused(with_value(table, name, 5, always(None)), tmp_path)
            assert text.startswith(f"row 5, column {name}: there is no value.")
        if name in LISTS:
            text = refused(with_value(table, name, 5, always([1, None])), tmp_path)
            assert text.startswith(f"row 5, column {name}: there is no value.")
    text = refused(with_value(table, "kind", 4, always("Nap")), tmp_path)
    assert text.startswith("row 4, column kind: 'Nap' is no kind of event or command.")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    table = log_of("lru")
    raw = pa.array([b"\xff"] * table.num_rows, pa.large_binary())
    made = table.set_column(
        table.schema.get_field_index("reason"),
        SCHEMA.field("reason"),
        pa.LargeStringArray.from_buffers(table.num_rows, *raw.buffers()[1:]),
    )
    assert refused(made, tmp_path).startswith("not a readable Parquet file")


def test_files_that_are_no_log(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a log")
    cut = tmp_path / "cut.parquet"
    pq.write_table(log_of("lru"), cut)
    cut.write_bytes(cut.read_bytes()[:-100])
    (tmp_path / "strange" / "decisions.parquet").mkdir(parents=True)
    for path, problem in (
        (Path("/dev/null"), "neither a results directory nor a file"),
        (tmp_path / "strange", "neither a results directory nor a file"),
        (text, "not a readable Parquet file"),
        (cut, "not a readable Parquet file"),
        (tmp_path / "absent", "there is no decision log"),
        (tmp_path, "there is no decision log"),
    ):
        with pytest.raises(TraceError, match=problem):
            replay(path)


def finemoe_replay(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from finemoe.cli.main import main; main()", "replay", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_line_says_it(tmp_path: Path) -> None:
    """Exit code 1 and the altered column, 2 and one line where the file is no log."""
    table = log_of("lru")
    log = tmp_path / "decisions.parquet"
    row = first_row(table, "gate")
    pq.write_table(with_value(table, "token_counts", row, other), log)
    done = finemoe_replay(tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        "DIFFERS: the log is not the one that was written: column token_counts was altered (" in done.stdout
    )
    row = first_row(table, "Load")
    pq.write_table(with_value(table, "slot", row, other), log)
    done = finemoe_replay(tmp_path)
    assert done.returncode == 1
    assert f"DIFFERS at #{row} in iteration 0" in done.stdout
    assert "altered   the log is not the one that was written: column slot was altered" in done.stdout
    pq.write_table(table.drop_columns(["slot"]), log)
    done = finemoe_replay(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"finemoe: error: {log}: column slot: the column is missing.")

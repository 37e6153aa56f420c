"""The Parquet format of routing traces: round trips, continuation, and files that must be refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finemoe.errors import TraceError
from finemoe.traces.routing import RequestRouting, RoutingMeta
from finemoe.traces.routing_file import RoutingFile, write_routing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from routing_samples import assert_same, random_request, small_meta


def some_requests(
    meta: RoutingMeta, count: int = 3, prompt: int = 5, decode: int = 4
) -> list[RequestRouting]:
    rng = np.random.default_rng(1)
    return [random_request(rng, meta, [prompt + i] + [1] * decode) for i in range(count)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    meta = small_meta()
    write_routing(tmp_path / "t.parquet", meta, some_requests(meta))
    return tmp_path / "t.parquet"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_written_is_read_back(tmp_path: Path, data: st.DataObject) -> None:
    layers, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    distances = data.draw(st.sets(st.integers(1, layers - 1))) if layers > 1 else set()
    meta = small_meta(
        layers=layers,
        experts=experts,
        top_k=data.draw(st.integers(1, experts)),
        embedding_width=data.draw(st.integers(0, 3)),
        speculation=tuple(sorted(distances)),
        prefill=data.draw(st.sampled_from(["recorded", "derived"])),
        notes=data.draw(st.text(max_size=10)),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    lengths = st.lists(st.integers(0, 4), min_size=1, max_size=4)
    requests = [
        random_request(rng, meta, [int(rng.integers(1, 9))] + [1] * n, embedding=bool(rng.integers(2)))
        for n in data.draw(lengths)
    ]
    path = tmp_path / "t.parquet"
    assert write_routing(path, meta, iter(requests)) == len(requests)
    file = RoutingFile(path)
    assert file.meta == meta
    assert file.requests == len(requests)
    for index in reversed(range(len(requests))):
        expected = requests[index]
        assert_same(file.recorded(index, meta.speculation), expected)
        prompt = int(expected.tokens(meta.top_k)[0])
        assert_same(file.routing_for(index, prompt, expected.iterations, meta.speculation), expected)
    assert (file.continued_requests, file.rescaled_prefills) == (0, 0)


def test_a_longer_recording_is_cut_and_a_shorter_one_cycles_its_decode(trace: Path) -> None:
    file = RoutingFile(trace)
    recorded = file.recorded(1)
    cut = file.routing_for(4, 6, 3)  # request 4 uses recording 4 mod 3
    assert np.array_equal(cut.gate, recorded.gate[:3])
    assert file.continued_requests == 0
    longer = file.routing_for(1, 6, 11)
    order = [0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert np.array_equal(longer.gate, recorded.gate[order])
    assert np.array_equal(longer.embedding, recorded.embedding[order])  # type: ignore[arg-type, index]
    for iteration, source in enumerate(order):
        for layer in range(2):
            experts, counts = longer.required(iteration, layer)
            known, before = recorded.required(source, layer)
            assert experts.tolist() == known.tolist()
            assert counts.tolist() == before.tolist()
    assert (file.continued_requests, file.continued_iterations) == (1, 6)
    file.routing_for(1, 6, 11)  # asked again: still one request, stated once
    assert (file.continued_requests, file.continued_iterations) == (1, 6)


@pytest.mark.parametrize("prompt", [1, 2, 5, 7, 1000, 14_050])
def test_the_prefill_is_scaled_to_the_prompt(trace: Path, prompt: int) -> None:
    file = RoutingFile(trace)
    recorded, scaled = file.recorded(0), file.routing_for(0, prompt, 2)
    assert scaled.tokens(2).tolist() == [prompt, 1]
    for layer in range(2):
        experts, counts = scaled.required(0, layer)
        known, before = recorded.required(0, layer)
        assert set(experts) <= set(known)
        assert counts.sum() == prompt * 2
        assert counts.min() >= 1
        assert counts.max() <= prompt
        exact = dict(zip(known.tolist(), (before * prompt / 5).tolist(), strict=True))
        assert all(
            abs(count - exact[expert]) < 1 for expert, count in zip(experts.tolist(), counts, strict=True)
        )
    assert file.rescaled_prefills == (0 if prompt == 5 else 1)


def test_without_a_prefill_the_first_decode_iteration_stands_in(tmp_path: Path) -> None:
    meta = small_meta(prefill="none")
    rng = np.random.default_rng(0)
    write_routing(tmp_path / "t.parquet", meta, [random_request(rng, meta, [1, 1, 1])])
    file = RoutingFile(tmp_path / "t.parquet")
    routing = file.routing_for(0, 7, 5)
    assert routing.tokens(2).tolist() == [7, 1, 1, 1, 1]
    assert np.array_equal(routing.gate, file.recorded(0).gate[[0, 1, 2, 0, 1]])


def test_nothing_to_continue_with_and_unknown_distances_are_said(tmp_path: Path) -> None:
    meta = small_meta(speculation=(1,))
    write_routing(tmp_path / "t.parquet", meta, [random_request(np.random.default_rng(0), meta, [4])])
    file = RoutingFile(tmp_path / "t.parquet")
    assert file.routing_for(0, 4, 1, (1,)).iterations == 1
    with pytest.raises(TraceError, match="request 0: no decode iteration to continue with, 2 are asked"):
        file.routing_for(0, 4, 3)
    with pytest.raises(TraceError, match=r"no speculation rows at distance 2; it has \[1\]"):
        file.routing_for(0, 4, 1, (2,))


def test_reading_one_request_leaves_the_others_alone(tmp_path: Path) -> None:
    meta = small_meta(layers=8, experts=64)
    requests = some_requests(meta, decode=40)
    path = tmp_path / "t.parquet"
    write_routing(path, meta, requests)
    chunks = pq.ParquetFile(path).metadata.row_group(2)
    gate = next(
        chunks.column(c)
        for c in range(chunks.num_columns)
        if chunks.column(c).path_in_schema.startswith("gate")
    )
    spoiled = bytearray(path.read_bytes())
    middle = gate.data_page_offset + gate.total_compressed_size // 2
    spoiled[middle : middle + 64] = bytes(64)
    path.write_bytes(spoiled)
    file = RoutingFile(path)
    assert_same(file.recorded(0), requests[0])
    assert_same(file.recorded(1), requests[1])
    with pytest.raises(TraceError, match="request 2"):
        file.recorded(2)


def test_row_groups_need_not_be_requests(trace: Path) -> None:
    before = [RoutingFile(trace).recorded(i) for i in range(3)]
    table = pq.read_table(trace)
    for size in (1, 4, 100):
        pq.write_table(table, trace, row_group_size=size)
        for index, routing in enumerate(before):
            assert_same(RoutingFile(trace).recorded(index), routing)


def test_a_failed_write_leaves_the_old_file(trace: Path) -> None:
    old, meta = trace.read_bytes(), small_meta()

    def stopped() -> Iterator[RequestRouting]:
        yield from some_requests(meta)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_routing(trace, meta, stopped())
    with pytest.raises(TraceError, match="no requests"):
        write_routing(trace, meta, [])
    assert trace.read_bytes() == old
    assert [p.name for p in trace.parent.iterdir()] == [trace.name]


def broken(routing: RequestRouting, field: str, at: Any, value: Any) -> RequestRouting:
    array = getattr(routing, field).copy()
    array[at] = value
    return dataclasses.replace(routing, **{field: array})


@pytest.mark.parametrize(
    ("field", "at", "value", "message"),
    [
        ("gate", (1, 0, 2), np.nan, "gate, iteration 1, layer 0, expert 2: nan is not in"),
        ("gate", (1, 0, 2), -0.5, "gate, iteration 1, layer 0, expert 2: -0.5 is not in"),
        ("gate", (2, 1, 3), 1.5, "gate, iteration 2, layer 1, expert 3: 1.5 is not in"),
        ("gate", (2, 1), 0.5, "gate, iteration 2, layer 1: probabilities sum to 2.0000"),
        ("embedding", (2, 0), np.inf, "embedding, iteration 2: not finite"),
        ("experts", -1, 4, r"experts, iteration 4, layer 1: expert 4, the layer has 0 … 3"),
        ("experts", slice(-2, None), [3, 1], "experts, iteration 4, layer 1: 3 before 1, must ascend"),
        ("experts", slice(-2, None), [1, 1], "experts, iteration 4, layer 1: 1 before 1, must ascend"),
        ("token_counts", -1, 2, "token_counts, iteration 4, layer 1: sum to 3, not to tokens × 2"),
        ("token_counts", slice(-2, None), [0, 2], "token_counts, iteration 4, layer 1: 0 tokens for one"),
        ("offsets", -1, 3, "offsets: do not divide"),
    ],
)
def test_requests_that_break_a_rule_are_not_written(
    tmp_path: Path, field: str, at: Any, value: Any, message: str
) -> None:
    meta = small_meta()
    good = some_requests(meta)
    with pytest.raises(TraceError, match=f"request 1, {message}"):
        write_routing(tmp_path / "t.parquet", meta, [good[0], broken(good[1], field, at, value)])
    assert list(tmp_path.iterdir()) == []


def altered(table: pa.Table, column: str, row: int, value: Any) -> pa.Table:
    values = table[column].to_pylist()
    values[row] = value
    place = table.schema.get_field_index(column)
    field = table.schema.field(column).with_nullable(True)
    return table.set_column(place, field, pa.array(values, field.type))


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("gate", 6, [0.5] * 8, "request 1, gate, iteration 1, layer 0: probabilities sum to 2"),
        ("gate", 6, None, "request 1, gate: empty value"),
        ("gate", 6, [None] + [0.25] * 7, "request 1, gate: empty value"),
        ("embedding", 6, None, "request 1, embedding: empty value"),
        ("experts", 6, [0, 1], "request 1, iteration 1, experts: 2 values, experts_per_layer sums to 4"),
        ("token_counts", 6, [1, 1, 1, 3], "request 1, token_counts, iteration 1, layer 1: sum to 4"),
        (
            "experts_per_layer",
            6,
            [1, 3],
            "request 1, experts, iteration 1, layer 0: 1 experts, a token activates 2",
        ),
        ("tokens", 6, 3, "request 1, iteration 1, tokens: 3 tokens, the token counts say 1"),
    ],
)
def test_requests_that_break_a_rule_are_not_read(
    trace: Path, column: str, row: int, value: Any, message: str
) -> None:
    pq.write_table(altered(pq.read_table(trace), column, row, value), trace)
    file = RoutingFile(trace)
    file.recorded(0)
    with pytest.raises(TraceError, match=message):
        file.recorded(1)


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("request", 5, 7, "row 5: request 7, iteration 0, phase prefill; expected request 1"),
        ("iteration", 6, 3, "row 6: request 1, iteration 3, phase decode; expected request 1, iteration 1"),
        ("phase", 6, "prefill", "row 6: .* phase prefill; expected .* phase decode"),
        ("phase", 6, "thinking", "row 6: .* phase thinking; expected .* phase decode"),
        ("phase", 6, None, "empty values in request, iteration or phase"),
    ],
)
def test_files_in_disorder_are_refused_when_opened(
    trace: Path, column: str, row: int, value: Any, message: str
) -> None:
    pq.write_table(altered(pq.read_table(trace), column, row, value), trace)
    with pytest.raises(TraceError, match=message):
        RoutingFile(trace)


def test_other_files_are_refused_with_what_they_lack(trace: Path) -> None:
    table, path = pq.read_table(trace), trace
    pq.write_table(table.replace_schema_metadata({}), path)
    with pytest.raises(TraceError, match=r"this is not a routing trace .*found: request, iteration"):
        RoutingFile(path)
    pq.write_table(table.drop_columns(["gate"]), path)
    with pytest.raises(TraceError, match="column gate: missing"):
        RoutingFile(path)
    wide = table.set_column(3, "tokens", table["tokens"].cast(pa.int64()))
    pq.write_table(wide, path)
    with pytest.raises(TraceError, match="column tokens: type int64, expected int32"):
        RoutingFile(path)
    pq.write_table(table.slice(0, 0), path)
    with pytest.raises(TraceError, match="no rows"):
        RoutingFile(path)
    for header, message in ((b'{"version": 2}', "schema metadata"), (b"\xff", "schema metadata")):
        pq.write_table(table.replace_schema_metadata({b"finemoe.routing": header}), path)
        with pytest.raises(TraceError, match=message):
            RoutingFile(path)
    newer = table.schema.metadata[b"finemoe.routing"].replace(b'"version":1', b'"version":9')
    pq.write_table(table.replace_schema_metadata({b"finemoe.routing": newer}), path)
    with pytest.raises(TraceError, match="format version 9, this program reads 1"):
        RoutingFile(path)


def test_truncated_garbage_and_missing_files_are_refused(trace: Path) -> None:
    whole = trace.read_bytes()
    for content in (whole[:-20], whole[: len(whole) // 2], b"", b"PAR1", np.random.default_rng(0).bytes(500)):
        trace.write_bytes(content)
        with pytest.raises(TraceError, match="cannot be read as Parquet"):
            RoutingFile(trace)
    trace.unlink()
    with pytest.raises(TraceError, match="no such file"):
        RoutingFile(trace)


def test_a_damaged_name_of_a_column_is_refused(trace: Path) -> None:
    """In the footer only: the data is not read with columns that have no name."""
    whole = trace.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for name in (b"request", b"gate", b"experts_per_layer"):
        trace.write_bytes(whole[:footer] + whole[footer:].replace(name, b"\xf3" + name[1:]))
        with pytest.raises(TraceError, match=r"t\.parquet: cannot be read as Parquet.*Copy or record"):
            RoutingFile(trace)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 5},
        {"layers": 0},
        {"expert_bytes": 0},
        {"embedding_width": -1},
        {"speculation": (2,)},
        {"gate_content": "chosen"},
        {"unchosen_mass": "even"},
    ],
)
def test_a_meta_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=next(iter(changes)) if "gate_content" not in changes else "unchosen"
    ):
        small_meta(**changes)

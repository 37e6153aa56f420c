"""Splitwise and BurstGPT: what is special in them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finemoe.errors import TraceError
from finemoe.traces.request_info import convert_requests, trace_info
from finemoe.traces.requests import Request, open_requests, select_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from request_writers import COLUMNS, Look, Rows, write_parquet, write_text

SPLITWISE = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        list(open_requests(path).batches(rows=2))
    return str(caught.value).removeprefix(f"{path}: ")


def test_splitwise_as_its_generator_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "rr_conv_80.csv"
    path.write_text(
        SPLITWISE + "0,2,0,0.0123456789012345678,1,374,44\n1,2,0,1.5,1,396,109\n2,2,0,4,1,2048,16\n"
    )
    trace = open_requests(path)
    assert (trace.format, trace.has_arrivals, trace.lengths_estimated) == ("splitwise", True, False)
    first = 12_345_679 / 1e9  # to the nanosecond
    assert [batch.ticks.tolist() for batch in trace.batches()] == [[12_345_679, 1_500_000_000, 4_000_000_000]]
    assert list(select_requests(trace, num_requests=None)) == [
        Request(0, 0.0, 374, 44),
        Request(1, pytest.approx(1.5 - first, abs=1e-12), 396, 109),  # type: ignore[arg-type]
        Request(2, pytest.approx(4 - first, abs=1e-12), 2048, 16),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    ("row", "start"),
    [
        (
            "1,2,0,1,4,5,6",
            "row 2, column batch_size: a batch, where a row is one request ('4'). Write one row",
        ),
        (
            "1,1,0,1,1,5,6",
            "row 2, column request_type: not a request of an LLM, whose type is 2 ('1'). Remove",
        ),
        ("1,,0,1,1,5,6", "row 2, column request_type: not a request of an LLM, whose type is 2 (empty)."),
        ("1,dnn,0,1,1,5,6", "row 2, column request_type: not a request of an LLM, whose type is 2 ('dnn')."),
        ("1,2,0,1,1,0,6", "row 2, column prompt_size: zero tokens ('0'). Remove the row"),
        ("1,2,0,-1,1,5,6", "row 2, column arrival_timestamp: the time goes back by 1 s ('-1'). Sort"),
    ],
)
def test_what_splitwise_rows_cannot_be(tmp_path: Path, row: str, start: str) -> None:
    assert refusal(tmp_path, SPLITWISE + "0,2.0,0,0,1,5,6\n" + row + "\n2,2,0,3,1,5,6\n").startswith(start)


def test_splitwise_without_the_columns_that_never_change(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("arrival_timestamp,prompt_size,token_size\n1,2,3\n")
    assert list(select_requests(open_requests(path), num_requests=1)) == [Request(0, 0.0, 2, 3)]


def test_burstgpt_leaves_out_failed_requests(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT_1.csv"
    path.write_text(
        BURST
        + "5,ChatGPT,472,0,472,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"
        + "118,GPT-4,0,0,0,API log\n118.5,GPT-4,417,276,693,API log\n120,GPT-4,0,7,7,API log\n"
    )
    trace = open_requests(path)
    chosen = select_requests(trace, num_requests=None)
    assert list(chosen) == [Request(0, 0.0, 1087, 230), Request(1, 73.5, 417, 276)]
    assert (trace.format, chosen.count, chosen.left_out) == ("burstgpt", 2, 3)
    assert chosen.remarks == ("3 failed requests (without request or response tokens) are left out",)
    assert [select_requests(trace, num_requests=n).left_out for n in (1, 2, 3)] == [1, 2, 3]
    assert select_requests(trace, num_requests=1, start=1).left_out == 2
    info = trace_info(path)
    assert (info.requests, info.left_out, info.span_s) == (2, 3, 73.5)
    assert info.left_out_reason == "failed requests (without request or response tokens)"
    assert trace_info(path, sort=True) == info
    assert convert_requests(path, tmp_path / "copy.parquet") == info
    copy = trace_info(tmp_path / "copy.parquet")
    assert (copy.format, copy.requests, copy.left_out, copy.left_out_reason) == ("burstgpt", 2, 0, "")


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("form", list(COLUMNS))
@settings(deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 9]), st.sampled_from([0, 1, 9])), max_size=30
    ),
    window=st.tuples(st.integers(0, 6), st.none() | st.integers(1, 20)),
)
def test_only_burstgpt_has_rows_without_tokens(
    tmp_path_factory: pytest.TempPathFactory,
    form: str,
    sort: bool,
    rows: Rows,
    window: tuple[int, int | None],
) -> None:
    path = tmp_path_factory.getbasetemp() / "zeros.csv"
    ordered = sorted(rows, key=lambda row: row[0])
    seconds = [(tick * 10**9, prompt, output) for tick, prompt, output in (rows if sort else ordered)]
    write_text(path, form, seconds, Look())
    kept = [row for row in ordered if row[1] and row[2]]
    start, count = window
    chosen = kept[start : None if count is None else start + count]
    if not chosen or (form != "burstgpt" and len(kept) < len(rows)):
        with pytest.raises(TraceError):
            list(select_requests(open_requests(path, sort=sort), num_requests=None, start=start))
        return
    selection = select_requests(open_requests(path, sort=sort), num_requests=count, start=start)
    assert [(r.index, r.prompt_tokens, r.output_tokens) for r in selection] == [
        (start + place, prompt, output) for place, (_, prompt, output) in enumerate(chosen)
    ]
    if sort or count is None or len(kept) < start + count:
        assert selection.left_out == len(rows) - len(kept)
    else:
        places = [place for place, row in enumerate(ordered) if row[1] and row[2]]
        assert selection.left_out == places[start + count - 1] - (start + count - 1)


def test_a_column_without_a_name_is_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(BURST.replace("Model", "") + "5,ChatGPT,472,1,472,x\n")
    assert not open_requests(path).has_prompts
    assert convert_requests(path, tmp_path / "copy.parquet").requests == 1


def test_row_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    rows = "1,a,0,0,0,x\n2,a,5,0,5,x\n3,a,5,5,10,x\n4,a,5,-1,4,x\n"
    start = "row 4, column Response tokens: a negative token count ('-1'). Write a positive"
    assert refusal(tmp_path, BURST + rows).startswith(start)
    assert refusal(tmp_path, BURST + "5,a,0,0,0,x\n4,a,5,5,10,x\n").startswith(
        "row 2, column Timestamp: the time"
    )
    assert refusal(tmp_path, BURST + "5,a,0,0,0,x\n") == (
        "no requests: all 1 rows are left out, as failed requests (without request or response tokens). "
        "Give a trace with at least one request."
    )


@pytest.mark.parametrize("form", ["splitwise", "burstgpt"])
@pytest.mark.parametrize("gzipped", [False, True])
def test_recognised_whatever_the_name(tmp_path: Path, form: str, gzipped: bool) -> None:
    path = tmp_path / "AzureLLMInferenceTrace_conv.csv"
    look = Look(gzipped=gzipped, bom=True, newline="\r\n", reverse_columns=True)
    write_text(path, form, [(0, 1, 2), (1, 3, 4)], look)
    assert (gzip.decompress(path.read_bytes()) if gzipped else path.read_bytes()).startswith(b"\xef\xbb\xbf")
    assert open_requests(path).format == form
    write_parquet(path, form, [(0, 1, 2), (1, 3, 4)], "number", pa.int32())
    assert open_requests(path).format == form


def test_labels_of_a_parquet_file_that_mean_nothing_to_us(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write_parquet(path, "azure", [(0, 1, 2)], "dates", pa.int32())
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({b"finemoe.format": b"\xfftomorrow's"}), path)
    assert open_requests(path).format == "azure"
    without_times = table.drop_columns(["TIMESTAMP"])
    pq.write_table(without_times, path)
    with pytest.raises(TraceError, match="header: missing column TIMESTAMP of the azure format"):
        open_requests(path)
    pq.write_table(without_times.replace_schema_metadata({b"finemoe.arrivals": b"none"}), path)
    assert not open_requests(path).has_arrivals

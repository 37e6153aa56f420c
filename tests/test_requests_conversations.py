"""ShareGPT and LMSYS: every container gives the same requests, with estimated lengths and their prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finemoe.errors import TraceError
from finemoe.traces import request_json
from finemoe.traces.request_info import convert_requests, trace_info
from finemoe.traces.requests import Request, RequestTrace, open_requests, select_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from request_writers import KEYS, Conversation, Look, any_look, invalid_utf8, write_conversations

HUMANS = ["human", "user", "Human"]
ASSISTANTS = ["gpt", "assistant", "chatgpt", "bing", "bard"]

texts = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\{}[],: \n\t'), max_size=40
) | st.just("x" * 5000)
turns = st.tuples(st.sampled_from(["system", "tool", *HUMANS, *ASSISTANTS]), texts | st.none())
conversations = st.lists(st.lists(turns, max_size=4), min_size=1, max_size=12)
looks = any_look()


def expected(written: list[Conversation]) -> list[tuple[int, int, str]]:
    """Prompt tokens, output tokens and prompt, by the rule of docs/request-formats.md."""
    found = []
    for conversation in written:
        first = next(
            (place for place, turn in enumerate(conversation) if turn[0] in HUMANS), len(conversation)
        )
        answers = [text or "" for speaker, text in conversation[first:] if speaker in ASSISTANTS]
        prompt = (conversation[first][1] or "") if answers else ""
        if answers and prompt.strip() and answers[0].strip():
            found.append(((len(prompt) + 3) // 4, (len(answers[0]) + 3) // 4, prompt))
    return found


def read(trace: RequestTrace, rows: int = 8192) -> tuple[list[tuple[int, int, str]], int]:
    """Every request, and how many rows were left out."""
    requests: list[tuple[int, int, str]] = []
    left_out = 0
    for batch in trace.batches(rows, prompts=True):
        assert len(batch) <= rows
        assert batch.prompts is not None
        assert not batch.arrival_s.any()
        columns = (batch.prompt_tokens.tolist(), batch.output_tokens.tolist(), batch.prompts.to_pylist())
        requests += zip(*columns, strict=True)
        left_out += batch.left_out
    return requests, left_out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conversations")


@settings(deadline=None)
@given(
    written=conversations,
    form=st.sampled_from(["sharegpt", "lmsys"]),
    container=st.sampled_from(["json", "jsonl", "parquet"]),
    look=looks,
    rows=st.integers(1, 20),
)
def test_round_trip(
    folder: Path, written: list[Conversation], form: str, container: str, look: Look, rows: int
) -> None:
    path = folder / "trace.csv"  # a misleading name on purpose
    write_conversations(path, form, written, container, look)
    trace = open_requests(path)
    assert (trace.format, trace.layout.container) == (form, container)
    assert (trace.has_arrivals, trace.lengths_estimated, trace.has_prompts) == (False, True, True)
    requests = expected(written)
    if not requests:
        with pytest.raises(
            TraceError, match=f"all {len(written)} rows are left out, as conversations without"
        ):
            read(trace, rows)
        return
    assert read(trace, rows) == (requests, len(written) - len(requests))


@settings(deadline=None)
@given(written=conversations, data=st.data())
def test_arrays_are_cut_right_wherever_a_block_ends(
    folder: Path, written: list[Conversation], data: st.DataObject
) -> None:
    path = folder / "blocks.json"
    write_conversations(path, "sharegpt", written, "json", Look(quoted=data.draw(st.booleans())))
    whole = json.loads(path.read_bytes())
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(request_json, "BLOCK_BYTES", data.draw(st.integers(1, 30)))
        records = list(request_json.json_array(path, file))
    assert [{name: json.loads(bytes(raw)) for name, raw in record.items()} for record in records] == whole


TALK: Conversation = [("human", "12345"), ("gpt", "123456789"), ("human", "more"), ("gpt", "still more")]


@pytest.mark.parametrize("container", ["json", "jsonl", "parquet"])
@pytest.mark.parametrize("form", ["sharegpt", "lmsys"])
def test_a_small_file_by_hand(tmp_path: Path, form: str, container: str) -> None:
    unanswered: list[Conversation] = [[], [("human", "hello")], [("gpt", "continued"), ("human", "hello")]]
    system: Conversation = [("system", "be brief"), ("gpt", "yes?"), ("human", "hello"), ("gpt", "hi")]
    path = tmp_path / "trace"
    write_conversations(path, form, [*unanswered, TALK, system], container, Look())
    trace = open_requests(path)
    chosen = select_requests(trace, num_requests=None, prompts=True)
    assert list(chosen) == [Request(0, 0.0, 2, 3, "12345"), Request(1, 0.0, 2, 1, "hello")]
    assert chosen.left_out == 3
    assert chosen.remarks == (
        "3 conversations without an answered human turn are left out",
        "token counts are ASSUMED: ceil(characters / 4) of the text",
        "the trace has no arrival times; they are ASSUMED: all at 0 s",
    )
    assert [request.prompt for request in select_requests(trace, num_requests=1)] == [None]
    info = trace_info(path)
    assert (info.format, info.requests, info.left_out, info.has_prompts) == (form, 2, 3, True)
    assert (info.span_s, info.rate_per_s, info.gap_cv, info.gap_s) == (None, None, None, None)
    assert info.gap_rank_correlation == (None, None, None)


@pytest.mark.parametrize("container", ["json", "jsonl", "parquet"])
@pytest.mark.parametrize("form", ["sharegpt", "lmsys"])
def test_a_converted_copy_says_what_it_was(tmp_path: Path, form: str, container: str) -> None:
    path, copy = tmp_path / "in", tmp_path / "out.parquet"
    write_conversations(path, form, [TALK, [], [*TALK, ("human", "é" * 9)]], container, Look())
    made = convert_requests(path, copy)
    assert pq.read_schema(copy).names == ["ContextTokens", "GeneratedTokens", "prompt"]
    trace = open_requests(copy)
    assert (trace.format, trace.has_arrivals, trace.lengths_estimated) == (form, False, True)
    assert list(select_requests(trace, num_requests=None, prompts=True)) == list(
        select_requests(open_requests(path), num_requests=None, prompts=True)
    )
    again = convert_requests(copy, tmp_path / "again.parquet")
    assert (made.left_out, again.left_out) == (1, 0)
    assert copy.read_bytes() == (tmp_path / "again.parquet").read_bytes()


def test_sorting_what_has_no_times_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write_conversations(path, "lmsys", [TALK, [("user", "z"), ("assistant", "y")]], "jsonl", Look())
    assert read(open_requests(path, sort=True)) == read(open_requests(path))


def test_parquet_with_conversations_as_json_text(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    text = json.dumps([{"role": "user", "content": "12345"}, {"role": "assistant", "content": "1"}])
    pq.write_table(pa.table({"conversation": [text]}), path)
    assert read(open_requests(path)) == ([(2, 1, "12345")], 0)


GOOD = '{"id": "a", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}'


def refusal(tmp_path: Path, data: bytes | str) -> str:
    path = tmp_path / "trace"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(TraceError) as caught:
        list(open_requests(path).batches(prompts=True))
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("style", ["array", "lines"])
@pytest.mark.parametrize(
    ("record", "parts"),
    [
        ('{"id": 1}', ["row 2: missing column conversations (found: 'id').", "Every record needs it."]),
        (
            '{"conversations": null}',
            ["row 2, column conversations: not a conversation: Expected `array`, got `null` (empty)."],
        ),
        ('{"conversations": "hello"}', ["row 2, column conversations: not a conversation", "('hello')"]),
        (
            '{"conversations": {"from": "human"}}',
            ["row 2, column conversations: not a conversation: Expected `array`, got `object`"],
        ),
        (
            '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": 5}]}',
            ["row 2, column conversations[1].value: not a conversation: Expected `str | null`, got `int`"],
        ),
        (
            '{"conversations": [{"from": "human"}]}',
            ["row 2, column conversations[0]: not a conversation: Object missing required field `value`"],
        ),
        (
            '{"conversations": [{"from": ["human"], "value": "x"}]}',
            ["row 2, column conversations[0].from: not a conversation: Expected `str`, got `array`"],
        ),
        ('{"conversations": [5]}', ["conversations[0]: not a conversation: Expected `object`, got `int`"]),
        (
            '{"conversations": [{"from": "human", "value": "\\ud83d"}]}',
            ["row 2", "Write"],
        ),
        ('{"conversations": ' + "[" * 5000 + "]" * 5000 + "}", ["row 2"]),
        ('{"conversations": [}', ["row 2: not valid JSON"]),
        ('{"conversations" []}', ["row 2: not valid JSON"]),
    ],
)
def test_bad_records(tmp_path: Path, style: str, record: str, parts: list[str]) -> None:
    data = f"[{GOOD}, {record}, {GOOD}]" if style == "array" else f"{GOOD}\n{record}\n{GOOD}\n"
    if "[}" in record and style == "array":
        return  # brackets that do not match move the end of the element: see the next test
    message = refusal(tmp_path, data)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize(
    ("data", "start"),
    [
        ("[]", "header: these are not the columns of a request trace (found: none;"),
        ("[", "row 1: the JSON array ends without its closing bracket, after 0 whole elements. Fetch"),
        (f"[{GOOD}", "row 2: the JSON array ends without its closing bracket, after 1 whole elements."),
        (f"[{GOOD}, {GOOD[:-9]}", "row 2: the JSON array ends without its closing bracket, after 1 whole"),
        (f"[{GOOD}, {GOOD[:40]}", "row 2: the JSON array ends without its closing bracket, after 1 whole"),
        (f"[{GOOD},", "row 2: the JSON array ends without its closing bracket, after 1 whole elements."),
        (f"[{GOOD},]", "row 2: not a JSON object (']')."),
        (
            f"[{GOOD} {GOOD}]",
            "after row 1: '{' where ',' belongs. Write an array of JSON objects, with a comma",
        ),
        (f"[{GOOD}, 5]", "row 2: not a JSON object ('5]'). Write an array of JSON objects."),
        (f"[[{GOOD}]]", "row 1: not a JSON object ('[{"),
        (f"[{GOOD}]\n[{GOOD}]", "after row 1: the file goes on after the end of its array ('[{"),
        (f"[{GOOD}] x", "after row 1: the file goes on after the end of its array ('x')."),
        (f'[{GOOD}, {{"conversations": [}}]]', "row 2: not valid JSON"),
        (
            json.dumps({"conversations": [{"from": "human", "value": "a"}]}),
            "no requests: all 1 rows are left out, as conversations without an answered human turn. Give",
        ),
        ('[{"conversations": []}]', "no requests: all 1 rows are left out"),
    ],
)
def test_bad_files(tmp_path: Path, data: str, start: str, gzipped: bool) -> None:
    assert refusal(tmp_path, gzip.compress(data.encode()) if gzipped else data).startswith(start)


def test_a_row_after_a_left_out_one_keeps_its_number(tmp_path: Path) -> None:
    empty = '{"conversations": []}'
    message = refusal(tmp_path, f'[{GOOD}, {empty}, {{"conversations": 5}}]')
    assert message.startswith("row 3, column conversations: not a conversation: Expected `array`, got `int`")


@pytest.mark.parametrize("data", [b'[{"a": "%s"}]', b'{"a": "%s"}', b'{"a": "x"}\n{"a": "%s"}'])
def test_records_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(request_json, "MAX_RECORD_BYTES", 3 << 20)
    message = refusal(tmp_path, data.replace(b"%s", b"y" * (5 << 20)))
    row = data.count(b"\n") + 1
    if row == 1:
        assert message == "row 1: a record of more than 3 MiB. Remove or split it."
    else:
        assert message.startswith("header: these are not the columns")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    message = refusal(tmp_path, GOOD.encode() + b"\n" + GOOD.replace("a", "\xff").encode("latin-1"))
    assert message.startswith(("row 2", "byte"))


@pytest.mark.parametrize("form", ["sharegpt", "lmsys"])
def test_bad_parquet(tmp_path: Path, form: str) -> None:
    path = tmp_path / "trace"
    column, who, what = KEYS[form]

    def message(cells: pa.Array) -> str:
        pq.write_table(pa.table({column: cells}), path)
        with pytest.raises(TraceError) as caught:
            list(open_requests(path).batches())
        return str(caught.value).removeprefix(f"{path}: ")

    turn = {who: "human", what: 5}
    assert message(pa.array([[turn]])).startswith(
        f"row 1, column {column}[0].{what}: not a conversation: Expected `str | null`, got `int`"
    )
    assert message(pa.array([[{who: "human", what: "x"}], None])).startswith(f"row 2, column {column}: not a")
    assert message(pa.array([[{who: "human"}]])).startswith(f"row 1, column {column}[0]: not a conversation")
    assert message(pa.array([5])).startswith(f"row 1, column {column}: not a conversation: Expected `array`")


@pytest.mark.parametrize("form", ["sharegpt", "lmsys"])
def test_parquet_turns_that_are_not_utf8(tmp_path: Path, form: str) -> None:
    path = tmp_path / "trace"
    column, who, what = KEYS[form]
    turns = pa.StructArray.from_arrays([pa.array(["user", "user"]), invalid_utf8()], [who, what])
    pq.write_table(pa.table({column: pa.ListArray.from_arrays([0, 1, 2], turns)}), path)
    with pytest.raises(TraceError, match=rf"row 2, column {column}: not a conversation: 'utf-8' codec"):
        list(open_requests(path).batches())


def test_an_azure_file_may_carry_prompts(tmp_path: Path) -> None:
    rows = [
        {"TIMESTAMP": "2023-11-16 18:15:47", "ContextTokens": 5, "GeneratedTokens": 6, "prompt": 'a "b"\n'},
        {"TIMESTAMP": "2023-11-16 18:15:46", "ContextTokens": 3, "GeneratedTokens": 4, "prompt": None},
        {"TIMESTAMP": "2023-11-16 18:15:48", "ContextTokens": 7, "GeneratedTokens": 8},
    ]
    path = tmp_path / "trace"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    trace = open_requests(path, sort=True)
    wanted = [Request(0, 0.0, 3, 4), Request(1, 1.0, 5, 6, 'a "b"\n'), Request(2, 2.0, 7, 8)]
    assert list(select_requests(trace, num_requests=None, prompts=True)) == wanted
    convert_requests(path, tmp_path / "copy.parquet", sort=True)
    copy = open_requests(tmp_path / "copy.parquet")
    assert (copy.has_arrivals, copy.has_prompts, copy.lengths_estimated) == (True, True, False)
    assert list(select_requests(copy, num_requests=None, prompts=True)) == wanted


def test_prompts_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(
        'TIMESTAMP,prompt,ContextTokens,GeneratedTokens\n0,"say ""hi"", é",3,4\n1,,5,6\n', "utf-8"
    )
    chosen = select_requests(open_requests(path), num_requests=None, prompts=True)
    assert list(chosen) == [Request(0, 0.0, 3, 4, 'say "hi", é'), Request(1, 1.0, 5, 6)]
    path.write_bytes(
        b"TIMESTAMP,prompt,ContextTokens,GeneratedTokens\n" + b"0,x,3,4\n" * 2000 + b"1,\xff,5,6\n"
    )
    with pytest.raises(TraceError, match="row 2001, column prompt: the text is not UTF-8"):
        list(open_requests(path).batches(prompts=True))


@pytest.mark.parametrize(
    ("prompts", "start"),
    [
        (pa.array([5, 6]), "row 1, column prompt: the column holds int64, not text ('5')."),
        (pa.array([b"a", b"\xff"]), "row 2, column prompt: the text is not UTF-8 ('\\\\xff')."),
        (invalid_utf8(), "row 2, column prompt: the text is not UTF-8 ('\\\\xff')."),
    ],
)
def test_bad_prompts_in_parquet(tmp_path: Path, prompts: pa.Array, start: str) -> None:
    path = tmp_path / "trace"
    ones = pa.array([1, 1])
    names = ["TIMESTAMP", "ContextTokens", "GeneratedTokens", "prompt"]
    pq.write_table(pa.table([ones, ones, ones, prompts], names=names), path)
    with pytest.raises(TraceError) as caught:
        list(open_requests(path).batches(prompts=True))
    assert str(caught.value).startswith(f"{path}: {start}")
    assert len(list(open_requests(path).batches())) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            b'["a"]',
            """row 2, column prompt: no text ('["a"]': Expected `str`, got `array`). Write a JSON string.""",
        ),
        (
            b'"\xff"',
            "row 2, column prompt: no text ('\"\\\\xff\"': Invalid UTF-8 encoded string). Write a JSON",
        ),
    ],
)
def test_bad_prompts_in_json(tmp_path: Path, prompt: bytes, message: str) -> None:
    line = b'{"TIMESTAMP": 1, "ContextTokens": 5, "GeneratedTokens": 6, "prompt": %s}\n'
    # Bytes that are no text are refused as such at the beginning of a file, so this must come later.
    assert refusal(tmp_path, line % (b'"' + b"y" * (2 << 20) + b'"') + line % prompt).startswith(message)


def test_the_first_fault_is_named_before_a_later_one(tmp_path: Path) -> None:
    message = refusal(tmp_path, GOOD + '\n{"conversations": 5}\n' + GOOD + "\n{\n")
    assert message.startswith("row 2, column conversations: not a conversation")

"""Every bad request trace is refused with file, place, value and remedy."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finemoe.errors import TraceError
from finemoe.traces.requests import open_requests
from request_writers import COLUMNS, invalid_utf8, write_parquet

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
POSITIVE = "Write a positive whole number."
NUMBER_OR_DATE = "Write a number, or a date like 2023-11-16 18:15:46.6805900."


def refusal(path: Path, *, sort: bool = False) -> str:
    """The message, which must start with the file."""
    with pytest.raises(TraceError) as caught:
        list(open_requests(path, sort=sort).batches(rows=2))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def refusal_of(tmp_path: Path, data: bytes | str) -> str:
    path = tmp_path / "trace"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return refusal(path)


CELLS = {
    "empty prompt": (
        "2,,5",
        1,
        "a token count is missing (empty).",
        "Fill in a positive whole number, or remove",
    ),
    "blank prompt": ("2,  ,5", 1, "a token count is missing (empty).", "Fill in a positive whole number"),
    "NaN": (
        "2,5,NaN",
        2,
        "a token count is missing ('NaN').",
        "Fill in a positive whole number, or remove the row.",
    ),
    "negative": ("2,-4,5", 1, "a negative token count ('-4').", POSITIVE),
    "fractional": ("2,4,5.5", 2, "a fractional token count ('5.5').", POSITIVE),
    "tiny fraction": ("2,4,1e-9", 2, "a fractional token count ('1e-9').", POSITIVE),
    "no output": (
        "2,4,0",
        2,
        "zero tokens ('0').",
        "Remove the row: a request needs a prompt and an output.",
    ),
    "no prompt": (
        "2,0.0,4",
        1,
        "zero tokens ('0.0').",
        "Remove the row: a request needs a prompt and an output.",
    ),
    "huge": (
        "2,4,2147483649",
        2,
        "more than 2147483648 tokens ('2147483649').",
        "Check the unit of the column.",
    ),
    "huger": ("2,4,1e9999", 2, "more than 2147483648 tokens ('1e9999').", "Check the unit of the column."),
    "infinite": ("2,inf,5", 1, "a token count is infinite ('inf').", POSITIVE),
    "word": ("2,many,5", 1, "a token count cannot be read ('many').", POSITIVE),
    "hexadecimal": ("2,0x1F,5", 1, "a token count cannot be read ('0x1F').", POSITIVE),
    "underscore": ("2,1_000,5", 1, "a token count cannot be read ('1_000').", POSITIVE),
    "empty time": (
        ",4,5",
        0,
        "a time stamp is missing (empty).",
        "Fill in a number, or a date like 2023-11-16",
    ),
    "NaN time": ("nan,4,5", 0, "a time stamp is missing ('nan').", "Fill in a number, or a date like"),
    "infinite time": ("-Infinity,4,5", 0, "a time stamp is infinite ('-Infinity').", NUMBER_OR_DATE),
    "time of day": ("18:15:46,4,5", 0, "a time stamp cannot be read ('18:15:46').", NUMBER_OR_DATE),
    "bad month": (
        "2023-13-16 18:15:46,4,5",
        0,
        "a time stamp cannot be read: month must be in 1..12 ('2023-13-16 18:15:46').",
        "Correct the date.",
    ),
    "bad day": (
        "2023-02-30 18:15:46.5,4,5",
        0,
        "a time stamp cannot be read: day is out of range",
        "Correct the",
    ),
    "far date": (
        "2523-02-20 18:15:46,4,5",
        0,
        "a time stamp out of range ('2523-02-20 18:15:46').",
        "Use a date between 1678 and 2262.",
    ),
    "far time": ("1e300,4,5", 0, "a time stamp out of range ('1e300').", "Check the unit of the column."),
    "backward": (
        "0.5,4,5",
        0,
        "the time goes back by 0.75 s ('0.5').",
        "Sort the file by time, or pass --sort (sort=True).",
    ),
}


@pytest.mark.parametrize("before", [1, 2, 5])  # within a batch of two, at its beginning, later
@pytest.mark.parametrize("case", CELLS)
def test_bad_cells(tmp_path: Path, case: str, before: int) -> None:
    row, column, problem, remedy = CELLS[case]
    message = refusal_of(tmp_path, HEADER + "1.25,1,1\n" * before + row + "\n3000000000,1,1\n")
    assert message.startswith(f"row {before + 1}, column {COLUMNS['vidur'][column]}: {problem}")
    assert remedy in message


def test_the_first_bad_row_is_named_whatever_its_column(tmp_path: Path) -> None:
    assert refusal_of(tmp_path, HEADER + "x,1,1\n0,0,1\n").startswith("row 1, column arrived_at")
    assert refusal_of(tmp_path, HEADER + "0,1,0\nx,1,1\n").startswith("row 1, column num_decode_tokens")
    assert refusal_of(tmp_path, HEADER + "5,1,1\n4,1,0\n").startswith("row 2, column arrived_at")


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"", ["the file is empty.", "Give a CSV, JSON or Parquet file"]),
        (b"\xef\xbb\xbf", ["the file has no header line."]),
        (b"\n\n", ["the file has no header line."]),
        (
            HEADER.encode(),
            ["row 1: no requests: there are no rows after the header.", "at least one request"],
        ),
        (HEADER.encode() + b"\n\r\n\n", ["row 1: no requests"]),
        (
            b"arrived_at,num_prefill_tokens,tokens\n1,2,3\n",
            [
                "header: missing column num_decode_tokens of the vidur format",
                "found: 'arrived_at', 'num_prefill_tokens', 'tokens'",
                "expected: TIMESTAMP, ContextTokens, GeneratedTokens (azure); arrived_at, ",
                "arrived_at, num_prefill_tokens, num_decode_tokens (vidur); timestamp, ",
                "timestamp, input_length, output_length (mooncake)",
                "Rename the columns",
            ],
        ),
        (
            b"a,b\n1,2\n",
            ["header: these are not the columns of a request trace (found: 'a', 'b'; expected: "],
        ),
        (
            b'{"timestamp": 1, "input_length": 2}\n',
            ["header: missing column output_length of the mooncake format"],
        ),
        (b"{}\n", ["header: these are not the columns of a request trace (found: none;"]),
        (
            b"arrived_at,num_prefill_tokens,num_decode_tokens,arrived_at\n1,2,3,4\n",
            ["header: column arrived_at appears 2 times.", "Keep one of them."],
        ),
        (
            HEADER.encode() + b"1,1,1\n2,1\n",
            ["row 2: 2 cells, but 3 columns ('2,1').", "Repair or remove the row."],
        ),
        (
            HEADER.encode() + (b"1,1,1" + b" " * 500 + b"\n") * 3000 + b"2,\xff\n",
            ["row 3001: 2 cells, but 3 columns ('2,"],
        ),
        (
            HEADER.encode() + b"1,1,1" + b" " * (2 << 20) + b"\n2,1,1\n",
            ["a row of more than 1 MiB. Shorten it, or convert the file to JSON lines."],
        ),
        (HEADER.encode() + b"1,1,1\n\n2,1,3,4\n", ["row 2: 4 cells, but 3 columns ('2,1,3,4')."]),
        (
            bytes(range(128, 256)) * 9,
            ["byte 0: binary data, not a trace (80 81 82 83 84 85 86 87).", "Give a CSV"],
        ),
        (b"arrived_at\0\1\2\n", ["byte 10: binary data, not a trace (00 01 02 0a)."]),
        ("arrived_at,x\n1,2\n".encode("utf-16"), ["byte 0: binary data, not a trace (ff fe 61 00"]),
    ],
)
def test_bad_text_files(tmp_path: Path, data: bytes, parts: list[str], gzipped: bool) -> None:
    message = refusal_of(tmp_path, gzip.compress(data) if gzipped else data)
    for part in parts:
        assert part in message


GOOD_LINE = b'{"timestamp": 0, "input_length": 2, "output_length": 3}\n'


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            b'{"timestamp": 1, "input_le',
            ['row 2: not valid JSON (\'{"timestamp": 1, "input_le\'', "one JSON object"],
        ),
        (b"[1, 2, 3]", ["row 2: not a JSON object ('[1, 2, 3]'", "Write one JSON object per line."]),
        (b'{"timestamp": 1} 5', ["row 2: not valid JSON"]),
        (
            b'{"timestamp": 1, "input_length": 2}',
            [
                "row 2: missing column output_length (found: 'timestamp', 'input_length').",
                "Every record needs it.",
            ],
        ),
        (
            b'{"timestamp": 1, "input_length": null, "output_length": 3}',
            ["row 2, column input_length: a token count is missing (empty).", "Fill in"],
        ),
        (
            b'{"timestamp": 1, "input_length": true, "output_length": 3}',
            ["row 2, column input_length: a token count cannot be read ('true')."],
        ),
        (
            b'{"timestamp": 1, "input_length": [4], "output_length": 3}',
            ["row 2, column input_length: a token count cannot be read ('[4]')."],
        ),
        (
            b'{"timestamp": 1, "input_length": "\\ud83d", "output_length": 3}',
            ["row 2: not valid JSON"],
        ),
        (
            b'{"timestamp": -7.5, "input_length": 4, "output_length": 3}',
            ["row 2, column timestamp: the time goes back by 0.0075 s ('-7.5').", "--sort"],
        ),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: bytes, parts: list[str]) -> None:
    message = refusal_of(tmp_path, GOOD_LINE + b"\n" + line + b"\n" + GOOD_LINE)
    for part in parts:
        assert part in message


def test_missing_file_and_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent.csv") == "no such file. Check the path."
    assert refusal(tmp_path) == "this is a directory. Name the trace file in it."


def test_binary_data_after_a_good_beginning(tmp_path: Path) -> None:
    message = refusal_of(tmp_path, HEADER + "1,1,1\n" * 9000 + "1,4\0,5\n")
    assert message.startswith("row 9001, column num_prefill_tokens: a token count cannot be read ('4\\x00').")


def test_sort_does_not_excuse_other_faults(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "5,1,1\n4,1,1\n3,1,0\n")
    assert refusal(path, sort=True).startswith("row 3, column num_decode_tokens: zero tokens ('0').")


@pytest.mark.parametrize("keep", [3, 12, 0.5, -4])
def test_truncated_gzip(tmp_path: Path, keep: float) -> None:
    whole = gzip.compress(
        (HEADER + "".join(f"{row}.5,{row % 977 + 1},5\n" for row in range(200_000))).encode()
    )
    cut = int(len(whole) * keep) if isinstance(keep, float) else keep
    message = refusal_of(tmp_path, whole[:cut])
    assert message.startswith("truncated or damaged gzip data (")
    assert message.endswith("Fetch the file again.")


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress((HEADER + "1,1,1\n").encode()))
    whole[-6] ^= 0xFF  # its checksum
    assert refusal_of(tmp_path, bytes(whole)).startswith("truncated or damaged gzip data (CRC check failed")


ROWS = [(second * 10**9, 5, 6) for second in range(40)]


def test_truncated_parquet(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write_parquet(path, "azure", ROWS, "dates", pa.int64())
    whole = path.read_bytes()
    for size in (4, 7, 100, len(whole) // 2, len(whole) - 1):
        message = refusal_of(tmp_path, whole[:size])
        assert message.startswith("truncated or damaged Parquet (")
        assert message.endswith("Write or fetch the file again.")


def test_parquet_damaged_inside(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write_parquet(path, "azure", ROWS, "dates", pa.int64())
    whole = bytearray(path.read_bytes())
    whole[4:60] = b"\xff" * 56
    assert refusal_of(tmp_path, bytes(whole)).startswith("cannot be read (")


def test_parquet_inside_gzip(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write_parquet(path, "azure", ROWS, "dates", pa.int64())
    message = refusal_of(tmp_path, gzip.compress(path.read_bytes()))
    assert message == "byte 0: a Parquet file inside gzip. Unpack it with gunzip."


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (pa.array([1, None, 3]), "row 2, column ContextTokens: a token count is missing (empty)."),
        (pa.array([1.0, float("nan"), 3]), "row 2, column ContextTokens: a token count is missing ('nan')."),
        (pa.array([1.0, 2, 2.5]), "row 3, column ContextTokens: a fractional token count ('2.5')."),
        (pa.array([1.0, 2, float("inf")]), "row 3, column ContextTokens: a token count is infinite ('inf')."),
        (pa.array([1, 2, -3], pa.int8()), "row 3, column ContextTokens: a negative token count ('-3')."),
        (pa.array([1, 2, 2**63], pa.uint64()), "row 3, column ContextTokens: more than 2147483648 tokens"),
        (pa.array(["1", "2", "x"]), "row 3, column ContextTokens: a token count cannot be read ('x')."),
        (pa.array([[1], [2], [3]]), "row 1, column ContextTokens: a token count cannot be read ('[1]')."),
        (pa.nulls(3), "row 1, column ContextTokens: a token count is missing (empty)."),
    ],
)
def test_bad_parquet_counts(tmp_path: Path, prompts: pa.Array, message: str) -> None:
    path = tmp_path / "trace"
    times = pa.array([0, 1, 2], pa.timestamp("ms"))
    pq.write_table(pa.table([times, prompts, pa.array([1, 1, 1])], names=COLUMNS["azure"]), path)
    assert refusal(path).startswith(message)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (
            pa.array([0, None, 2], pa.timestamp("us")),
            "row 2, column TIMESTAMP: a time stamp is missing (empty).",
        ),
        (pa.array([0, 5, 2], pa.timestamp("us")), "row 3, column TIMESTAMP: the time goes back by 3e-06 s ("),
        (pa.array([0, 5, 2**60], pa.timestamp("ms")), "row 3, column TIMESTAMP: a time stamp"),
        (
            pa.array([0, 5, 2**60]),
            "row 3, column TIMESTAMP: a time stamp out of range ('1152921504606846976').",
        ),
        (pa.array([0.0, 5, 1e300]), "row 3, column TIMESTAMP: a time stamp out of range ('1e+300')."),
        (pa.array([0.0, float("nan"), 1]), "row 2, column TIMESTAMP: a time stamp is missing ('nan')."),
        (pa.array([True, False, True]), "row 1, column TIMESTAMP: a time stamp cannot be read ('True')."),
    ],
)
def test_bad_parquet_times(tmp_path: Path, times: pa.Array, message: str) -> None:
    path = tmp_path / "trace"
    ones = pa.array([1, 1, 1])
    pq.write_table(pa.table([times, ones, ones], names=COLUMNS["azure"]), path)
    assert refusal(path).startswith(message)


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    ones, bad = pa.array([1, 1]), invalid_utf8()
    for place, column in enumerate(COLUMNS["azure"]):
        columns = [bad if place == other else ones for other in range(3)]
        pq.write_table(pa.table(columns, names=COLUMNS["azure"]), path)
        message = refusal(path)
        assert message.startswith(f"row 2, column {column}: a t")
        assert "cannot be read ('\\\\xff')" in message


def test_parquet_without_rows_or_columns(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    none = pa.array([], pa.int64())
    pq.write_table(pa.table([none, none, none], names=COLUMNS["azure"]), path)
    assert refusal(path).startswith("row 1: no requests")
    pq.write_table(pa.table([none], names=["TIMESTAMP"]), path)
    assert "missing column ContextTokens, GeneratedTokens of the azure format" in refusal(path)

"""Write request tables in every format and container, independently of the readers under test."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

Rows = list[tuple[int, int, int]]
"""(time in ns since 1970, prompt tokens, output tokens)"""

COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    "mooncake": ("timestamp", "input_length", "output_length"),
    "splitwise": ("arrival_timestamp", "prompt_size", "token_size"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}

FURTHER = {
    "splitwise": {"request_id": "0", "request_type": "2", "application_id": "0", "batch_size": "1"},
    "burstgpt": {"Model": "GPT-4", "Total tokens": "9", "Log Type": "Conversation log"},
}
"""Columns that the publishers' files have beside those."""


@dataclass(frozen=True)
class Look:
    """Everything about a text file that must not matter."""

    gzipped: bool = False
    newline: str = "\n"
    last_newline: bool = True
    bom: bool = False
    extra_column: bool = False
    reverse_columns: bool = False
    quoted: bool = False
    zone: str = ""


def any_look(**others: st.SearchStrategy[Any]) -> st.SearchStrategy[Look]:
    """Any look; `others` for what not every format has."""
    return st.builds(
        Look,
        gzipped=st.booleans(),
        newline=st.sampled_from(["\n", "\r\n", "\n\n"]),
        last_newline=st.booleans(),
        bom=st.booleans(),
        extra_column=st.booleans(),
        reverse_columns=st.booleans(),
        quoted=st.booleans(),
        **others,
    )


def date(ticks: int, zone: str = "") -> str:
    """As Azure writes it, with seven digits (ten where the time needs nine)."""
    seconds, rest = divmod(ticks, 10**9)
    shift = {"": 0, "Z": 0, "+00:00": 0, "+0130": 90, "-08:00": -480}[zone]
    local = datetime(1970, 1, 1) + timedelta(seconds=seconds, minutes=shift)
    fraction = f"{rest:09d}"
    return f"{local:%Y-%m-%d %H:%M:%S}.{fraction[:7] if fraction.endswith('00') else fraction}{zone}"


def decimal(ticks: int, digits: int) -> str:
    """ticks / 10^digits, exactly."""
    whole, rest = divmod(ticks, 10**digits)
    return f"{whole}.{rest:0{digits}d}"


def write_text(path: Path, form: str, rows: Rows, look: Look) -> None:
    """Mooncake as JSON lines, the others as CSV."""
    if form == "mooncake":
        lines = [_json_line(row, look) for row in rows]
    else:
        further = FURTHER.get(form, {})
        lines = [_csv_line((*further, *COLUMNS[form]), "note", look)]
        for ticks, prompt, output in rows:
            time = date(ticks, look.zone) if form == "azure" else decimal(ticks, 9)
            lines.append(_csv_line((*further.values(), time, str(prompt), str(output)), "x", look))
    text = look.newline.join(lines) + (look.newline if look.last_newline else "")
    data = text.encode("utf-8-sig" if look.bom else "utf-8")
    path.write_bytes(gzip.compress(data) if look.gzipped else data)


Conversation = list[tuple[str, str | None]]
"""(who speaks, what)"""

KEYS = {"sharegpt": ("conversations", "from", "value"), "lmsys": ("conversation", "role", "content")}


def write_conversations(
    path: Path, form: str, conversations: list[Conversation], container: str, look: Look
) -> None:
    """ShareGPT or LMSYS as one JSON array (pretty where `look.quoted`), as JSON lines, or as Parquet."""
    column, who, what = KEYS[form]
    records = []
    for number, conversation in enumerate(conversations):
        turns = [{what: text, who: speaker} for speaker, text in conversation]
        record: dict[str, object] = {"id": f"c{number}", column: turns}
        if look.extra_column:
            record = {"language": 'French ]}"\\', "moderation": [{"flagged": False}], **record}
        records.append(record)
    if container == "parquet":
        turn = pa.struct([(what, pa.string()), (who, pa.string())])
        cells = pa.array([record[column] for record in records], pa.list_(turn))
        pq.write_table(pa.table({"id": [record["id"] for record in records], column: cells}), path)
        return
    if container == "jsonl":
        text = look.newline.join(
            json.dumps(record, ensure_ascii=not look.reverse_columns) for record in records
        )
    else:
        text = json.dumps(records, ensure_ascii=not look.reverse_columns, indent=1 if look.quoted else None)
        text = text.replace("\n", look.newline)
    data = (text + (look.newline if look.last_newline else "")).encode("utf-8-sig" if look.bom else "utf-8")
    path.write_bytes(gzip.compress(data) if look.gzipped else data)


def _csv_line(cells: tuple[str, ...], extra: str, look: Look) -> str:
    line = [f'"{cell}"' for cell in cells] if look.quoted else list(cells)
    line += [extra] if look.extra_column else []
    return ",".join(reversed(line) if look.reverse_columns else line)


def _json_line(row: tuple[int, int, int], look: Look) -> str:
    time, prompt, output = COLUMNS["mooncake"]
    pairs = [f'"{time}": {decimal(row[0], 6)}', f'"{prompt}": {row[1]}', f'"{output}": {row[2]}']
    pairs += [f'"hash_ids": {json.dumps([1, {"a": 2}])}'] if look.extra_column else []
    return "{" + ", ".join(reversed(pairs) if look.reverse_columns else pairs) + "}"


def write_parquet(path: Path, form: str, rows: Rows, time_type: str, count_type: pa.DataType) -> None:
    """Any format as Parquet; `time_type`: text, dictionary, dates, zoned dates, or number."""
    ticks = [row[0] for row in rows]
    unit = 10**6 if form == "mooncake" else 10**9
    times = {
        "text": lambda: pa.array([date(tick) for tick in ticks]),
        "dictionary": lambda: pa.array([date(tick) for tick in ticks]).dictionary_encode(),
        "dates": lambda: pa.array(ticks, pa.timestamp("ns")),
        "zoned dates": lambda: pa.array(ticks, pa.timestamp("ns", "UTC")),
        "number": lambda: pa.array([tick / unit for tick in ticks], pa.float64()),
    }[time_type]()
    counts = [pa.array([row[place] for row in rows]).cast(count_type) for place in (1, 2)]
    pq.write_table(pa.table([times, *counts], names=COLUMNS[form]), path, row_group_size=7)


def invalid_utf8() -> pa.Array:
    """Two texts, as a Parquet file may hold them although the second is not UTF-8."""
    return pa.Array.from_buffers(pa.string(), 2, pa.array([b"1", b"\xff"]).buffers())

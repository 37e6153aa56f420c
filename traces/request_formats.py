"""The request trace formats, told apart by their columns; a further format is one more row of `FORMATS`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import TraceError
from .request_conversations import LmsysTurn, ShareGptTurn, Turn
from .request_files import Layout


@dataclass(frozen=True)
class Constant:
    """A column that may be there, and then holds one number only; what to say of any other."""

    column: str
    value: int
    problem: str
    remedy: str


@dataclass(frozen=True)
class ColumnFormat:
    """Where a format keeps arrival time, prompt length and output length.

    `ticks_per_unit` says how many nanoseconds one unit of a numeric time has; a date needs no unit. `time` is
    empty where there is none. `text` may hold the prompt. `zero_tokens` says what a row without prompt or
    output tokens is, in a format that has such rows: they are left out. Elsewhere they are refused.
    """

    name: str
    time: str
    prompt: str
    output: str
    ticks_per_unit: int
    text: str = ""
    constants: tuple[Constant, ...] = ()
    zero_tokens: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that must be present, in the order (time, prompt, output)."""
        return (self.time, self.prompt, self.output) if self.time else (self.prompt, self.output)

    @property
    def left_out(self) -> str:
        """What the rows are that are left out."""
        return self.zero_tokens


@dataclass(frozen=True)
class ConversationFormat:
    """A column of conversations, without times and token counts (see `request_conversations`)."""

    name: str
    column: str
    turn: type[Turn]
    left_out: str = "conversations without an answered human turn"

    @property
    def columns(self) -> tuple[str, ...]:
        """The column that must be present."""
        return (self.column,)


RequestFormat = ColumnFormat | ConversationFormat

SECOND = 1_000_000_000
MILLISECOND = 1_000_000

AZURE = ColumnFormat("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", SECOND, text="prompt")
AZURE_UNTIMED = replace(AZURE, time="")

SPLITWISE = ColumnFormat(
    "splitwise",
    "arrival_timestamp",
    "prompt_size",
    "token_size",
    SECOND,
    constants=(
        Constant("request_type", 2, "not a request of an LLM, whose type is 2", "Remove the row."),
        Constant("batch_size", 1, "a batch, where a row is one request", "Write one row for each request."),
    ),
)
BURSTGPT = ColumnFormat(
    "burstgpt",
    "Timestamp",
    "Request tokens",
    "Response tokens",
    SECOND,
    zero_tokens="failed requests (without request or response tokens)",
)

FORMATS: tuple[RequestFormat, ...] = (
    AZURE,  # Azure/AzurePublicDataset, LLM inference traces of 2023 and 2024
    ColumnFormat("vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens", SECOND),
    ColumnFormat("mooncake", "timestamp", "input_length", "output_length", MILLISECOND),
    SPLITWISE,  # Mutinifni/splitwise-sim
    BURSTGPT,  # HPMLL/BurstGPT
    ConversationFormat("sharegpt", "conversations", ShareGptTurn),
    ConversationFormat("lmsys", "conversation", LmsysTurn),  # lmsys/lmsys-chat-1m
)


def recognise(path: Path, layout: Layout) -> RequestFormat:
    """The first format whose columns are all present (any order, further columns allowed).

    Raises TraceError naming the columns found and those expected.
    """
    names = layout.columns
    candidates: tuple[RequestFormat, ...] = (*FORMATS, AZURE_UNTIMED) if layout.untimed else FORMATS
    for form in candidates:
        if set(form.columns) <= set(names):
            _refuse_repeated(path, form, names)
            return form
    if {"gate", "experts", "token_counts"} <= set(names):
        raise TraceError(
            path, "this is a routing trace, not a request trace.", remedy="Give it to --routing."
        )
    best = max(FORMATS, key=lambda form: len(set(form.columns) & set(names)))
    missing = [column for column in best.columns if column not in names]
    if len(missing) == len(best.columns):
        problem = "these are not the columns of a request trace"
    else:
        problem = f"missing column {', '.join(missing)} of the {best.name} format"
    found = ", ".join(repr(name[:40]) for name in names[:12]) + (", …" if len(names) > 12 else "")
    expected = "; ".join(f"{', '.join(form.columns)} ({form.name})" for form in FORMATS)
    raise TraceError(
        path,
        f"{problem} (found: {found or 'none'}; expected: {expected}).",
        place="header",
        remedy="Rename the columns to those of one format.",
    )


def _refuse_repeated(path: Path, form: RequestFormat, names: Sequence[str]) -> None:
    for column in (*form.columns, *optional_columns(form, names, prompts=True)):
        if list(names).count(column) > 1:
            raise TraceError(
                path,
                f"column {column} appears {list(names).count(column)} times.",
                place="header",
                remedy="Keep one of them.",
            )


def optional_columns(form: RequestFormat, names: Sequence[str], *, prompts: bool) -> tuple[str, ...]:
    """Columns that are read where they are present: those that must be constant, then that of the prompts."""
    if isinstance(form, ConversationFormat):
        return ()
    wanted = [constant.column for constant in form.constants] + ([form.text] if prompts and form.text else [])
    return tuple(name for name in wanted if name in names)

"""Requests out of conversations: the first human turn is the prompt, the first answer to it the output.

So do the serving benchmarks of the field. There are no token counts in such files: lengths are estimated from
the number of characters, which is ASSUMED wherever it shows.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .request_cells import Fault, Int64s, is_text, show

CHARACTERS_PER_TOKEN = 4
LENGTH_RULE = f"ceil(characters / {CHARACTERS_PER_TOKEN})"

# Who speaks, under all the names that the published files use.
HUMANS = frozenset({"human", "user"})
ASSISTANTS = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})

_PLACE = re.compile(r" - at `\$(.*)`$")


class ShareGptTurn(msgspec.Struct, frozen=True):
    """One turn of a ShareGPT conversation."""

    speaker: str = msgspec.field(name="from")
    text: str | None = msgspec.field(name="value")


class LmsysTurn(msgspec.Struct, frozen=True):
    """One turn of an LMSYS-Chat-1M conversation."""

    speaker: str = msgspec.field(name="role")
    text: str | None = msgspec.field(name="content")


Turn = ShareGptTurn | LmsysTurn


def read_exchanges(
    cells: pa.Array, turn: type[Turn]
) -> tuple[Int64s, Int64s, list[str], npt.NDArray[np.bool_], Fault | None]:
    """Prompt tokens, output tokens and prompts of conversations, and which of them hold an exchange.

    `cells` are JSON, or lists of structs. A conversation without an answered human turn counts zero
    tokens and is not among the held ones. With a fault, the values before it.
    """
    decoder = msgspec.json.Decoder(list[turn])  # type: ignore[valid-type]
    is_json = is_text(cells.type)
    prompts: list[str] = []
    answers: list[int] = []
    fault = None
    for row in range(len(cells)):
        try:
            cell = cells[row].as_py()
            turns = (
                decoder.decode(cell or b"null") if is_json else msgspec.convert(cell, list[turn])  # type: ignore[valid-type]
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            fault = _fault(row, cells[row], error)
            break
        prompt, answer = _first_exchange(turns)
        prompts.append(prompt)
        answers.append(_tokens(answer))
    prompt_tokens = np.array([_tokens(prompt) for prompt in prompts], np.int64)
    output_tokens = np.array(answers, np.int64)
    return prompt_tokens, output_tokens, prompts, prompt_tokens > 0, fault


def _first_exchange(turns: list[Turn]) -> tuple[str, str]:
    """The first human turn and the first answer after it; both empty where one is missing or blank."""
    prompt = None
    for turn in turns:
        speaker = turn.speaker.lower()
        if prompt is None:
            if speaker in HUMANS:
                prompt = turn.text or ""
        elif speaker in ASSISTANTS:
            answer = turn.text or ""
            return (prompt, answer) if prompt.strip() and answer.strip() else ("", "")
    return "", ""


def _tokens(text: str) -> int:
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def _fault(row: int, cell: object, error: Exception) -> Fault:
    reason = str(error)
    place = _PLACE.search(reason)
    if place:
        reason = reason[: place.start()]
    return Fault(
        row,
        f"not a conversation: {reason} ({show(cell)}).",
        "Write a list of turns, each with who speaks and what.",
        place.group(1) if place else "",
    )

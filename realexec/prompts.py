"""Prompts to record: JSON lines, a JSON array or plain text, and their tokens (docs/recording.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..errors import TraceError, did_you_mean
from ..traces.files import unreadable_kind
from ..traces.request_conversations import ASSISTANTS, HUMANS, LmsysTurn, ShareGptTurn
from ..traces.request_json import Record, json_array, json_lines

FIELDS = ("prompt", "turns", "messages", "conversations", "token_ids")
_JSON = re.compile(rb"\s*(?:(\{)|\[\s*[\]{])")
_REMEDY = f"Write one JSON object a line with one of {', '.join(FIELDS)}, or one prompt a line."


@dataclass(frozen=True)
class Prompt:
    """One request: messages of a chat (role and content), or token ids. `row` counts records from 1."""

    row: int
    messages: tuple[tuple[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts of a file, which is told by its first bytes: JSON lines, one JSON array, or text with a
    prompt a line (blank lines do not count). One is in memory at a time.

    `prompt` is a text; of `turns` the first is the prompt; `messages` go up to their last one of the user; of
    `conversations` (ShareGPT) the first human turn, with what the system said before. Raises `TraceError`
    naming the row.
    """
    kind = unreadable_kind(path)
    if kind is not None:
        raise TraceError(path, f"this is {kind}.", remedy="Name a regular file.")
    found = False
    try:
        with path.open("rb") as file:
            begin = file.peek(4096)
            json = _JSON.match(begin.removeprefix(b"\xef\xbb\xbf"))
            if json is None:
                prompts = _text(path, file)
            else:
                records = json_lines(path, file) if json.group(1) else json_array(path, file)
                prompts = (_prompt(path, row, record) for row, record in enumerate(records, 1))
            for prompt in prompts:
                found = True
                yield prompt
    except FileNotFoundError:
        raise TraceError(path, "no such file.") from None
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror}).") from None
    if not found:
        raise TraceError(path, "no prompts.", remedy=_REMEDY)


def tokens_of(prompt: Prompt, tokenizer: Any, path: Path) -> list[int]:
    """Token ids of a prompt: with the tokenizer's chat template where it has one, else of the messages' text.

    `tokenizer` is None where the model has none. Raises `TraceError` for a text that cannot become tokens.
    """
    if prompt.token_ids:
        return list(prompt.token_ids)
    place = f"row {prompt.row}"
    if tokenizer is None:
        raise TraceError(
            path, "a text, but the model's folder has no tokenizer.", place=place,
            remedy="Give token_ids, or copy the tokenizer's files into that folder.",
        )  # fmt: skip
    if tokenizer.chat_template:
        import jinja2

        chat = [{"role": role, "content": content} for role, content in prompt.messages]
        try:
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        except jinja2.TemplateError as error:
            raise TraceError(
                path, f"the model's chat template refuses it ({error}).", place=place,
                remedy="Change its roles, or leave it out.",
            ) from None  # fmt: skip
    else:
        ids = tokenizer("\n\n".join(content for _, content in prompt.messages))["input_ids"]
    if not ids:
        raise TraceError(path, "no tokens.", place=place, remedy="Leave it out.")
    return [int(token) for token in ids]


def known_tokens_of(prompt: Prompt, tokenizer: Any, path: Path, vocabulary: int) -> list[int]:
    """`tokens_of` a prompt; `TraceError` also for ids that a model with so many tokens does not know."""
    ids = tokens_of(prompt, tokenizer, path)
    unknown = [token for token in ids if not 0 <= token < vocabulary]
    if unknown:
        raise TraceError(
            path,
            f"token id {unknown[0]}, the model has 0 … {vocabulary - 1}.",
            place=f"row {prompt.row}",
            remedy="Take the ids of this model's tokenizer.",
        )
    return ids


def _text(path: Path, file: Any) -> Iterator[Prompt]:
    row = 0
    for number, line in enumerate(file, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise TraceError(
                path, f"not UTF-8 ({error.reason}).", place=f"line {number}", remedy="Write it in UTF-8."
            ) from None
        if text:
            row += 1
            yield Prompt(row, (("user", text),))


def _prompt(path: Path, row: int, record: Record) -> Prompt:
    def refuse(problem: str, remedy: str = _REMEDY) -> TraceError:
        return TraceError(path, problem, place=f"row {row}", remedy=remedy)

    given = [name for name in FIELDS if name in record]
    if len(given) != 1:
        names = ", ".join(record)[:80]
        near = next(filter(None, (did_you_mean(name, FIELDS) for name in record)), "") if not given else ""
        raise refuse(f"has {' and '.join(given) or 'no prompt'} (its fields: {names or 'none'}).{near}")
    (name,) = given
    try:
        value: Any = msgspec.json.decode(record[name], type=_TYPES[name])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refuse(f"{name} cannot be used: {error}.") from None
    if name == "token_ids":
        if not value:
            raise refuse("token_ids is empty.")
        return Prompt(row, token_ids=tuple(value))
    messages = _messages(name, value)
    if not any(role in HUMANS and content.strip() for role, content in messages):
        raise refuse(f"{name} holds no text of a user.", "Leave it out.")
    return Prompt(row, tuple(messages))


_TYPES: dict[str, Any] = {
    "prompt": str,
    "turns": list[str],
    "messages": list[LmsysTurn],
    "conversations": list[ShareGptTurn],
    "token_ids": list[int],
}


def _messages(name: str, value: Any) -> list[tuple[str, str]]:
    """(role, content) of a record, up to the message that is to be answered."""
    if name == "prompt":
        return [("user", value)]
    if name == "turns":
        return [("user", turn) for turn in value[:1]]
    said = [(_role(turn.speaker.lower()), turn.text or "") for turn in value]
    humans = [place for place, (role, _) in enumerate(said) if role in HUMANS]
    if not humans:
        return []
    return said[: (humans[-1] if name == "messages" else humans[0]) + 1]


def _role(speaker: str) -> str:
    """ShareGPT's names in those of chat templates."""
    if speaker in HUMANS:
        return "user"
    return "assistant" if speaker in ASSISTANTS else speaker

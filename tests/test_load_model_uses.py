"""An offloaded model is an ordinary transformers model: sampling, beams, streaming, pipelines."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import finemoe
import pyarrow.parquet as pq
import pytest
from finemoe.policy.core import make_core
from finemoe.realexec import load as load_module
from finemoe.realexec.versions import cache_argument
from finemoe.serving.replay import replay
from tiny_models import EXPERTS, VOCABULARY, tiny_model, torch, transformers

IDS = torch.arange(3, 12)[None]
GIVEN = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("mixtral").save_pretrained(tmp_path)
    return tmp_path


def pair(folder: Path, policy: str = "finemoe", cache: str = "0.5", **options: Any) -> tuple[Any, Any]:
    """The resident model under transformers' grouped kernel, and the offloaded one."""
    resident = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    resident.set_experts_implementation("grouped_mm")
    return resident, finemoe.load_model(folder, policy, cache, **options)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{n}": n for n in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="w2", pad_token="w0", unk_token="w0"
    )


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "temperature": 1.3, "top_k": 20},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "use_cache": False},
    ],
    ids=["sampling", "beams", "several", "no cache"],
)
def test_ways_to_generate(folder: Path, how: dict[str, Any]) -> None:
    texts = []
    for model in pair(folder):
        torch.manual_seed(5)
        texts.append(model.generate(**GIVEN, max_new_tokens=12, **how))
    assert torch.equal(*texts)


def test_streaming_and_pipelines(folder: Path) -> None:
    resident, model = pair(folder)
    wanted = resident.generate(**GIVEN, max_new_tokens=12, do_sample=False)
    streamed = transformers.TextIteratorStreamer(tokenizer())
    model.generate(**GIVEN, max_new_tokens=12, do_sample=False, streamer=streamed)
    assert "".join(streamed).split() == [f"w{n}" for n in wanted[0].tolist()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = [
            transformers.pipeline("text-generation", model=one, tokenizer=tokenizer())(
                ["w5 w6 w7", "w9"], max_new_tokens=6, do_sample=False, batch_size=2
            )
            for one in (resident, model)
        ]
    assert answers[0] == answers[1]


def test_embeddings_in_place_of_ids_and_a_loop_of_ones_own(folder: Path) -> None:
    resident, model = pair(folder)
    outputs: list[Any] = []
    for one in (resident, model):
        embedded = one.get_input_embeddings()(IDS) if one is resident else outputs[0][0]
        first = one(inputs_embeds=embedded, use_cache=True)
        token = first.logits[:, -1:].argmax(-1)
        second = one(input_ids=token, **{cache_argument(one): first.past_key_values})
        outputs.append((embedded, first.logits, second.logits))
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert torch.equal(outputs[0][2], outputs[1][2])


def test_requests_of_a_call_are_forgotten_when_it_returns(folder: Path) -> None:
    _, model = pair(folder, "moe-infinity", log_iterations=-1)
    for _ in range(3):
        model.generate(**GIVEN, max_new_tokens=4, do_sample=False)
    log = model.finemoe.decisions()
    begun = [row for row in log.to_pylist() if row["kind"] == "begin_iteration"]
    ended = [row for row in log.to_pylist() if row["kind"] == "end_iteration"]
    assert len(begun) == len(ended) == 12
    updates = [row for row in log.to_pylist() if row["sub_kind"] == "update"]
    assert len(updates) == 3  # one activation matrix per finished request


@pytest.mark.parametrize("policy", ["finemoe", "lru", "moe-infinity", "promoe", "mixtral-offloading"])
def test_the_log_replays(folder: Path, tmp_path: Path, policy: str) -> None:
    _, model = pair(folder, policy, "0.4", log_iterations=-1)
    model.generate(**GIVEN, max_new_tokens=40, do_sample=False)
    path = tmp_path / "decisions.parquet"
    pq.write_table(model.finemoe.decisions(), path)
    outcome = replay(path)
    assert outcome.identical, outcome
    assert outcome.iterations >= 40


def test_several_devices_share_the_experts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placement and expert parallelism, on two CPU arenas in place of two GPUs."""
    resident = pair(folder)[0]
    monkeypatch.setattr(load_module, "parse_devices", lambda _: [torch.device("cpu")] * 2)
    for cache in ("2slots", "0.5", "1.0"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*token cycle")
            model = finemoe.load_model(folder, "finemoe", cache, device="cuda")
        assert int(make_core(model.finemoe.options).counters()["demand_loads"]) == 0
        wanted = resident.generate(**GIVEN, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(**GIVEN, max_new_tokens=12, do_sample=False), wanted)
        model.finemoe.runtime.engine.drain()
        for device in (0, 1):
            held = model.finemoe.core.residents(device)
            assert held
            assert all(expert % 2 == device and expert < 3 * EXPERTS for expert in held)
        model.finemoe.close()

"""What goes wrong with a real model's files, memory or passes: a clear error or a clean retry, no hang."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from finemoe.errors import CapacityError, FineMoEError, SettingError, TransferError
from finemoe.realexec.checksums import NAME, write_checksums
from finemoe.realexec.load import layout_of, load_model
from tiny_models import VOCABULARY, tiny_model, torch

IDS = {"input_ids": torch.arange(3, 12)[None], "attention_mask": torch.ones(1, 9, dtype=torch.int64)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("mixtral").save_pretrained(tmp_path)
    return tmp_path


def loaded(folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*at or below one token cycle")
        return load_model(folder, "lru", "3slots", progress=False, **options)


def generate(model: Any, tokens: int = 8) -> Any:
    return model.generate(**IDS, max_new_tokens=tokens, do_sample=False)


def weights_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def flip_a_bit_of_the_last_expert(folder: Path) -> None:
    layout = layout_of(folder)
    with weights_file(folder).open("r+b") as file:
        file.seek(int(layout.offset[-1, 0]))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_bit_is_found_when_its_expert_is_first_read(folder: Path) -> None:
    write_checksums(folder, layout_of(folder))
    generate(loaded(folder))
    flip_a_bit_of_the_last_expert(folder)
    with pytest.raises(TransferError, match=r"expert \d+.*checksum"):
        load_model(folder, "no-offload", progress=False)  # reads every expert
    model = load_model(folder, "lru", "1.0")
    with pytest.raises(TransferError, match=r"checksum"):
        generate(model, 200)
    model.finemoe.close()


def test_checksums_of_another_checkpoint_are_refused(folder: Path, tmp_path: Path) -> None:
    write_checksums(folder, layout_of(folder))
    text = (folder / NAME).read_text()
    for damaged in (
        text.replace("[", "[1, ", 1),
        "{}",
        "no JSON",
        text.replace('"crc32c": [', '"crc32c": [-1, '),
    ):
        (folder / NAME).write_text(damaged)
        with pytest.raises(SettingError, match=r"finemoe-checksums\.json.*finemoe model checksum"):
            loaded(folder)


def test_checksums_that_are_a_folder_are_refused(folder: Path) -> None:
    (folder / NAME).mkdir()
    for use in (loaded, lambda folder: write_checksums(folder, layout_of(folder))):
        with pytest.raises(SettingError, match=r"finemoe-checksums\.json is a folder"):
            use(folder)


def test_checksums_that_cannot_be_written_leave_no_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: the last step fails."""
    before = sorted(folder.iterdir())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SettingError, match=r"finemoe-checksums\.json cannot be written \(No space left"):
        write_checksums(folder, layout_of(folder))
    assert sorted(folder.iterdir()) == before


def test_truncated_damaged_and_missing_files_are_named(folder: Path) -> None:
    whole = weights_file(folder).read_bytes()
    for kept, problem in (
        (len(whole) - 1, "truncated"),
        (100, "truncated"),
        (3, "not safetensors"),
        (0, "not"),
    ):
        weights_file(folder).write_bytes(whole[:kept])
        with pytest.raises(SettingError, match=rf"model\.safetensors.*{problem}"):
            loaded(folder)
    weights_file(folder).write_bytes(whole[:8] + b"x" + whole[9:])
    with pytest.raises(SettingError, match="JSON"):
        loaded(folder)
    weights_file(folder).unlink()
    with pytest.raises(SettingError, match=r"neither model\.safetensors nor"):
        loaded(folder)


def test_a_named_pipe_among_the_shards_is_no_hang(folder: Path) -> None:
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "pipe.safetensors"}}')
    with pytest.raises(SettingError, match=r"pipe\.safetensors is a named pipe"):
        loaded(folder)


def test_a_file_that_shrinks_under_a_run_ends_it_with_an_error_that_names_it(folder: Path) -> None:
    model = loaded(folder)
    generate(model)
    os.truncate(weights_file(folder), 1000)
    with pytest.raises(TransferError, match=r"model\.safetensors"):
        generate(model, 64)
    with pytest.raises(FineMoEError, match="reset"):
        generate(model)
    model.finemoe.close()


def test_a_file_that_comes_back_in_time_is_read_again(folder: Path) -> None:
    wanted = generate(loaded(folder), 32)
    whole = weights_file(folder).read_bytes()
    model = loaded(folder)
    generate(model)
    for _ in range(20):  # each time while nothing is being read: the last pass has ended
        os.truncate(weights_file(folder), 1000)
        weights_file(folder).write_bytes(whole)
        assert torch.equal(generate(model, 32), wanted)
    model.finemoe.close()


def test_an_interrupted_pass_leaves_no_thread_and_reset_begins_anew(folder: Path) -> None:
    wanted = generate(loaded(folder))
    before = threading.active_count()
    model = loaded(folder, bandwidth_limit=3e5)  # an expert takes 30 ms
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        generate(model)
    assert time.monotonic() - began_s < 3
    timer.join()
    model.finemoe.reset()
    assert torch.equal(generate(model, 8), wanted)
    model.finemoe.close()
    assert threading.active_count() == before


def test_what_cannot_be_allocated_is_said_with_its_size(folder: Path) -> None:
    with pytest.raises(CapacityError, match=r"slots of .* cannot be allocated"):
        _huge(folder)


def _huge(folder: Path) -> None:
    from finemoe.realexec.devices import make_arenas

    options: Any = {"layers": 1 << 30, "experts": 1 << 20, "slots_per_device": 1 << 40}
    make_arenas(layout_of(folder), options, [torch.device("cpu")])


def test_bad_settings_are_refused_before_any_weight_is_read(folder: Path) -> None:
    weights = weights_file(folder)
    weights.chmod(0o600)
    for options, problem in (
        ({"policy": "finemo"}, "Did you mean finemoe"),
        ({"expert_cache": "1TBs"}, "expert_cache"),
        ({"expert_cache": "10B"}, "holds no expert"),
        ({"device": "tpu"}, "device"),
        ({"device": ["cpu", "cpu"]}, "device"),
        ({"source": "ssd"}, "source"),
        ({"policy": "static"}, "history"),
        ({"pinned_memory": "1GB", "source": "host"}, "pinned_memory"),
    ):
        with pytest.raises(SettingError, match=problem):
            load_model(folder, **options, progress=False)
    with pytest.raises(SettingError, match=r"no config\.json"):
        load_model(folder / "nowhere")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SettingError, match="llama models have no routed experts"):
        load_model(folder)
    if not torch.cuda.is_available():
        with pytest.raises(SettingError, match="no CUDA device"):
            load_model(folder, device="cuda")


def test_two_passes_at_once_and_single_layers_are_refused(folder: Path) -> None:
    model = loaded(folder)
    block = model.model.layers[0].mlp
    with pytest.raises(FineMoEError, match="outside its forward pass"):
        block(torch.zeros(1, 1, 32))
    assert generate(model).shape == (1, 17)
    assert int(generate(model).max()) < VOCABULARY


def without(folder: Path, name: str) -> None:
    """Save the checkpoint again without one tensor."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights_file(folder))
    save_file({key: value for key, value in tensors.items() if key != name}, weights_file(folder))


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"]
)
def test_dense_weights_that_are_missing_are_not_made_up(folder: Path, name: str) -> None:
    without(folder, name)
    with pytest.raises(SettingError, match=f"lack 1 of the model's tensors, {name}"):
        loaded(folder)


def test_a_missing_expert_is_named(folder: Path) -> None:
    without(folder, "model.layers.1.block_sparse_moe.experts.3.w2.weight")
    with pytest.raises(SettingError, match=r"no weights of expert 3 for model\.layers\.1.*down_proj"):
        loaded(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "32"},
        {"hidden_act": "nope"},
        {"dtype": "bogus"},
        {"vocab_size": 97},
        {"num_attention_heads": 5},
        {"num_local_experts": -1},
        {"num_local_experts": 4},
        {"num_experts_per_tok": 0},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_one_clear_error(folder: Path, change: dict[str, Any]) -> None:
    import json

    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SettingError, match=str(folder)):
        loaded(folder)


def test_a_router_that_gives_no_numbers_is_named(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights_file(folder))
    tensors["model.layers.1.block_sparse_moe.gate.weight"][0, 0] = float("nan")
    save_file(tensors, weights_file(folder))
    with pytest.raises(SettingError, match="router of MoE layer 1 gives no numbers"):
        generate(loaded(folder))


def test_embedding_alone_the_decoder_alone_and_a_failed_pass_harm_nothing(folder: Path) -> None:
    wanted = generate(loaded(folder))
    model = loaded(folder)
    model.get_input_embeddings()(IDS["input_ids"])
    hidden = model.model(**IDS).last_hidden_state
    assert torch.equal(model.lm_head(hidden), model(**IDS).logits)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[10_000, 1]]))
    assert torch.equal(generate(model), wanted)
    pads = {
        "input_ids": torch.ones(2, 4, dtype=torch.int64),
        "attention_mask": torch.tensor([[0] * 4, [1] * 4]),
    }
    assert model(**pads).logits.shape == (2, 4, VOCABULARY)
    assert torch.equal(generate(model), wanted)

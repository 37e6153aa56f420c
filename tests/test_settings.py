"""Settings: precedence, validation with remedy, and TOML that reruns exactly."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from finemoe.errors import SettingError
from finemoe.serving.settings import RunSettings, settings_dict
from finemoe.serving.settings_file import resolve, to_toml
from hypothesis import given
from hypothesis import strategies as st


def test_the_defaults_of_the_bare_command_are_assumed() -> None:
    settings = resolve({"trace": Path("azure.parquet"), "seed": None})
    assert settings.trace == "azure.parquet"
    assert (settings.model, settings.hardware, settings.policy) == (
        "mixtral-8x7b",
        ("rtx3090x6",),
        ("finemoe",),
    )
    assert (settings.expert_cache, settings.num_requests, settings.routing) == (("24GB",), 256, "synthetic")
    assert (settings.max_num_seqs, settings.seed, settings.backend) == (8, 0, "sim")
    assert {"model", "hardware", "policy", "expert_cache", "num_requests", "routing"} < set(settings.assumed)
    assert "trace" not in settings.assumed
    assert "warmup" not in settings.assumed  # off is not an assumption


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        'trace = "a.csv"\nmax-num-seqs = 4\nseed = 7\npolicy = "lru, lfu"\nexpert_cache = ["0.25"]\n'
    )
    settings = resolve({"seed": 9}, config)
    assert (settings.trace, settings.max_num_seqs, settings.seed) == ("a.csv", 4, 9)
    assert (settings.policy, settings.expert_cache) == (("lru", "lfu"), ("0.25",))
    assert not {"trace", "max_num_seqs", "seed", "policy", "expert_cache"} & set(settings.assumed)
    assert "model" in settings.assumed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"--trace is missing.*--trace FILE"),
        ({"max_num_seqs": 0}, r"--max-num-seqs is 0\. Give a whole number of 1 or more"),
        ({"max_num_seqs": "many"}, r"--max-num-seqs is 'many'\. Give a whole number"),
        ({"max_num_seqs": "1.5"}, r"--max-num-seqs is '1\.5'\. Give a whole number"),
        ({"rate": "fast"}, r"--rate is 'fast'\. Give a number"),
        ({"rate": "nan"}, r"--rate is nan\. Give a number above 0"),
        ({"max_num_seqs": 1.5}, r"--max-num-seqs is 1\.5\. Give a whole number"),
        ({"max_num_seq": 8}, r"max_num_seq is not a setting\. Did you mean max_num_seqs\?"),
        ({"num_requests": "half"}, r"--num-requests is 'half'\. Give a whole number or all"),
        ({"num_requests": 0}, r"--num-requests is 0"),
        ({"decisions": -1}, r"--decisions is -1"),
        ({"seed": -1}, r"--seed is -1"),
        ({"warmup": -1}, r"--warmup is -1"),
        ({"prefetch_distance": 0}, r"--prefetch-distance is 0"),
        (
            {"backend": "cuda", "model": "m", "pinned_memory": "1GB"},
            r"--pinned-memory is of --backend cuda with --source host",
        ),
        (
            {"backend": "cpu", "model": "m", "source": "host", "pinned_memory": "1GB"},
            r"--pinned-memory is of",
        ),
        ({"sample": 0}, r"--sample is 0\. Give a whole number of 1 or more"),
        ({"rate": "1,,2"}, r"--rate is '1,,2'\. Give a number or a list of numbers"),
        ({"rate": "1,2,1.0"}, r"--rate is 1\.0,2\.0,1\.0\. 1\.0 stands there twice"),
        ({"rate": "1,-2"}, r"--rate is -2\.0\. Give a number above 0"),
        ({"hardware": "h100,h100"}, r"--hardware is h100,h100\. h100 stands there twice"),
        ({"hardware": "h100,"}, r"--hardware is ''\. Give a name or a path"),
        ({"hardware": []}, r"--hardware is \. Give one or more"),
        ({"slo": "ttft<2s"}, r"--slo 'ttft<2s', character 5: a statistic is missing"),
        ({"rate": 0.0}, r"--rate is 0\.0\. Give a number above 0"),
        ({"rate": float("nan")}, r"--rate is nan"),
        ({"time_scale": float("inf")}, r"--time-scale is inf"),
        ({"rate": 2.0, "time_scale": 3.0}, r"excludes --time-scale"),
        ({"offline": True, "rate": 2.0}, r"--offline serves one prompt after another"),
        ({"policy": "lru,,lfu"}, r"--policy is lru,,lfu"),
        ({"policy": "lru,lfu,lru"}, r"lru stands there twice"),
        ({"expert_dtype": "bf61"}, r"--expert-dtype is bf61\. Choose bf16 or .*Did you mean bf16\?"),
        ({"backend": "cuda"}, r"--model is missing\. Give the folder of a checkpoint: --backend cuda"),
        ({"prompts": "p.txt"}, r"--prompts means nothing with --backend sim"),
        (
            {"backend": "cpu", "model": "m", "hardware": "h100"},
            r"--hardware means nothing with --backend cpu\. Leave it out",
        ),
        ({"bandwidth_limit": "2GB"}, r"--bandwidth-limit means nothing with --backend sim"),
        ({"backend": "gpu"}, r"--backend is gpu\. Choose sim"),
        ({"frequency": "runs"}, r"--frequency is runs\. Choose run or residency\. Did you mean run\?"),
        ({"seed": "9" * 23}, r"--seed is 9{23}\. Give a whole number of at most 9223372036854775807"),
        ({"max_num_seqs": "9" * 5000}, r"--max-num-seqs is '9{59}\. Give a whole number"),
        (
            {"num_requests": 2**31},
            r"--num-requests is 2147483648\. Give a whole number of at most 2147483647",
        ),
        ({"num_requests": "٣"}, r"--num-requests is '٣'\. Give a whole number or all"),
        ({"decisions": "9" * 23}, r"--decisions is 9{23}"),
        ({"token_budget": 2**31}, r"--token-budget is 2147483648"),
        ({"store_capacity": 1_000_001}, r"--store-capacity is 1000001\. .* at most 1000000\."),
        ({"prefetch_distance": 4097}, r"--prefetch-distance is 4097\. .* at most 4096\."),
        ({"model": ""}, r"--model is ''\. Give a name or a path"),
        ({"hardware": ""}, r"--hardware is ''\. Give a name or a path"),
        ({"trace": "a\0b"}, r"--trace is 'a\\x00b'\. A path has no NUL character"),
        ({"routing": "x" * 256}, r"--routing is 'x{60}'\. That is too long"),
        ({"trace": "x/" * 2048}, r"--trace is '.*'\. That is too long"),
        ({"trace": "\udcff"}, r"--trace is '\\udcff'\. It is not UTF-8"),
        ({"frequency_decay": 1.5}, r"--frequency-decay is 1\.5"),
    ],
)
def test_bad_values_name_option_value_and_remedy(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        resolve(({"trace": "a.csv"} | options) if options else {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy = 'lru'", r"polcy in .*run\.toml is not a setting\. Did you mean policy\?"),
        ("rate = '1,2'", r"--rate in .*run\.toml is '1,2'\. Give a number or a list of numbers"),
        ("rate = true", r"--rate in .*run\.toml is True\. Give a number or a list of numbers"),
        ("rates = 1", r"rates in .*run\.toml is not a setting\. Did you mean rate\?"),
        ("seed = '1'", r"--seed in .*run\.toml is '1'\. Give a whole number"),
        ("frequency = 1", r"--frequency in .*run\.toml is 1\. Give run or residency"),
        ("offline = 1", r"--offline in .*run\.toml is 1\. Give true or false"),
        ("seed = 1\nseed = 2", r"is not TOML"),
        ("max-num-seqs = 1\nmax_num_seqs = 2", r"stands twice"),
        ("trace = 'a\x00'", r"is not TOML"),
        ('trace = "a\\u0000"', r"--trace is .* NUL"),
        ("seed = " + "9" * 5000, r"is not TOML"),
        ("seed = " + "[" * 100_000, r"run\.toml is (nested too deeply|not TOML)"),
        ('assumed = ["nope"]', r"assumed in .*run\.toml has 'nope', which is no setting"),
        ('assumed = ["modl"]', r"'modl'.* Did you mean model\?"),
        ("assumed = 3", r"--assumed in .*run\.toml is 3"),
    ],
)
def test_bad_files_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(text)
    with pytest.raises(SettingError, match=message):
        resolve({} if "trace" in text else {"trace": "a.csv"}, config)


def test_a_pipe_is_no_settings_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingError, match=r"--config '.*pipe' is a named pipe"):
        resolve({}, tmp_path / "pipe")


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"absent\.toml cannot be read: No such file"):
        resolve({}, tmp_path / "absent.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError, match="is not TOML"):
        resolve({}, binary)


def test_flags_are_texts() -> None:
    settings = resolve({"trace": "a", "seed": "7", "rate": "2.5", "prompt_tokens": "10"})
    assert (settings.seed, settings.rate, settings.prompt_tokens) == (7, (2.5,), 10)


def test_lists_of_machines_and_rates(tmp_path: Path) -> None:
    settings = resolve({"trace": "a", "hardware": "h100, a100-80gb", "rate": "0.5, 1,2"})
    assert (settings.hardware, settings.rate) == (("h100", "a100-80gb"), (0.5, 1.0, 2.0))
    config = tmp_path / "run.toml"
    config.write_text('hardware = ["h100", "my, box.toml"]\nrate = [1, 2.5]\nslo = "ttft_p90 < 2s"\n')
    settings = resolve({"trace": "a"}, config)
    assert (settings.hardware, settings.rate) == (("h100", "my, box.toml"), (1.0, 2.5))
    assert settings.slo == "ttft_p90 < 2s"
    assert resolve({"trace": "a"}).rate == ()


def test_none_and_all_decisions() -> None:
    assert resolve({"trace": "a", "decisions": "none"}).decisions == 0
    assert resolve({"trace": "a", "decisions": "all"}).decisions == "all"
    assert resolve({"trace": "a", "decisions": "50"}).decisions == 50


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)


@given(
    trace=texts,
    seed=st.integers(0, 2**60),
    scale=st.floats(1e-300, 1e300),
    number=st.integers(1, 10**6) | st.just("all"),
    tokens=st.none() | st.integers(1, 1000),
    offline=st.booleans(),
)
def test_resolved_settings_come_back_from_their_toml(
    tmp_path_factory: pytest.TempPathFactory,
    trace: str,
    seed: int,
    scale: float,
    number: int | str,
    tokens: int | None,
    offline: bool,
) -> None:
    options: dict[str, object] = {
        "trace": trace,
        "seed": seed,
        "time_scale": 1.0 if offline else scale,
        "num_requests": number,
        "prompt_tokens": tokens,
        "offline": offline,
    }
    settings = resolve(options)
    file = tmp_path_factory.mktemp("config") / "config.resolved.toml"
    file.write_text(to_toml(settings), "utf-8")
    again = resolve({}, file)
    assert again == settings
    assert resolve({"model": "gpt-oss-20b"}, file).assumed == tuple(
        n for n in settings.assumed if n != "model"
    )


def test_a_real_run_has_its_own_settings_and_no_machines(tmp_path: Path) -> None:
    settings = resolve({"trace": "a", "backend": "cpu", "model": "m", "bandwidth_limit": "2GB/s"})
    assert settings.expert_cache == ("0.5",)
    assert {"expert_cache", "source"} < set(settings.assumed)
    assert not {"hardware", "routing", "dense"} & set(settings.assumed)
    file = tmp_path / "config.resolved.toml"
    file.write_text(to_toml(settings), "utf-8")
    assert "hardware" not in file.read_text("utf-8")
    assert resolve({}, file) == settings
    assert {"source", "bandwidth_limit"} < set(settings_dict(settings))
    assert "peer_link" not in settings_dict(settings)
    assert "source" not in settings_dict(resolve({"trace": "a"}))
    file.write_text(to_toml(settings) + 'hardware = ["h100"]\n', "utf-8")
    with pytest.raises(SettingError, match=r"--hardware in .*\.toml means nothing with --backend cpu"):
        resolve({}, file)


def test_a_float_written_without_a_point_is_a_number(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("rate = 3\n")
    assert resolve({"trace": "a"}, config).rate == (3.0,)


def test_settings_cannot_be_changed() -> None:
    settings = RunSettings(trace="a")
    with pytest.raises(AttributeError):
        settings.seed = 3  # type: ignore[misc]
    assert msgspec.structs.replace(settings, seed=3).seed == 3

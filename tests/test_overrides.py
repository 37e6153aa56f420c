"""Figures of a profile changed by `--set` and `--host-memory`."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from finemoe.calibration.figures import MAX_DEVICES
from finemoe.calibration.profile import apply_overrides, load_machine, load_profile
from finemoe.cli.simulate import app
from finemoe.errors import SettingError
from finemoe.serving.settings_file import resolve, to_toml
from finemoe.sim.run import simulate
from typer.testing import CliRunner

ONE, SIX = load_profile("rtx3090"), load_profile("rtx3090x6")
ROOT = Path(__file__).resolve().parents[1]
SAMPLE = "traces/samples/azure_conv_synthetic.parquet"


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("link.bandwidth=55GB/s", "link_bandwidth", 55e9),
        ("link_bandwidth = 55 GB/s", "link_bandwidth", 55e9),
        ("peer.latency=3us", "peer_latency_s", 3e-6),
        ("peer_latency_s=3us", "peer_latency_s", 3e-6),
        ("host.memory=64GB", "host_memory_bytes", 64 * 10**9),
        ("host.memory_bytes=64GiB", "host_memory_bytes", 64 * 2**30),
        ("copy.slowdown=1.5", "copy_slowdown", 1.5),
        ("memory.efficiency=.5", "memory_efficiency", 0.5),
        ("search.rate=6.2e9values/s", "search_rate", 6.2e9),
        ("devices=2", "devices", 2),
        ("ssd.bandwidth=3500MB/s", "ssd_bandwidth", 3.5e9),
    ],
)
def test_a_figure_is_replaced_and_its_label_says_so(text: str, name: str, value: float) -> None:
    changed = apply_overrides(SIX, [text])
    assert getattr(changed, name) == value
    assert changed.evidence()[name][2:] == ("ASSUMED", "--set")
    for other in SIX.__struct_fields__:
        if other not in (name, "figures", "description"):
            assert getattr(changed, other) == getattr(SIX, other)
    assert changed.description == f"{SIX.description}; --set changed {name}"
    assert {key: f for key, f in changed.figures.items() if key != name} == {
        key: f for key, f in SIX.figures.items() if key != name
    }


def test_nothing_given_changes_nothing() -> None:
    assert apply_overrides(SIX, []) is SIX
    assert load_machine("rtx3090x6") == SIX


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["link.bandwith=55GB/s"], r"--set link\.bandwith is no figure .* Did you mean link_bandwidth\?"),
        (["nonsense=1"], r"--set nonsense is no figure of a profile\. docs/models-and-hardware\.md"),
        (["name=mine"], r"--set name is no figure"),
        (["link.bandwidth"], r"'link\.bandwidth' has no value\. Write it as link\.bandwidth=55GB/s"),
        ([""], r"'' has no value"),
        (
            ["link.bandwidth="],
            r"--set link\.bandwidth is ''\. Give a number with one of the units B/s, .*GB/s",
        ),
        (["link.bandwidth=55"], r"is '55'\. Give a number with one of the units"),
        (["link.bandwidth=55GB"], r"is '55GB'\. Give a number with one of the units"),
        (["link.bandwidth=55 Gb/s"], r"is '55 Gb/s'"),
        (["link.bandwidth=fast"], r"is 'fast'"),
        (["link.bandwidth=nanGB/s"], r"is 'nanGB/s'"),
        (["link.bandwidth=٣GB/s"], r"is '٣GB/s'"),
        (["link.bandwidth=0GB/s"], r"--set: link_bandwidth\.value is 0; a finite number at least 1000"),
        (["link.bandwidth=-1GB/s"], r"link_bandwidth\.value is -1; a finite number at least 1000"),
        (["link.bandwidth=1e999GB/s"], r"link_bandwidth\.value is inf; a finite number"),
        (["link.bandwidth=" + "9" * 5000 + "GB/s"], r"link_bandwidth\.value is inf"),
        (["devices=2GB"], r"--set devices is '2GB'\. Give a bare number"),
        (["devices=2 1"], r"--set devices is '2 1'\. Give a bare number"),
        (["devices=1.5"], r"devices\.value is 1\.5 1; a whole number"),
        (["devices=59"], rf"devices\.value is 59; .* at most {MAX_DEVICES}"),
        (["copy.slowdown=0.9"], r"copy_slowdown\.value is 0\.9; .* at least 1"),
        (["memory.reserve=24GB"], r"memory_reserve_bytes leaves nothing"),
        (["devices=2", "devices=3"], r"--set gives devices twice"),
        (["host.memory=1GB", "host_memory_bytes=2GB"], r"--set gives host_memory_bytes twice"),
        (["peer.latency=3us"], r"peer_latency_s has no meaning with one device"),
    ],
)
def test_bad_overrides_name_the_option_and_the_remedy(texts: list[str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        apply_overrides(ONE, texts)


def test_more_devices_need_peer_figures_or_pcie() -> None:
    with pytest.raises(SettingError) as caught:
        apply_overrides(ONE, ["devices=2"])
    message = str(caught.value)
    assert "2 devices need peer figures" in message
    assert "--set peer.latency=… --set peer.bandwidth=…" in message
    assert "--peer-link pcie" in message
    with pytest.raises(SettingError, match=r"Add --set peer\.latency=…, such as"):
        apply_overrides(ONE, ["devices=2", "peer.bandwidth=50GB/s"])
    two = apply_overrides(ONE, ["devices=2", "peer.latency=3us", "peer.bandwidth=50GB/s"])
    assert (two.devices, two.peer_latency_s, two.peer_bandwidth) == (2, 3e-6, 50e9)
    pcie = apply_overrides(ONE, ["devices=2"], peer_needed=False)
    assert (pcie.devices, pcie.peer_bandwidth) == (2, None)


def test_one_device_of_several_has_no_peer_figures() -> None:
    one = apply_overrides(SIX, ["devices=1"])
    assert (one.devices, one.peer_latency_s, one.peer_bandwidth) == (1, None, None)
    assert not {"peer_latency_s", "peer_bandwidth"} & set(one.evidence())


def test_an_ssd_has_latency_and_bandwidth() -> None:
    bare = apply_overrides(ONE, ["ssd.latency=80us"])
    assert bare.ssd_latency_s == 80e-6
    without = {key: figure for key, figure in ONE.figures.items() if not key.startswith("ssd")}
    plain = msgspec.structs.replace(ONE, ssd_latency_s=None, ssd_bandwidth=None, figures=without)
    with pytest.raises(SettingError, match=r"ssd_latency_s is missing\. Give it as well: --set ssd\.latency"):
        apply_overrides(plain, ["ssd.bandwidth=3GB/s"])
    both = apply_overrides(plain, ["ssd.bandwidth=3GB/s", "ssd.latency=90us"])
    assert (both.ssd_bandwidth, both.ssd_latency_s) == (3e9, 9e-5)


def test_host_memory_is_an_override_of_its_own() -> None:
    machine = load_machine("rtx3090", host_memory="64GB")
    assert machine.host_memory_bytes == 64 * 10**9
    assert machine.evidence()["host_memory_bytes"][2:] == ("ASSUMED", "--host-memory")
    for bad, word in (
        ("64", "is '64'. Give a number with one of the units"),
        ("0GB", "a finite number above 0"),
    ):
        with pytest.raises(SettingError, match="--host-memory") as caught:
            load_machine("rtx3090", host_memory=bad)
        assert word in str(caught.value)
    with pytest.raises(SettingError, match=r"--host-memory and --set host\.memory are the same"):
        load_machine("rtx3090", ["host.memory=32GB"], host_memory="64GB")


def test_the_settings_carry_overrides_through_a_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    given = resolve(
        {
            "trace": "a",
            "set": ["link.bandwidth=55GB/s", "devices=2"],
            "host_memory": "64GB",
            "dense": "replicated",
            "peer_link": "pcie",
        }
    )
    assert given.set == ("link.bandwidth=55GB/s", "devices=2")
    file = tmp_path_factory.mktemp("config") / "run.toml"
    file.write_text(to_toml(given), "utf-8")
    assert resolve({}, file) == given
    assert resolve({"trace": "a", "set": "devices=2, copy.slowdown=1.5"}).set == (
        "devices=2",
        "copy.slowdown=1.5",
    )
    assert resolve({"trace": "a"}).set == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"set": 3}, r"--set is 3\. Give a text or a list of texts"),
        ({"host_memory": 64}, r"--host-memory is 64\. Give a text"),
        ({"dense": "replicate"}, r"--dense is replicate\. Choose device0 or replicated\. Did you mean repl"),
        ({"peer_link": "pci"}, r"--peer-link is pci\. Choose nvlink or pcie\. Did you mean pcie\?"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        resolve({"trace": "a"} | options)


def test_the_flag_is_repeated() -> None:
    chosen = ["--set", "link.bandwidth=55GB/s", "--set", "host.memory=64GB", "--peer-link", "pcie"]
    arguments = ["--trace", str(ROOT / SAMPLE), "--num-requests", "1", *chosen, "--dry-run", "--json"]
    result = CliRunner().invoke(app, arguments)
    plan = json.loads(result.stdout)
    assert plan["config"]["set"] == ["link.bandwidth=55GB/s", "host.memory=64GB"]
    assert plan["config"]["peer_link"] == "pcie"
    assert plan["plan"][0]["memory"]["host_slots"] == 181


def test_a_run_says_what_was_changed(tmp_path_factory: pytest.TempPathFactory) -> None:
    results = simulate(
        ROOT / SAMPLE,
        output=tmp_path_factory.mktemp("run") / "out",
        num_requests=1,
        output_tokens=2,
        policy="lru",
        decisions=0,
        set=["link.bandwidth=55GB/s"],
        host_memory="64GB",
    )
    evidence = results.evidence
    assert "link_bandwidth" in evidence["hardware"]["rtx3090x6"]["ASSUMED"]
    sources = evidence["hardware_sources"]["rtx3090x6"]
    assert sources["link_bandwidth"] == "55 GB/s ASSUMED: --set"
    assert sources["host_memory_bytes"] == "64 GB ASSUMED: --host-memory"
    (run,) = results.runs
    assert run.counters["ssd_bytes"] == run.counters["host_misses"] * 352321536
    assert any(note.startswith("SSD: ") for note in run.notes)

"""Hardware profiles: every shipped figure has its provenance, and bad files are refused by key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from finemoe.calibration.figures import EVIDENCE, MAX_DEVICES, Figure, base_value
from finemoe.calibration.profile import PROFILE_FOLDER, load_profile, profile_names
from finemoe.errors import SettingError
from hypothesis import given
from hypothesis import strategies as st

NAMES = ("a100-80gb", "gh200", "h100", "h200", "rtx3090", "rtx3090x6", "rtx4090")


def test_the_seven_profiles_ship() -> None:
    assert profile_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_unit_source_and_evidence(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    for field in profile.__struct_fields__:
        value = getattr(profile, field)
        if isinstance(value, int | float):
            _, unit, evidence, source = profile.evidence()[field]
            assert unit
            assert evidence in EVIDENCE
            assert len(source.split()) >= 4, f"{field}: {source!r} says too little"


def test_figures_in_base_units() -> None:
    profile = load_profile("rtx3090x6")
    assert profile.devices == 6
    assert profile.device_memory_bytes == 24 * 10**9
    assert profile.link_bandwidth == 23.9e9
    assert profile.link_latency_s == 12e-6
    assert profile.link_chunk_bytes == 4 * 2**20
    assert profile.kernel_launch_s == 5e-6
    assert profile.peer_bandwidth == 56.25e9
    assert profile.peak_flops == 71e12
    assert profile.evidence()["link_bandwidth"][:3] == (23.9, "GB/s", "MEASURED")


@pytest.mark.parametrize("name", NAMES)
def test_derived_figures_follow_from_the_others(name: str) -> None:
    profile = load_profile(name)
    reachable = profile.memory_bandwidth * profile.memory_efficiency
    assert profile.copy_slowdown == pytest.approx(1 + profile.link_bandwidth / reachable, abs=6e-4)
    assert 0 < profile.memory_reserve_bytes < 0.1 * profile.device_memory_bytes
    h200 = load_profile("h200")
    assert h200.memory_bandwidth * h200.memory_efficiency == pytest.approx(4.3e12, rel=0.001)
    assert 770e12 < h200.peak_flops * h200.flops_efficiency < 800e12
    # A pinned copy of 0.86 MB was measured at 27 us.
    assert h200.link_latency_s + 0.86e6 / h200.link_bandwidth == pytest.approx(27e-6, rel=0.01)


def test_single_device_has_no_peer_figures() -> None:
    profile = load_profile("h200")
    assert profile.peer_latency_s is None
    assert profile.peer_bandwidth is None
    assert "peer_bandwidth" not in profile.evidence()


def changed(folder: Path, old: str, new: str, base: str = "rtx3090x6") -> Path:
    """A copy of a shipped profile with the one place `old` replaced by `new`."""
    text = (PROFILE_FOLDER / f"{base}.toml").read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    path = folder / "mine.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


LINK = '[link_bandwidth]\nvalue = 23.9\nunit = "GB/s"'


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[link_bandwidth]", "[link_bandwith]", ["link_bandwith is unknown", "Did you mean link_bandwidth?"]),
        (LINK, LINK.replace("unit", "units"), ["link_bandwidth.units is unknown", "Did you mean unit?"]),
        (LINK, LINK.replace("GB/s", "GB"), ["link_bandwidth.unit is 'GB'", "GB/s"]),
        (LINK, LINK.replace("23.9", "-1"), ["link_bandwidth.value is -1", "at least 1000"]),
        (LINK, LINK.replace("23.9", "0"), ["link_bandwidth.value is 0"]),
        (LINK, LINK.replace("23.9", "nan"), ["link_bandwidth.value is nan"]),
        (LINK, LINK.replace("23.9", "inf"), ["link_bandwidth.value is inf"]),
        (LINK, LINK.replace("23.9", "true"), ["link_bandwidth"]),
        (LINK, LINK.replace("23.9", '"fast"'), ["link_bandwidth"]),
        (LINK, LINK.replace("value = 23.9\n", ""), ["link_bandwidth", "value"]),
        ("[devices]\nvalue = 6", "[devices]\nvalue = 2.5", ["devices.value is 2.5", "whole number"]),
        ("[devices]\nvalue = 6", "[devices]\nvalue = 58", ["devices.value is 58", "at most 57"]),
        ("[copy_slowdown]\nvalue = 1.028", "[copy_slowdown]\nvalue = 0.9", ["copy_slowdown", "at least 1"]),
        ("[memory_efficiency]\nvalue = 0.896", "[memory_efficiency]\nvalue = 1.2", ["at most 1"]),
        ("[memory_reserve_bytes]\nvalue = 2", "[memory_reserve_bytes]\nvalue = 24", ["leaves nothing"]),
        ("[devices]\nvalue = 6", "[devices]\nvalue = 1", ["peer_latency_s has no meaning with one device"]),
        ('name = "rtx3090x6"\n', "", ["name is missing"]),
        ('name = "rtx3090x6"', 'name = "x"\nsearch_speed = 3', ["search_speed is unknown"]),
        ('name = "rtx3090x6"', 'name = "x', ["not TOML"]),
    ],
)
def test_refused_files_name_file_and_key(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    path = changed(tmp_path, old, new)
    with pytest.raises(SettingError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    for word in words:
        assert word in message


def without(folder: Path, *keys: str) -> Path:
    """A copy of a shipped profile without some figures."""
    text = (PROFILE_FOLDER / "rtx3090x6.toml").read_text(encoding="utf-8")
    tables = [table for table in text.split("\n\n") if not any(f"[{key}]" in table for key in keys)]
    path = folder / "mine.toml"
    path.write_text("\n\n".join(tables), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "key", ["devices", "link_bandwidth", "peer_bandwidth", "search_rate", "ssd_bandwidth", "ssd_latency_s"]
)
def test_missing_figures_are_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(SettingError, match=rf"mine\.toml: {key} is missing\. Add a table"):
        load_profile(without(tmp_path, key))


def test_ssd_and_host_bandwidth_can_be_left_out(tmp_path: Path) -> None:
    profile = load_profile(without(tmp_path, "ssd_bandwidth", "ssd_latency_s", "host_bandwidth"))
    assert (profile.ssd_bandwidth, profile.ssd_latency_s, profile.host_bandwidth) == (None, None, None)


@pytest.mark.parametrize("name", NAMES)
def test_host_memory_keeps_up_with_the_shipped_machines_links(name: str) -> None:
    profile = load_profile(name)
    assert profile.host_bandwidth is not None
    assert profile.devices * profile.link_bandwidth <= profile.host_bandwidth


@pytest.mark.parametrize(("field", "value"), [("evidence", "GUESSED"), ("source", " ")])
def test_provenance_is_checked(tmp_path: Path, field: str, value: str) -> None:
    path = tmp_path / "mine.toml"
    lines = (PROFILE_FOLDER / "h200.toml").read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{field} ="))
    lines[at] = f'{field} = "{value}"'
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(SettingError, match="devices"):
        load_profile(path)


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"'rtx3090x5' is unknown\. Did you mean rtx3090x6\?"):
        load_profile("rtx3090x5")
    with pytest.raises(SettingError, match=r"none\.toml: cannot be read"):
        load_profile(tmp_path / "none.toml")


@given(st.decimals(min_value="0.001", max_value=999, places=3, allow_nan=False))
def test_units_convert_exactly(value: object) -> None:
    figure = Figure(value=float(str(value)), unit="us", source="a test", evidence="ASSUMED")
    assert base_value("x", "link_latency_s", figure) == float(f"{value}e-6")


def test_the_documentation_shows_these_figures() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "models-and-hardware.md").read_text(
        encoding="utf-8"
    )
    columns = ("rtx3090x6", "rtx3090", "rtx4090", "a100-80gb", "h100", "h200", "gh200")
    assert f"| figure | {' | '.join(columns)} |" in page
    evidences = [load_profile(name).evidence() for name in columns]
    for key in evidences[0]:
        cells = []
        for evidence in evidences:
            value, unit, label, _ = evidence.get(key, (0, "", "", ""))
            cells.append(f"{value:g} {'' if unit == '1' else unit + ' '}{label[0]}" if label else "–")
        assert f"| `{key}` | {' | '.join(cells)} |" in page


def test_the_most_devices_are_the_core_s(tmp_path: Path) -> None:
    header = (Path(__file__).resolve().parents[1] / "csrc" / "types.hpp").read_text()
    assert f"kMaxDevices = {MAX_DEVICES};" in header
    path = changed(tmp_path, "[devices]\nvalue = 6", f"[devices]\nvalue = {MAX_DEVICES}")
    assert load_profile(path).devices == MAX_DEVICES


def test_what_is_no_profile_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingError, match=r"pipe: this is a named pipe"):
        load_profile(tmp_path / "pipe")
    (tmp_path / "deep.toml").write_text("name = " + "[" * 100_000)
    with pytest.raises(SettingError, match=r"deep\.toml: (nested too deeply|not TOML)"):
        load_profile(tmp_path / "deep.toml")
    for name in ("", "x" * 300):
        with pytest.raises(SettingError, match=f"--hardware '{name}' is unknown"):
            load_profile(name)

"""The commands: exit codes, one-line errors, what goes to which stream, and a start without heavy imports."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finemoe.cli.simulate import simulate_command
from finemoe.serving.settings import RunSettings

SIM = "from finemoe.cli.entry import simulate_main; simulate_main()"
VERB = "from finemoe.cli.entry import main; main()"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def command(*arguments: str, code: str = SIM) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def run(*arguments: str, code: str = SIM, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, code=code), capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, check=False
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve requests, two a second."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"{i / 2},{20 + i},{3 + i % 3}\n" for i in range(12))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    return path


def small(trace: Path, *more: str) -> tuple[str, ...]:
    return ("--trace", str(trace), "--model", "gpt-oss-20b", "--num-requests", "4", *more)


@pytest.mark.parametrize("code", [SIM, VERB])
def test_help_imports_nothing_heavy(code: str) -> None:
    """What keeps `--help` under half a second: the time itself is the machine's."""
    heavy = ("numpy", "pyarrow", "scipy", "simpy", "torch", "finemoe._core", "finemoe.sim.run")
    probe = (
        f"import sys; sys.argv = ['x', '--help']\ntry:\n    {code.replace('; ', chr(10) + '    ')}\n"
        f"finally:\n    print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = run(code=probe)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    assert "Usage:" in done.stdout


def test_the_flags_are_the_settings() -> None:
    parameters = set(simulate_command.__annotations__) - {"return"}
    beside = {"config", "output", "as_json", "dry_run", "quiet", "version", "replay"}
    assert parameters - beside == set(RunSettings.__struct_fields__) - {"assumed"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--trace is missing"),
        (("--polcy", "lru"), "No such option"),
        (("--trace", "{trace}", "--seed", "one"), "--seed is 'one'. Give a whole number."),
        (("--trace", "absent.csv"), "absent.csv"),
        (("--trace", "{trace}", "--backend", "cuda"), "--model is missing"),
        (("--trace", "{trace}", "--backend", "cpu", "--model", "m", "--set", "a=1"), "--set means nothing"),
        (("--trace", "{trace}", "--policy", "fine"), "finemoe"),
        (("--trace", "{trace}", "--model", "mixtrl"), "mixtral"),
        (("--trace", "{trace}", "--hardware", "rtx4090"), "rtx4090"),
        (("--trace", "{trace}", "--expert-cache", "24XB"), "24XB"),
        (("--trace", "{trace}", "--expert-cache", "1slots"), "device"),
        (("--trace", "{trace}", "--warmup", "12"), "--warmup is 12, but 12 requests"),
        (("--trace", "{trace}", "--hardware", "rtx3090", "--policy", "no-offload"), "dense weights"),
        (("--trace", "{trace}", "--output", "{folder}"), "trace.csv, which is not FineMoE's"),
        (("--trace", "{trace}", "--config", "{trace}"), "is not TOML"),
        (("--trace", "{trace}", "--hardware", ""), "--hardware is ''"),
        (("--trace", "{trace}", "--model", ""), "--model is ''"),
        (("--trace", "{trace}", "--num-requests", "9" * 23), "--num-requests is 999"),
        (("--trace", "{trace}", "--seed", "9" * 5000), "--seed is '999"),
        (("--trace", "{trace}", "--expert-cache", "٢٤GB"), "--expert-cache '٢٤GB' is no size"),
        (("--trace", "{trace}", "--time-scale", "1e308"), "--time-scale is 1e+308"),
        (("--trace", "{trace}", "--output", ""), "--output is '.'"),
        (("--trace", "{trace}", "--output", "/", "--dry-run"), "--output is '/'"),
        (("--trace", "{trace}", "--output", "{trace}"), "a file of that name"),
        (("--trace", "/dev/zero"), "this is a device"),
        (("--trace", "{trace}", "--config", "/dev/zero"), "--config '/dev/zero' is a device"),
        (("--trace", "{trace}", "--model", "/dev/zero"), "this is a device"),
        (("--trace", "{trace}", "--hardware", "/dev/zero"), "this is a device"),
        (("--trace", "{trace}", "--routing", "/dev/zero"), "this is a device"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    places = {"trace": str(trace), "folder": str(trace.parent)}
    done = run(*(argument.format(**places) for argument in arguments), cwd=trace.parent)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" or "ASSUMED" in done.stdout
    assert done.stderr.startswith("finemoe: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (trace.parent / "finemoe-results").exists()


def test_a_run_prints_defaults_table_evidence_and_directory(trace: Path) -> None:
    done = run(*small(trace), cwd=trace.parent)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress bar in a pipe
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assumed = next(line for line in lines if line.startswith("ASSUMED"))
    for text in ("hardware rtx3090x6", "policy finemoe", "expert-cache 24GB", "routing synthetic", "seed 0"):
        assert text in assumed
    assert "model" not in assumed
    assert any(line.split()[:2] == ["finemoe", "24GB"] and line.split()[-1] == "OK" for line in lines)
    assert any(line.startswith("evidence") and "all figures SIMULATED" in line for line in lines)
    assert lines[-1] == "results   finemoe-results/0001"
    names = {path.name for path in (trace.parent / "finemoe-results" / "0001").iterdir()}
    assert {"summary.json", "requests.parquet", "iterations.parquet", "config.resolved.toml"} < names
    assert run(*small(trace), cwd=trace.parent).stdout.splitlines()[-1] == "results   finemoe-results/0002"


def test_json_is_all_there_is_on_stdout(trace: Path) -> None:
    done = run(*small(trace, "--policy", "lru,no-offload", "--json"), cwd=trace.parent)
    assert done.returncode == 0, done.stderr
    payload = json.loads(done.stdout)
    assert {"runs", "config", "trace", "evidence", "version"} <= set(payload)
    assert [(run["policy"], run["status"]) for run in payload["runs"]] == [
        ("lru", "OK"),
        ("no-offload", "OK"),
    ]
    lru = payload["runs"][0]
    assert set(lru["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    for name in ("ttft_service_s", "queue_s", "tpot_s", "e2e_s"):
        assert lru[name]["p99"] >= lru[name]["p50"] >= 0
    assert 0 <= lru["hit_rate"] <= 1
    assert lru["wall_s"] > 0
    assert lru["expert_cache_bytes"] == 24 * 10**9
    stored = json.loads((trace.parent / "finemoe-results" / "0001" / "summary.json").read_text())
    for one in payload["runs"]:
        del one["wall_s"]
    assert stored == payload


def test_a_sweep_prints_slo_and_saturation_in_160_columns(trace: Path) -> None:
    grid = ("--rate", "0.1,50", "--hardware", "rtx3090,rtx3090x6", "--policy", "lru,no-offload")
    slo = ("--slo", "ttft_p90<500ms,tpot_p99<50ms", "--max-num-seqs", "1", "--expert-cache", "0.5")
    done = run(*small(trace, *grid, *slo), cwd=trace.parent)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    told = ("trace ", "routing ", "machine ", "ASSUMED ", "evidence ", "DOES NOT FIT")
    assert max(len(line) for line in lines if not line.startswith(told)) <= 160
    assert "at 0.1, 50 requests/s" in lines[0]
    rows = [line.split() for line in lines]
    assert ["no-offload", "all", "rtx3090x6", "50/s"] in [row[:4] for row in rows]
    slow = next(row for row in rows if row[:4] == ["lru", "0.5", "rtx3090x6", "0.1/s"] and row[-1] == "met")
    assert slow[-3] == "100.0%"
    assert any(row[:4] == ["lru", "0.5", "rtx3090x6", "50/s"] and row[-1] == "missed" for row in rows)
    assert ["lru", "0.5", "0.1/s", "0.1/s", "0.1,", "50"] in rows
    assert lines[-1] == "results   finemoe-results/0001"


def test_quiet_prints_nothing(trace: Path) -> None:
    done = run(*small(trace, "--quiet"), cwd=trace.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = run(*small(trace, "--quiet", "--json"), cwd=trace.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["partial"] is False


def test_a_dry_run_shows_the_plan_and_runs_nothing(trace: Path) -> None:
    grid = (
        "--policy",
        "lru,no-offload",
        "--expert-cache",
        "0.25,96slots",
        "--hardware",
        "rtx3090",
        "--dry-run",
    )
    done = run(*small(trace, *grid), cwd=trace.parent)
    assert done.returncode == 0, done.stderr
    assert "prefetch_distance = 3" in done.stdout  # the model's own, resolved
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["lru", "0.25", "192"] in [row[:3] for row in rows]
    assert ["lru", "96slots", "96"] in [row[:3] for row in rows]
    assert "DOES NOT FIT: rtx3090" in done.stdout
    assert "at or below one token cycle" in done.stdout
    assert not (trace.parent / "finemoe-results").exists()
    plan = json.loads(run(*small(trace, *grid, "--json"), cwd=trace.parent).stdout)["plan"]
    assert [(cell["policy"], cell["expert_cache"], cell["status"][:4]) for cell in plan] == [
        ("lru", "0.25", "fits"),
        ("lru", "96slots", "fits"),
        ("no-offload", "all", "DOES"),
    ]
    assert plan[0]["memory"]["slots"] == 192


@pytest.mark.parametrize(
    ("more", "folder"),
    [
        ((), "lru-24GB"),
        (
            ("--hardware", "rtx3090x6,a100-80gb", "--rate", "0.5,20", "--slo", "ttft_p90<2s, tpot_p90<200ms"),
            "lru-24GB-a100-80gb-20rps",
        ),
    ],
)
def test_a_resolved_config_reruns_to_the_same_bytes(trace: Path, more: tuple[str, ...], folder: str) -> None:
    grid = ("--policy", "lru,finemoe", "--seed", "3", "--output", "one", "--quiet", *more)
    assert run(*small(trace, *grid), cwd=trace.parent).returncode == 0
    again = run("--config", "one/config.resolved.toml", "--output", "two", "--quiet", cwd=trace.parent)
    assert again.returncode == 0, again.stderr
    one, two = trace.parent / "one", trace.parent / "two"
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(two)) for path in two.rglob("*") if path.is_file())
    assert f"{folder}/decisions.parquet" in names
    assert f"{folder}/timeseries.parquet" in names
    differing = [name for name in names if (one / name).read_bytes() != (two / name).read_bytes()]
    assert differing == ["wall.json"]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def test_ctrl_c_keeps_finished_cells(tmp_path: Path) -> None:
    """The first cell is short, the second, on one slot per device, long enough to be interrupted."""
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i / 100},500,300\n" for i in range(16))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    arguments = command(
        *("--trace", str(trace), "--model", "gpt-oss-20b", "--policy", "no-offload,finemoe", "--json"),
        *("--expert-cache", "6slots", "--output", "out", "--decisions", "none"),
    )
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=ENVIRONMENT
    ) as process:
        wait_for(tmp_path / "out.partial" / "no-offload-all" / "iterations.parquet", process)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.startswith("finemoe: interrupted; finished runs are kept in out\n")
    for payload in (json.loads(out), json.loads((tmp_path / "out" / "summary.json").read_text())):
        assert payload["partial"] is True
        assert [run["status"] for run in payload["runs"]][1] == "NOT RUN: interrupted"
        assert payload["runs"][0]["iterations"] > 0
    assert (tmp_path / "out" / "no-offload-all" / "requests.parquet").exists()


def test_ctrl_c_before_any_cell_is_finished_says_so(tmp_path: Path) -> None:
    """The simulation of the only cell would take minutes."""
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i / 100},500,3000\n" for i in range(64))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    arguments = command("--trace", str(trace), "--model", "gpt-oss-20b", "--output", "out")
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=ENVIRONMENT
    ) as process:
        wait_for(tmp_path / "out.partial", process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "finemoe: interrupted, nothing was kept\n")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


def test_the_progress_bar_is_for_terminals(trace: Path) -> None:
    leader, follower = pty.openpty()
    arguments = command(*small(trace, "--output-tokens", "200"))
    with subprocess.Popen(
        arguments, stdout=follower, stderr=follower, cwd=trace.parent, env=ENVIRONMENT | {"TERM": "xterm"}
    ) as process:
        os.close(follower)
        shown = b""
        while select.select([leader], [], [], 60)[0]:
            try:
                part = os.read(leader, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(leader)
    assert process.returncode == 0, shown
    text = shown.decode()
    for word in ("1/1 finemoe 24GB", "s simulated", "iterations/s", "ETA"):
        assert word in text
    assert "results   finemoe-results/0001" in text


def test_trace_info_and_convert(trace: Path) -> None:
    out = trace.parent / "trace.parquet"
    done = run("trace", "convert", str(trace), str(out), code=VERB)
    assert done.returncode == 0, done.stderr
    assert "12 requests over 5.5 s" in done.stdout
    for path in (trace, out):
        done = run("trace", "info", str(path), code=VERB)
        assert done.returncode == 0, done.stderr
        assert "requests      12" in done.stdout
        assert "rate          2 requests/s" in done.stdout
    info = json.loads(run("trace", "info", str(out), "--json", code=VERB).stdout)
    assert (info["requests"], info["span_s"]) == (12, 5.5)


def test_backward_time_stamps_need_sort(trace: Path) -> None:
    lines = trace.read_text().splitlines()
    lines[1], lines[5] = lines[5], lines[1]
    trace.write_text("\n".join(lines) + "\n")
    for arguments, code in ((("trace", "info", str(trace)), VERB), (small(trace), SIM)):
        done = run(*arguments, code=code, cwd=trace.parent)
        assert done.returncode == 2
        assert "--sort" in done.stderr
        assert done.stderr.count("\n") == 1
    assert run("trace", "info", str(trace), "--sort", code=VERB).returncode == 0
    assert run(*small(trace, "--sort", "--quiet"), cwd=trace.parent).returncode == 0


def test_systems_are_listed() -> None:
    done = run("systems", code=VERB)
    listed = [line.split()[0] for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert {"finemoe", "lru", "lfu", "deepspeed", "no-offload", "oracle"} <= set(listed)
    names = [system["name"] for system in json.loads(run("systems", "--json", code=VERB).stdout)]
    assert set(names) <= set(listed)


@pytest.mark.parametrize("arguments", [(), ("trace",)])
def test_a_group_without_a_verb_shows_its_help(arguments: tuple[str, ...]) -> None:
    done = run(*arguments, code=VERB)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Commands:" in done.stdout


def test_version_and_module(trace: Path) -> None:
    assert run("--version").stdout == "finemoe 0.1.0\n"
    module = subprocess.run(
        [sys.executable, "-m", "finemoe", "--version"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert module.stdout == "finemoe 0.1.0\n"
    assert run("sim", *small(trace, "--quiet"), code=VERB, cwd=trace.parent).returncode == 0


def test_a_closed_pipe_is_no_traceback(trace: Path) -> None:
    with subprocess.Popen(
        command("--help"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


INTERRUPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("module", ["typer", "rich", "numpy", "finemoe.sim.plan", "pyarrow", "simpy"])
def test_ctrl_c_during_imports_is_quiet(trace: Path, module: str) -> None:
    """The signal comes at the moment when that module is about to be imported."""
    code = INTERRUPT.format(module=module) + SIM
    done = run(*small(trace, "--output", "out"), code=code, cwd=trace.parent)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 1
    assert [path.name for path in trace.parent.iterdir()] == ["trace.csv"]


def test_a_failing_system_call_is_one_line(trace: Path) -> None:
    """A file-size limit stands in for a full disk."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
    done = run(*small(trace, "--output", "out", "--quiet"), code=limit + SIM, cwd=trace.parent)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("finemoe: error: --output: out cannot be written (")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in trace.parent.iterdir()] == ["trace.csv"]


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("MemoryError('x')", "not enough memory (x). Take fewer"),
        ("OSError(28, 'No space left on device')", "[Errno 28] No space left on device. Check"),
    ],
)
def test_what_no_command_foresaw_is_one_line_too(raised: str, message: str) -> None:
    code = (
        "import typer; from finemoe.cli.shell import run; app = typer.Typer()\n"
        f"@app.command()\ndef fail(): raise {raised}\nrun(app, 'x')"
    )
    done = run(code=code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"finemoe: error: {message}")
    assert done.stderr.count("\n") == 1


def test_replay_is_identical_or_names_the_event(trace: Path) -> None:
    """Each cell of a grid is replayed; a load that is moved to another slot by hand is caught there."""
    assert run(*small(trace, "--policy", "lru,finemoe", "--output", "out"), cwd=trace.parent).returncode == 0
    done = run("replay", "out", code=VERB, cwd=trace.parent)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "out/finemoe-24GB/decisions.parquet",
        "out/lru-24GB/decisions.parquet",
    ]
    assert done.stdout.count("identical") == 2

    log = trace.parent / "out" / "lru-24GB" / "decisions.parquet"
    table = pq.read_table(log)
    place = table.column("kind").to_pylist().index("Load")
    slots = table.column("slot").to_pylist()
    slots[place] += 1
    field = table.schema.field("slot")
    altered = table.set_column(table.schema.get_field_index("slot"), field, pa.array(slots, field.type))
    pq.write_table(altered, log)
    done = run("replay", str(log), code=VERB)
    assert done.returncode == 1
    assert f"DIFFERS at #{place} in iteration 0" in done.stdout
    assert f"slot={slots[place]}" in next(line for line in done.stdout.splitlines() if "  logged" in line)
    assert f"slot={slots[place] - 1}" in done.stdout.splitlines()[-1]


def test_replay_without_a_log_is_bad_input(trace: Path) -> None:
    assert run(*small(trace, "--decisions", "none", "--output", "out"), cwd=trace.parent).returncode == 0
    for place in ("out", "absent"):
        done = run("replay", place, code=VERB, cwd=trace.parent)
        assert done.returncode == 2
        assert done.stderr.startswith("finemoe: error: ")
        assert done.stderr.count("\n") == 1


def test_a_full_standard_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("systems", "--json", code=VERB),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("finemoe: error: [Errno 28] No space left on device")
    assert done.stderr.count("\n") == 1

"""The results directory: whole or marked partial, never over anybody's files, the same bytes each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finemoe.errors import SettingError
from finemoe.serving.cells import cell_name
from finemoe.serving.logs import IterationLog, RequestLog
from finemoe.serving.metrics import CellSummary
from finemoe.serving.output_folder import check_output
from finemoe.serving.results import Results, ResultsWriter
from finemoe.serving.timeseries import time_series

EVIDENCE = {"figures": "SIMULATED", "trace": "SYNTHETIC"}
CELLS = (("lru", "24GB"), ("lfu", "0.25"))


def results(statuses: tuple[str, ...], wall_s: float = 1.0) -> Results:
    runs = tuple(
        CellSummary(policy=policy, expert_cache=cache, expert_cache_bytes=1, status=status, wall_s=wall_s)
        for (policy, cache), status in zip(CELLS, statuses, strict=False)
    )
    return Results(
        runs=runs,
        config={"seed": 0},
        trace={"path": "a.csv"},
        evidence=EVIDENCE,
        version="1",
        partial=any(not run.ran for run in runs),
    )


def logs() -> tuple[RequestLog, IterationLog]:
    requests, iterations = RequestLog(), IterationLog()
    requests.append(1, 2.0, 3.0, 4.0, 4.0, 50, 1, True)
    requests.append(0, 0.0, 0.0, 2.0, 6.0, 100, 3, True)
    iterations.append(0.0, 2.0, "prefill", 1, 100, 8, 2, 1, 5, 50, 1.0, 0.0, 0.5, 0.0, 1.5)
    return requests, iterations


def write_cell(writer: ResultsWriter, name: str, decisions: pa.Table | None = None) -> None:
    requests, iterations = logs()
    series = time_series(requests, iterations, simulated_s=6.0, devices=1, hit_rate_defined=True)
    if decisions is not None:
        writer.write_decisions(name, decisions)
    writer.write_cell(name, requests, iterations, series)


def write(directory: Path, statuses: tuple[str, ...] = ("OK",), wall_s: float = 1.0) -> ResultsWriter:
    """Everything but the commit."""
    names = tuple(cell_name(*cell) for cell in CELLS[: len(statuses)])
    writer = ResultsWriter.replacing(directory, names, EVIDENCE)
    decisions = pa.table({"event": [1, 2]}).replace_schema_metadata({"core": "x"})
    for name, status in zip(names, statuses, strict=True):
        if status == "OK":
            write_cell(writer, name, decisions)
    writer.write_summary(results(statuses, wall_s), "seed = 0\n")
    return writer


def files(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def test_one_cell_stands_in_the_directory_itself(tmp_path: Path) -> None:
    directory = write(tmp_path / "out").commit()
    tables = {"requests.parquet", "iterations.parquet", "timeseries.parquet", "decisions.parquet"}
    assert set(files(directory)) == tables | {"summary.json", "config.resolved.toml", "wall.json"}
    requests = pq.read_table(directory / "requests.parquet")
    assert requests.column("request").to_pylist() == [0, 1]  # in order of the trace, not of finishing
    assert requests.column("finished_s").to_pylist() == [6.0, 4.0]
    metadata = pq.read_schema(directory / "decisions.parquet").metadata
    assert (metadata[b"core"], json.loads(metadata[b"finemoe.evidence"])) == (b"x", EVIDENCE)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_grid_has_a_folder_per_cell(tmp_path: Path) -> None:
    directory = write(tmp_path / "out", ("OK", "OK")).commit()
    assert {path.name for path in directory.iterdir() if path.is_dir()} == {"lru-24GB", "lfu-0.25"}
    assert pq.read_table(directory / "lfu-0.25" / "iterations.parquet").num_rows == 1
    assert [run["policy"] for run in json.loads((directory / "summary.json").read_text())["runs"]] == [
        "lru",
        "lfu",
    ]


def test_wall_times_stand_in_one_file_only(tmp_path: Path) -> None:
    one = files(write(tmp_path / "one", ("OK", "OK"), wall_s=1.0).commit())
    two = files(write(tmp_path / "two", ("OK", "OK"), wall_s=2.0).commit())
    assert {name for name in one if one[name] != two[name]} == {"wall.json"}
    assert json.loads(two["wall.json"]) == {"wall_s": {"lru-24GB": 2.0, "lfu-0.25": 2.0}}
    assert json.loads(results(("OK",), 3.0).to_json())["runs"][0]["wall_s"] == 3.0
    assert "wall_s" not in json.loads(results(("OK",)).to_json(wall=False))["runs"][0]


def test_a_killed_run_leaves_the_old_result_and_a_marked_partial_one(tmp_path: Path) -> None:
    target = tmp_path / "out"
    old = files(write(target).commit())
    killed = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from test_results import write
write(Path({str(target)!r}), ("OK", "NOT RUN: interrupted"))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == 9
    assert files(target) == old
    summary = json.loads((tmp_path / "out.partial" / "summary.json").read_text())
    assert summary["partial"] is True
    assert [run["status"] for run in summary["runs"]] == ["OK", "NOT RUN: interrupted"]
    assert (tmp_path / "out.partial" / "lru-24GB" / "decisions.parquet").exists()
    write(target, ("OK", "OK")).commit()  # the next run sweeps up
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((target / "summary.json").read_text())["partial"] is False


def test_an_interrupted_run_does_not_replace_older_results(tmp_path: Path) -> None:
    partial = ("OK", "NOT RUN: interrupted")
    keep = (results(partial), "seed = 0\n")
    assert write(tmp_path / "new", partial).keep_partial(*keep) == tmp_path / "new"
    old = files(write(tmp_path / "out", ("OK", "OK")).commit())
    assert write(tmp_path / "out", partial).keep_partial(*keep) == tmp_path / "out.partial"
    assert files(tmp_path / "out") == old


def test_a_kill_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path / "out.old").commit()
    kept = files(tmp_path / "out.old")
    ResultsWriter.replacing(tmp_path / "out", ("lru-24GB",), EVIDENCE)
    assert files(tmp_path / "out") == kept


@pytest.mark.parametrize("place", ["out", "out.partial"])
@pytest.mark.parametrize("results_too", [False, True])
def test_foreign_files_are_never_touched(tmp_path: Path, place: str, results_too: bool) -> None:
    if results_too:
        write(tmp_path / place, ("OK", "OK")).commit()
        (tmp_path / place / "lru-24GB" / "notes.txt").write_text("mine")
    else:
        (tmp_path / place).mkdir()
        (tmp_path / place / "notes.txt").write_text("mine")
    before = files(tmp_path)
    with pytest.raises(SettingError, match=rf"{place} holds .*notes\.txt, which is not FineMoE's"):
        ResultsWriter.replacing(tmp_path / "out", ("lru-24GB",), EVIDENCE)
    assert files(tmp_path) == before


def test_another_program_s_summary_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").write_text('{"format": "other", "runs": []}')
    with pytest.raises(SettingError, match=r"holds summary\.json"):
        ResultsWriter.replacing(tmp_path / "out", ("lru-24GB",), EVIDENCE)


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert "summary.json" in files(write(tmp_path / "out").commit())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"--output: .*out cannot be written \(Not a directory\)"):
        ResultsWriter.replacing(tmp_path / "file" / "out", ("lru-24GB",), EVIDENCE)
    with pytest.raises(SettingError, match="a file of that name"):
        ResultsWriter.replacing(tmp_path / "file", ("lru-24GB",), EVIDENCE)


def test_default_directories_are_numbered(tmp_path: Path) -> None:
    names = []
    for _ in range(3):  # the first two stay uncommitted, as if killed or still running
        writer = ResultsWriter.fresh(tmp_path / "root", ("lru-24GB",), EVIDENCE)
        names.append(writer.directory.name)
    assert names == ["0001", "0002", "0003"]
    writer.write_summary(results(("OK",)), "")
    assert writer.commit() == tmp_path / "root" / "0003"
    assert ResultsWriter.fresh(tmp_path / "root", ("lru-24GB",), EVIDENCE).directory.name == "0004"


def test_a_failed_run_can_be_dropped(tmp_path: Path) -> None:
    write(tmp_path / "out").discard()
    assert list(tmp_path.iterdir()) == []


def test_json_has_no_nan() -> None:
    broken = msgspec.structs.replace(results(("OK",)).runs[0], simulated_s=float("nan"))
    text = Results(runs=(broken,), config={}, trace={}, evidence={}, version="1").to_json()
    assert json.loads(text)["runs"][0]["simulated_s"] is None


def test_a_half_written_cell_is_not_kept(tmp_path: Path) -> None:
    """Ctrl-C while the second cell is written, and just after, when its run is not yet noted."""
    for name, folder in (("during", "lfu-0.25.part"), ("after", "lfu-0.25")):
        writer = write(tmp_path / name, ("OK", "NOT RUN: interrupted"))
        half = tmp_path / f"{name}.partial" / folder
        half.mkdir()
        (half / "requests.parquet").write_bytes(b"PAR1")
        kept = writer.keep_partial(results(("OK", "NOT RUN: interrupted")), "seed = 0\n")
        assert [path.name for path in kept.iterdir() if path.is_dir()] == ["lru-24GB"]


def test_ctrl_c_after_the_last_rename_finds_all_in_place(tmp_path: Path) -> None:
    writer = write(tmp_path / "out", ("OK", "OK"))
    writer.commit()
    before = files(tmp_path / "out")
    assert writer.keep_partial(results(("OK", "OK")), "") == tmp_path / "out"
    assert files(tmp_path / "out") == before


def test_a_killed_write_is_swept_up(tmp_path: Path) -> None:
    write(tmp_path / "out", ("OK", "NOT RUN: interrupted"))
    half = tmp_path / "out.partial" / "lfu-0.25.part"
    half.mkdir()
    (half / "requests.parquet").write_bytes(b"PAR1")
    write(tmp_path / "out", ("OK", "OK")).commit()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("target", ["elsewhere", "absent", "out"])
@pytest.mark.parametrize("place", ["out", "out.partial", "out.old"])
def test_a_link_is_not_followed(tmp_path: Path, target: str, place: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / place).symlink_to(target)  # also to nothing, and to itself
    with pytest.raises(SettingError, match=rf"--output: .*/{place} is a link\. Give the directory itself"):
        ResultsWriter.replacing(tmp_path / "out", ("lru-24GB",), EVIDENCE)
    assert (tmp_path / place).is_symlink()


@pytest.mark.parametrize("name", ["", ".", "/", "..", "a/..", "a\0b"])
def test_no_name_to_replace(name: str) -> None:
    with pytest.raises(SettingError, match=r"--output is '.*', which is not the name of a directory"):
        check_output(Path(name))


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"cannot be written \(File name too long\)"):
        check_output(tmp_path / ("n" * 250))


@pytest.mark.parametrize("name", ["config.resolved.toml", "lru-24GB", "lru-24GB/requests.parquet"])
@pytest.mark.parametrize("kind", ["directory", "link", "other"])
def test_ours_by_name_only_is_foreign(tmp_path: Path, name: str, kind: str) -> None:
    place = write(tmp_path / "out", ("OK", "OK")).commit() / name
    place.rename(tmp_path / "moved")
    if kind == "link":
        place.symlink_to(tmp_path / "moved")
    elif kind == "directory" and "." in name.rpartition("/")[2]:
        place.mkdir()
    else:
        os.mkfifo(place)
    with pytest.raises(SettingError, match=f"holds {name}, which is not FineMoE's"):
        check_output(tmp_path / "out")


def test_a_pipe_named_summary_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "summary.json")
    with pytest.raises(SettingError, match=r"holds summary\.json"):
        check_output(tmp_path / "out")


def test_a_vanished_folder_is_one_error_and_the_other_run_s_is_left(tmp_path: Path) -> None:
    """Two runs with one --output: the second takes the first one's DIR.partial for a killed run's."""
    first = write(tmp_path / "out", ("OK", "NOT RUN: interrupted"))
    second = write(tmp_path / "out", ("OK", "OK"))
    before = files(tmp_path)
    for action in (
        lambda: write_cell(first, "lfu-0.25"),
        lambda: first.write_summary(results(("OK",)), ""),
        first.commit,
    ):
        with pytest.raises(SettingError, match=r"out\.partial was taken over by another run"):
            action()
    first.discard()
    assert files(tmp_path) == before
    second.commit()
    with pytest.raises(SettingError, match="taken over"):
        write_cell(first, "lfu-0.25")


def test_what_the_system_refuses_to_write_is_one_error(tmp_path: Path) -> None:
    """A file-size limit stands in for a full disk: the same OSError, out of pyarrow."""
    probe = f"""
import resource, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from finemoe.errors import SettingError
from test_results import EVIDENCE, ResultsWriter, write_cell
writer = ResultsWriter.replacing(Path({str(tmp_path / "out")!r}), ("lru-24GB",), EVIDENCE)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    write_cell(writer, "lru-24GB")
except SettingError as error:
    writer.discard()
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("--output: ")
    assert "out cannot be written (" in done.stdout
    assert list(tmp_path.iterdir()) == []

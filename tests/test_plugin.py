"""A user's policy on its way into a run: where it is found, what it composes, how its mistakes are told."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finemoe
import numpy as np
import pytest
from finemoe.errors import InputError, PolicyError, SettingError, TraceError
from finemoe.policy.plugin import Policy, Row, Shape
from finemoe.policy.plugin_guard import GuardedPolicy
from finemoe.policy.plugin_load import load_policy
from finemoe.policy.system import System
from finemoe.policy.systems import find_system, find_systems
from finemoe.serving.replay import replay
from finemoe.sim.run import simulate

SAMPLE = Path(__file__).resolve().parents[1] / "traces" / "samples" / "azure_conv_synthetic.parquet"
IMPORTS = "import numpy as np\nfrom finemoe.policy.plugin import Policy\n"

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a policy's file into the current directory, an empty one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])

    def into(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(IMPORTS + text, "utf-8")

    return into


def run(policy: str, output: str, **options: object) -> Path:
    """A short run's results directory."""
    chosen: dict[str, Any] = {
        "num_requests": 1,
        "output_tokens": 3,
        "expert_cache": "96slots",
        "model": "gpt-oss-20b",
    }
    chosen |= options
    return simulate(SAMPLE, policy=policy, output=output, **chosen).directory or Path()


# -- what is overridden decides


@pytest.mark.parametrize(
    ("body", "predictor", "eviction"),
    [
        ("pass", "none", "lru"),
        ("eviction = 'finemoe'", "none", "finemoe"),
        ("def gate(self, layer, probabilities, row_counts): return {}", "plugin", "lru"),
        ("def end_iteration(self, finished): pass", "plugin", "lru"),
        ("def eviction_key(self, expert): return 0.0", "none", "plugin"),
    ],
)
def test_what_is_overridden_is_the_policys(write: Write, body: str, predictor: str, eviction: str) -> None:
    write("mine.py", f"class Mine(Policy):\n    {body}\n")
    row = find_system("mine.py:Mine")
    assert (row.predictor, row.eviction) == (predictor, eviction)
    assert (row.name, row.group, row.source) == ("Mine", "plugin", "mine.py:Mine")


def test_a_policy_that_overrides_nothing_is_lru(write: Write) -> None:
    write("mine.py", "class Mine(Policy):\n    pass\n")
    mine, lru = simulate(
        SAMPLE, policy="mine.py:Mine,lru", num_requests=2, output_tokens=5, output="out", expert_cache="0.25"
    ).runs
    assert (mine.hit_rate, mine.tpot_s) == (lru.hit_rate, lru.tpot_s)


def test_a_policy_is_told_its_shape_and_seeded(write: Write) -> None:
    write(
        "mine.py",
        "class Mine(Policy):\n"
        "    def begin_iteration(self, rows, embeddings):\n"
        "        s = self.shape\n"
        "        assert (s.layers, s.experts, s.top_k, s.slots, s.devices) == (24, 32, 4, 96, 6), s\n"
        "        assert embeddings.shape == (1, s.embedding_width) and rows[0].tokens >= 1\n"
        "        return {0: self.rng.random(s.experts)}\n",
    )
    logs = [
        (run("mine.py:Mine", f"out{seed}", seed=seed) / "decisions.parquet").read_bytes() for seed in (0, 1)
    ]
    again = (run("mine.py:Mine", "again", seed=0) / "decisions.parquet").read_bytes()
    assert logs[0] == again != logs[1]


# -- finding it


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("absent.py:Mine", "there is no file absent.py"),
        ("mine.py:Mein", r"mine.py has no class Mein\. Did you mean Mine\?"),
        ("mine.py:X", r"mine.py has no class X\. Its policies: Mine, Rule, Lru, Lines"),
        ("mine.py:np", "is a module. Derive it from finemoe.policy.plugin.Policy"),
        ("mine.py:Policy", "is the class Policy. Derive it"),
        ("mine.py:Rule", r"its eviction is 'lur'\. Choose .* Did you mean lru\?"),
        ("mine.py:Lru", "is named lru, like a system of ours"),
        ("mine.py:Lines", "its description is"),
        ("mine.py:", "Write path.py:Class"),
        ("mine.py", "Write mine.py:Class"),
        ("mine.txt:Mine", "Its name ends in .py"),
        ("finemo", r"Did you mean finemoe\?"),
    ],
)
def test_what_is_no_policy_is_refused(write: Write, text: str, message: str) -> None:
    classes = {
        "Mine": "pass",
        "Rule": "eviction = 'lur'",
        "Lru": "name = 'lru'",
        "Lines": "description = 'a\\nb'",
    }
    source = "".join(f"class {name}(Policy):\n    {body}\n" for name, body in classes.items())
    write("mine.py", source)
    write("mine.txt", source)
    with pytest.raises(SettingError, match=message):
        find_system(text)


def test_two_policies_of_one_name_are_refused(write: Write) -> None:
    for name in ("a.py", "b.py"):
        write(name, "class Mine(Policy):\n    pass\n")
    with pytest.raises(SettingError, match=r"a\.py:Mine and b\.py:Mine are both named Mine"):
        find_systems(("a.py:Mine", "b.py:Mine"))
    assert len(find_systems(("a.py:Mine", "lru", "a.py:Mine"))) == 2


def test_helpers_are_found_in_the_policys_own_folder(write: Write) -> None:
    write("one/helper_of_mine.py", "WORTH = 1.0\n")
    write("one/mine.py", "import helper_of_mine\nclass Mine(Policy):\n    worth = helper_of_mine.WORTH\n")
    write("two/helper_of_mine.py", "WORTH = 2.0\n")
    write("two/mine.py", "import helper_of_mine\nclass Mine(Policy):\n    worth = helper_of_mine.WORTH\n")
    first = load_policy("one/mine.py:Mine")
    with pytest.raises(SettingError, match=r"helper helper_of_mine has the name of a module .* Rename it"):
        load_policy("two/mine.py:Mine")
    write("one/helper_of_mine.py", "WORTH = 33.0\n")
    other = load_policy("one/mine.py:Mine")
    assert [vars(loaded.policy)["worth"] for loaded in (first, other)] == [1.0, 33.0]
    assert first.digest != other.digest
    del sys.modules["helper_of_mine"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import nosuchmodule", "ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("class Mine(:", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported_shows_its_own_traceback(write: Write, text: str, error: str) -> None:
    write("mine.py", text)
    with pytest.raises(PolicyError, match=r"^mine\.py:Mine: mine\.py cannot be imported\n") as raised:
        find_system("mine.py:Mine")
    assert raised.value.traceback.endswith(error)
    assert 'mine.py", line 3' in raised.value.traceback
    assert "plugin" not in raised.value.traceback.replace("finemoe.policy.plugin", "")


# -- entry points


class Installed(Policy):
    """As a package would bring it."""

    def eviction_key(self, expert: object) -> float:
        return 0.0


MIX = System(name="of-the-row", description="a mix", source="a package", eviction="lfu")
PLAIN = System(name="plain", description="d", source="s", predictor="plugin")
ENTRIES = {"installed": "Installed", "mix": "MIX", "plain": "PLAIN", "broken": "absent", "number": "IMPORTS"}


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points that this module stands for."""
    points = [
        importlib.metadata.EntryPoint(name, f"{__name__}:{value}", "finemoe.systems")
        for name, value in ENTRIES.items()
    ]
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Installed.__module__])

    def found(*, group: str, name: str | None = None) -> list[importlib.metadata.EntryPoint]:
        return [point for point in points if group == point.group and name in (None, point.name)]

    monkeypatch.setattr(importlib.metadata, "entry_points", found)


@pytest.mark.usefixtures("entries")
def test_an_entry_point_is_a_policy_or_a_row() -> None:
    installed, mix = find_systems(("installed", "mix"))
    assert (installed.name, installed.policy, installed.eviction) == ("Installed", "installed", "plugin")
    assert load_policy("installed").policy is Installed
    assert len(load_policy("installed").digest) == 32
    assert (mix.name, mix.group, mix.eviction, mix.policy) == ("mix", "plugin", "lfu", None)
    assert not {"Installed", "mix"} & {row.name for row in find_systems(("all", "ablations"))}


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "its System names a policy"),
        ("broken", "absent cannot be imported\n(.|\n)*AttributeError"),
        ("number", "is a str. Derive it"),
        ("instaled", r"Did you mean installed\?"),
    ],
)
def test_an_entry_point_that_is_none_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_system(name)


@pytest.mark.usefixtures("entries")
def test_plug_ins_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    from finemoe.cli.systems import systems_command

    systems_command(as_json=False)
    printed = capsys.readouterr()
    assert "Installed" in printed.out
    assert "plugin" in printed.out
    assert "the plug-in broken cannot be used" in printed.err


def test_nothing_looks_for_plug_ins_until_one_is_asked_for() -> None:
    code = (
        "import sys, finemoe, finemoe.cli.simulate\n"
        "from finemoe.policy.systems import find_systems\n"
        "find_systems(('all', 'lru'))\n"
        "print([name for name in sys.modules if name.startswith('finemoe.policy.plugin')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(finemoe.__file__).absolute().parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


# -- what it answers


class Answers(Policy):
    """Gives what it is told to."""

    answer: object = None

    def begin_iteration(self, rows: object, embeddings: object) -> dict[int, object]:  # type: ignore[override]
        assert rows == [Row(3, "decode", 1)]
        return self.answer  # type: ignore[return-value]

    def gate(self, layer: int, probabilities: object, row_counts: object) -> dict[int, object]:  # type: ignore[override]
        return self.answer  # type: ignore[return-value]

    def eviction_key(self, expert: object) -> float:
        return self.answer  # type: ignore[return-value]


def guarded(answer: object) -> GuardedPolicy:
    sizes = {"layers": 3, "experts": 2, "top_k": 1, "devices": 1, "slots": 2, "expert_bytes": 1}
    policy = Answers(Shape(**sizes, prefetch_distance=1, embedding_width=0, seed=0))
    policy.answer = answer
    return GuardedPolicy("mine", policy, 3, 2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned None. Return {layer: row of 2 values}, or {}"),
        ([0.5, 0.5], r"returned \[0.5, 0.5\]"),
        ({"first": [0, 1]}, "predicts for layer 'first'"),
        ({True: [0, 1]}, "predicts for layer True"),
        ({1: [0, 1]}, r"predicts for layer 1\. Give layers 2 to 2"),
        ({3: [0, 1]}, r"predicts for layer 3\. Give layers 2 to 2"),
        ({2: [[0, 1]]}, r"predicts values of shape \(1, 2\) for layer 2\. Give a row of 2 numbers"),
        ({2: "much"}, "predicts 'much' for layer 2"),
        ({2: [1]}, r"predicts values of shape \(1,\)"),
        ({2: [1, -1]}, r"predicts -1.0 for expert 1 of layer 2\. Give finite numbers of 0 or more"),
        ({2: [1e300, 0]}, "predicts inf for expert 0"),
        ({2: [0, np.nan]}, "predicts nan for expert 1"),
    ],
)
def test_a_prediction_that_means_nothing_is_refused(answer: object, message: str) -> None:
    with pytest.raises(PolicyError, match=f"^mine: gate at layer 1: {message}"):
        guarded(answer).gate(1, np.zeros((1, 2), np.float32), np.zeros((1, 2), np.int32))


def test_predictions_come_as_the_core_takes_them() -> None:
    found = guarded({np.int64(2): [1, 0.5], 0: (1, 0)}).begin_iteration([(3, "decode", 1)], None)
    assert [(type(layer), row.dtype, row.tolist()) for layer, row in found.items()] == [
        (int, np.dtype(np.float32), [1.0, 0.5]),
        (int, np.dtype(np.float32), [1.0, 0.0]),
    ]


@pytest.mark.parametrize("answer", [np.nan, "1.5", None, [1, 2], 1j])
def test_a_key_that_is_no_number_is_refused(answer: object) -> None:
    class View:
        layer_now = 1

    with pytest.raises(PolicyError, match=r"^mine: eviction_key at layer 1: returned .* Return a number"):
        guarded(answer).eviction_key(View())  # type: ignore[arg-type]
    assert guarded(np.float32(1.5)).eviction_key(View()) == 1.5  # type: ignore[arg-type]


# -- in a run


FAILS = {
    "begin_iteration": ("self, rows, embeddings", r"iteration 1, begin_iteration before layer 0"),
    "gate": ("self, layer, probabilities, row_counts", r"iteration 1, gate at layer 0"),
    "end_iteration": ("self, finished", r"iteration 1, end_iteration at layer 23"),
}


@pytest.mark.parametrize("method", FAILS)
def test_an_exception_is_told_with_place_and_traceback(write: Write, method: str) -> None:
    arguments, place = FAILS[method]
    write(
        "mine.py",
        "def inner(calls):\n    return 1 / (calls < 2)\n"
        "class Mine(Policy):\n    calls = 0\n"
        "    def begin_iteration(self, rows, embeddings):\n        self.calls += 1\n        return {}\n"
        "class Late(Mine):\n"
        f"    def {method}({arguments}):\n"
        f"        {'self.calls += 1' if method == 'begin_iteration' else 'pass'}\n"
        "        inner(self.calls)\n        return {}\n",
    )
    with pytest.raises(PolicyError, match=rf"^mine\.py:Late: {place}: failed\nTraceback") as raised:
        run("mine.py:Late", "out")
    files = [line for line in raised.value.traceback.splitlines() if line.startswith("  File")]
    assert all("mine.py" in line for line in files)
    assert len(files) == 2
    assert raised.value.traceback.endswith("ZeroDivisionError: division by zero")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_finished_cells_are_kept_when_a_policy_fails(write: Write, tmp_path: Path) -> None:
    write("mine.py", "class Mine(Policy):\n    def eviction_key(self, expert):\n        return [][0]\n")
    with pytest.raises(PolicyError, match=r"iteration 0, eviction_key at layer \d+: failed"):
        run("lru,mine.py:Mine", "out")
    kept = [path.name for path in (tmp_path / "out.partial").iterdir()]
    assert "lru-96slots" in kept
    assert "Mine-96slots" not in kept or not list((tmp_path / "out.partial" / "Mine-96slots").glob("req*"))


def test_a_constructor_that_fails_is_told(write: Write) -> None:
    write(
        "mine.py",
        "class Mine(Policy):\n    def __init__(self, shape):\n        shape.nothing\n"
        "    def eviction_key(self, expert):\n        return 0.0\n",
    )
    with pytest.raises(PolicyError, match=r"^mine\.py:Mine: its constructor failed\nTraceback(.|\n)*nothing"):
        run("mine.py:Mine", "out")


# -- replay


RANDOM = (
    "class Mine(Policy):\n"
    "    def gate(self, layer, probabilities, row_counts):\n"
    "        later = range(layer + 1, self.shape.layers)\n"
    "        return {l: self.rng.random(self.shape.experts) for l in later}\n"
    "    def eviction_key(self, expert):\n        return expert.probability\n"
)


def test_replay_decides_again_with_the_same_source_only(write: Write, tmp_path: Path) -> None:
    write("mine.py", RANDOM)
    out = run("mine.py:Mine", "out", seed=7)
    report = replay(out)
    assert report.identical
    write("mine.py", RANDOM + "\n")
    with pytest.raises(TraceError, match=r"the source of the policy mine\.py:Mine has changed since the run"):
        replay(out)
    (tmp_path / "mine.py").unlink()
    with pytest.raises(TraceError, match=r"its policy cannot decide again: .*there is no file mine\.py"):
        replay(out)
    write("mine.py", RANDOM)
    assert replay(out).identical


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("    def eviction_key(self, expert):\n        return 10**400\n", "returned 1000"),
        (
            "    def gate(self, layer, probabilities, row_counts):\n        return {layer + 1: [1j] * 8}\n",
            "predicts",
        ),
        ("    def gates(self, layer, probabilities, row_counts):\n        return {}\n", "Did you mean gate"),
        ("    evicton = 'lfu'\n", "Did you mean eviction"),
    ],
)
def test_answers_that_are_no_numbers_and_mistyped_names_are_refused(
    body: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.py").write_text(f"from finemoe.policy.plugin import Policy\nclass P(Policy):\n{body}", "utf-8")
    with pytest.raises(InputError, match=problem):
        simulate(SAMPLE, policy="odd.py:P", num_requests=1, output_tokens=3, expert_cache="24GB")

"""Waits of the transfer engine and its threads: never a hang, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import finemoe
import numpy as np
import pytest
from finemoe.errors import PolicyError, TransferError
from transfer_case import EXPERTS, ForwardPass, Weights, running

SLOW = 20_000.0  # bytes per second: an expert takes 0.4 s
GATE = np.full((1, EXPERTS), 0.125, np.float32)


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return Weights(tmp_path)


def iterate(forward: ForwardPass, iterations: int) -> None:
    for _ in range(iterations):
        forward.iterate()


def test_ctrl_c_ends_a_wait_and_the_engine_closes(weights: Weights) -> None:
    with running(ForwardPass(weights, weights.source(), "lru", bandwidth=100.0)) as forward:
        pressed = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        pressed.start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            forward.iterate()
        forward.engine.close()
        assert time.monotonic() - begun < 2.0
        with pytest.raises(TransferError, match="closed"):
            forward.engine.wait_chunk()


def test_a_hung_wait_says_who_waits_for_what(weights: Weights) -> None:
    with running(ForwardPass(weights, weights.source(), "lru", watchdog_s=0.5)) as forward:
        forward.iterate()
        forward.engine.drain()
        core = forward.core
        absent = [j for j in range(EXPERTS) if core.slot(j) < 0][:2]
        core.begin_iteration([(0, "decode", 1, False)])
        core.gate(0, GATE, absent, [1, 1])  # and the engine is not notified
        with pytest.raises(TransferError) as caught:
            forward.engine.wait_chunk()
    message = str(caught.value)
    assert "nothing has moved for 0.5" in message
    assert f"Missing experts: {absent[0]} {absent[1]}; device 0: idle; searches: done up to" in message


def test_other_threads_run_while_one_waits(weights: Weights) -> None:
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0)

    with running(ForwardPass(weights, weights.source(), "lru", bandwidth=SLOW)) as forward:
        thread = threading.Thread(target=count)
        thread.start()
        forward.iterate()
        stop.set()
        thread.join()
    assert forward.stall_s > 1.0
    assert counted > 1000


def test_an_engine_that_is_not_started_says_so(weights: Weights) -> None:
    forward = ForwardPass(weights, weights.source(), "lru")
    with pytest.raises(TransferError, match="not been started"):
        forward.iterate()


def test_an_engine_starts_once(weights: Weights) -> None:
    with running(ForwardPass(weights, weights.source(), "lru")) as forward:
        with pytest.raises(TransferError, match="runs already"):
            forward.engine.start()
        with pytest.raises(TransferError, match="before the engine starts"):
            forward.engine.preload([1])
        forward.engine.close()
        forward.engine.close()
        with pytest.raises(TransferError, match="closed"):
            forward.engine.start()


def test_a_dropped_engine_leaves_no_threads(weights: Weights) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    forward = ForwardPass(weights, weights.source(), devices=2, bandwidth=SLOW)
    forward.engine.start()
    forward.engine.notify(forward.core.begin_iteration([(0, "decode", 1, False)]))
    forward.engine.notify(forward.core.gate(0, GATE, [1, 6], [1, 1]))  # loads are under way
    assert threads() == before + 3
    del forward
    gc.collect()
    assert threads() == before


POLICY = """
from finemoe.policy.plugin import Policy

class Mine(Policy):
    def eviction_key(self, expert):
        {body}
"""


def test_workers_ask_a_users_policy(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "mine.py").write_text(POLICY.format(body="return expert.frequency"), "utf-8")
    system = f"{tmp_path / 'mine.py'}:Mine"
    with running(ForwardPass(weights, weights.source(), system, slots=3, devices=2)) as forward:
        for _ in range(30):
            forward.iterate()
    assert forward.core.counters()["evictions"] > 0


def test_a_policy_that_raises_in_a_worker_ends_the_run_with_its_traceback(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    body = "if expert.last_used > 6: raise ZeroDivisionError('no key')\n        return 0.0"
    (tmp_path / "bad.py").write_text(POLICY.format(body=body), "utf-8")
    system = f"{tmp_path / 'bad.py'}:Mine"
    with (
        running(ForwardPass(weights, weights.source(), system, slots=1)) as forward,
        pytest.raises(PolicyError, match="no key"),
    ):
        iterate(forward, 30)


UNCLOSED = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from transfer_case import ForwardPass, Weights
weights = Weights(Path(sys.argv[1]))
forward = ForwardPass(weights, weights.source(), bandwidth=20_000.0)
forward.engine.start()
forward.engine.notify(forward.core.begin_iteration([(0, "decode", 1, False)]))
forward.engine.notify(forward.core.gate(0, weights.slabs[:1, :8] / 256.0, [1, 6], [1, 1]))
print("ends")
"""


def test_a_program_that_ends_without_closing_ends(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), str(Path(finemoe.__file__).absolute().parents[1])]
    words = [sys.executable, "-c", UNCLOSED, str(tmp_path), *paths]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")

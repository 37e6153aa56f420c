"""The transfer engine on a device: copies and computations in order, preemption, faults, pinned memory.

Run on the CPU too, where only CUDA's own part is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from cuda_case import DEVICES, NEEDS_CUDA, DevicePass, pinned_source, torch
from finemoe._core import HostSource, PinnedSlabs
from finemoe.serving.decisions import decision_table
from finemoe.serving.replay import replay
from transfer_case import EXPERTS, SLAB_BYTES, TOTAL, Weights, running

ITERATIONS = 20
GATE = np.full((1, EXPERTS), 0.125, np.float32)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("kind", ["host", "file"])
@pytest.mark.parametrize("system", ["lru", "finemoe", "promoe", "moe-infinity", "no-offload"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_busy_device_computes_with_the_right_bytes(
    weights: Weights, tmp_path: Path, device: str, system: str, kind: str
) -> None:
    source = pinned_source(weights, device) if kind == "host" else weights.source()
    with running(DevicePass(weights, source, system, device, slots=3)) as forward:
        for _ in range(ITERATIONS):
            forward.iterate()
        forward.engine.drain()
        assert forward.wrong() == []
        counters, devices = forward.core.counters(), forward.engine.statistics()["devices"]
    assert forward.compared >= ITERATIONS * 4 * 2
    assert devices[0]["bytes"] == counters["demand_bytes"] + counters["prefetch_bytes"]
    pq.write_table(decision_table(forward.core.take_log(), forward.options), tmp_path / "decisions.parquet")
    assert replay(tmp_path).identical


@NEEDS_CUDA
def test_without_recorded_computations_the_same_check_finds_wrong_bytes(weights: Weights) -> None:
    source = pinned_source(weights, "cuda")
    with running(DevicePass(weights, source, "lru", "cuda", slots=2, ordered=False)) as forward:
        for _ in range(ITERATIONS):
            forward.iterate()
        assert forward.wrong() != []


@pytest.mark.parametrize("device", DEVICES)
def test_prefetches_are_preempted_and_go_on_where_they_stopped(weights: Weights, device: str) -> None:
    slow = 2e6  # bytes per second: an expert takes 4 ms
    forward = DevicePass(weights, pinned_source(weights, device), "finemoe", device, slots=12, bandwidth=slow)
    with running(forward):
        for _ in range(60):
            forward.iterate()
        forward.engine.drain()
        assert forward.wrong() == []
        figures = forward.engine.statistics()["devices"][0]
    assert figures["pauses"] > 0
    assert figures["bytes"] <= (figures["loads"] + figures["pauses"]) * SLAB_BYTES


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_that_fails_once_is_made_again(tmp_path: Path, device: str) -> None:
    weights = Weights(tmp_path)
    expert = 5
    path = Path(weights.paths[weights.file[expert, 1]])
    content = path.read_bytes()
    forward = DevicePass(weights, weights.source(), "lru", device, bandwidth=5000.0)  # 0.6 s until it fails

    def restore() -> None:
        while forward.engine.statistics()["devices"][0]["failures"] == 0:
            time.sleep(0.01)
        path.write_bytes(content)

    os.truncate(path, int(weights.offset[expert, 1]))
    thread = threading.Thread(target=restore)
    thread.start()
    core, engine = forward.core, forward.engine
    with running(forward):
        engine.notify(core.begin_iteration([(0, "decode", 1, False)]))
        engine.notify(core.gate(0, GATE, [expert], [1]))
        engine.wait_chunk()
        forward._compare(expert, core.slot(expert))
        assert forward.wrong() == []
    thread.join()
    assert engine.statistics()["devices"][0]["failures"] in (1, 2)


@NEEDS_CUDA
@pytest.mark.parametrize("slabs", [0, 5])
def test_more_than_may_be_pinned_is_copied_all_the_same(weights: Weights, slabs: int) -> None:
    stride = PinnedSlabs(1, SLAB_BYTES).stride
    pinned = PinnedSlabs(TOTAL, SLAB_BYTES, slabs * stride + 1)
    assert pinned.pinned_bytes == slabs * stride
    assert "slower" in pinned.warning
    pinned.slabs[:, :SLAB_BYTES] = weights.slabs
    source = HostSource(pinned.address, TOTAL, SLAB_BYTES, pinned, pinned.stride)
    with running(DevicePass(weights, source, "lru", "cuda", slots=3)) as forward:
        for _ in range(ITERATIONS):
            forward.iterate()
        assert forward.wrong() == []


@NEEDS_CUDA
def test_without_a_limit_everything_is_pinned() -> None:
    pinned = PinnedSlabs(TOTAL, SLAB_BYTES)
    assert pinned.warning == ""
    assert pinned.pinned_bytes == TOTAL * pinned.stride


_NO_DEVICE_MEMORY = """
import os
import sys
from pathlib import Path

from cuda_case import pinned_source
from finemoe._core import CudaArena
from finemoe.errors import TransferError
from transfer_case import SLAB_BYTES, ForwardPass, Weights, running


class Nowhere(ForwardPass):
    def _arena(self, device, slots):
        return CudaArena(device, 4096, slots, SLAB_BYTES, None)


weights = Weights(Path(sys.argv[1]))
try:
    with running(Nowhere(weights, pinned_source(weights, "cuda"), "lru")) as forward:
        forward.iterate()
except TransferError as error:
    print("TransferError:", error, flush=True)
os._exit(0)  # the device may be lost to this process
"""


@NEEDS_CUDA
def test_copies_that_cuda_refuses_end_the_run_with_its_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _NO_DEVICE_MEMORY, str(tmp_path)]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
    )
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "TransferError: " in found.stdout, found.stderr
    assert "three attempts" in found.stdout
    assert "cuda" in found.stdout


@NEEDS_CUDA
def test_a_stream_of_the_users_own_is_ordered_too(weights: Weights) -> None:
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        running(DevicePass(weights, pinned_source(weights, "cuda"), "lru", "cuda", slots=2)) as forward,
    ):
        for _ in range(ITERATIONS):
            forward.iterate()
        assert forward.wrong() == []

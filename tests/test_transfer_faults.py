"""Faults in what the transfer engine reads: never wrong bytes, always an error that says what and where."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from finemoe._core import (
    CpuArena,
    CudaArena,
    FileSource,
    HostSource,
    TransferEngine,
    crc32c,
    cuda_problem,
)
from finemoe.errors import CoreError, InputError, TransferError
from transfer_case import (
    EXPERTS,
    LAST,
    LENGTH,
    PLACE,
    SLAB_BYTES,
    TOTAL,
    ForwardPass,
    Weights,
    running,
)

SLOW = 20_000.0  # bytes per second: an expert takes 0.4 s
GATE = np.full((1, EXPERTS), 0.125, np.float32)


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return Weights(tmp_path)


def last_byte_of(weights: Weights, expert: int) -> tuple[str, int]:
    """The file and the place of the last byte of an expert's slab."""
    return weights.paths[weights.file[expert, 2]], int(weights.offset[expert, 2] + LENGTH[2] - 1)


# -- files


def test_a_truncated_file_is_refused_with_both_sizes(weights: Weights) -> None:
    path = weights.paths[1]
    size = Path(path).stat().st_size - 1
    os.truncate(path, size)
    with pytest.raises(InputError) as caught:
        weights.source()
    message = str(caught.value)
    assert message.startswith(path)
    assert f"needs {size + 1} bytes of the file, it has {size}: it is truncated" in message


def test_a_missing_file_is_named(weights: Weights) -> None:
    Path(weights.paths[1]).unlink()
    with pytest.raises(InputError, match=r"experts-1\.bin: cannot be opened: No such file"):
        weights.source()


def test_a_flipped_bit_ends_the_run(weights: Weights) -> None:
    contents: dict[str, bytearray] = {}
    for expert in range(TOTAL):  # whichever is required first
        path, place = last_byte_of(weights, expert)
        content = contents.setdefault(path, bytearray(Path(path).read_bytes()))
        content[place] ^= 4
    for path, content in contents.items():
        Path(path).write_bytes(content)
    source = weights.source()
    with (
        running(ForwardPass(weights, source, "lru")) as forward,
        pytest.raises(TransferError, match=r"expert \d+ could not be loaded in three attempts.*checksum"),
    ):
        forward.iterate()
    assert forward.compared == 0
    assert source.verified == 0
    with pytest.raises(CoreError, match="stopped"):
        forward.core.end_iteration()


def test_a_flipped_bit_in_what_is_preloaded_ends_the_run(weights: Weights) -> None:
    path, place = last_byte_of(weights, 5)
    content = bytearray(Path(path).read_bytes())
    content[place] ^= 1
    Path(path).write_bytes(content)
    with pytest.raises(TransferError, match=r"expert 5 .* checksum"):
        ForwardPass(weights, weights.source(), "no-offload")


def test_every_expert_is_checked_once(weights: Weights) -> None:
    source = weights.source()
    with running(ForwardPass(weights, source, "no-offload")) as forward:
        assert source.verified == TOTAL
        forward.iterate()
    assert source.verified == TOTAL


def test_a_file_truncated_in_mid_run_ends_it(weights: Weights) -> None:
    source = weights.source()
    for path in weights.paths:
        os.truncate(path, 0)
    with (
        running(ForwardPass(weights, source, "lru")) as forward,
        pytest.raises(
            TransferError, match=r"experts-\d\.bin: byte \d+ of expert \d+ cannot be read: the file"
        ),
    ):
        forward.iterate()


@pytest.mark.parametrize("direct", [False, True])
def test_a_read_that_fails_once_is_tried_again(weights: Weights, direct: bool) -> None:
    try:
        source = weights.source(direct=direct)
    except InputError as error:
        pytest.skip(str(error))
    path = weights.paths[weights.file[LAST, 1]]
    content = Path(path).read_bytes()
    forward = ForwardPass(weights, source, "lru", bandwidth=5000.0)  # 0.6 s from a try to its failure

    def restore() -> None:
        while forward.engine.statistics()["devices"][0]["failures"] == 0:
            time.sleep(0.01)
        Path(path).write_bytes(content)

    os.truncate(path, len(content) - 1)
    thread = threading.Thread(target=restore)
    thread.start()
    core, engine = forward.core, forward.engine
    with running(forward):
        engine.notify(core.begin_iteration([(0, "decode", 1, False)]))
        engine.notify(core.gate(0, GATE, [LAST], [1]))
        engine.wait_chunk()
        assert np.array_equal(forward.memory[0][core.slot(LAST)], weights.slabs[LAST])
    thread.join()
    assert engine.statistics()["devices"][0]["failures"] in (1, 2)
    assert source.verified == 1


# -- what does not fit together


def test_sizes_that_do_not_fit_are_refused(weights: Weights) -> None:
    forward = ForwardPass(weights, weights.source(), "lru")
    memory = np.zeros((6, SLAB_BYTES), np.uint8)
    arena = CpuArena(memory.ctypes.data, 6, SLAB_BYTES, memory)
    small = CpuArena(memory.ctypes.data, 5, SLAB_BYTES, memory)
    other = HostSource(memory.ctypes.data, 6, SLAB_BYTES, memory)
    source = weights.source()
    with pytest.raises(InputError, match="an arena has 5 slots"):
        TransferEngine(forward.core, source, [small])
    with pytest.raises(InputError, match="2 arenas for 1 devices"):
        TransferEngine(forward.core, source, [arena, arena])
    with pytest.raises(InputError, match="the source has 6 experts"):
        TransferEngine(forward.core, other, [arena])
    with pytest.raises(InputError, match="bandwidth limit"):
        TransferEngine(forward.core, source, [arena], bandwidth_limit_bytes_per_s=0.0)
    with pytest.raises(InputError, match="chunk_bytes"):
        TransferEngine(forward.core, source, [arena], 0)
    with pytest.raises(InputError, match="is no arena"):
        TransferEngine(forward.core, source, [memory])  # type: ignore[list-item]
    with pytest.raises(InputError, match="must not be null"):
        HostSource(0, 1, 1, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"place": PLACE - 1}, "before the piece before it ends"),
        ({"length": np.array([3000, 0, 4099])}, "piece 1 has 0 bytes"),
        ({"offset": np.full((TOTAL, 3), -1)}, "an offset is -1"),
        ({"file": np.full((TOTAL, 3), 3)}, "there is no file 3"),
        ({"checksums": np.zeros(3)}, "one checksum per expert"),
        ({"slab_bytes": 8194}, "need a slab of 8195 bytes, slab_bytes is 8194"),
        ({"place": PLACE[:2]}, "one place per length"),
        ({"file": np.zeros((TOTAL, 2))}, "file must be"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    weights: Weights, change: dict[str, object], message: str
) -> None:
    layout = {
        "paths": weights.paths,
        "file": weights.file,
        "offset": weights.offset,
        "length": LENGTH,
        "place": PLACE,
    }
    with pytest.raises(InputError, match=message):
        FileSource(**(layout | change))  # type: ignore[arg-type]


@pytest.mark.skipif(not cuda_problem(), reason="there is a CUDA device")
def test_without_a_cuda_device_an_arena_on_one_is_one_clear_error() -> None:
    with pytest.raises(InputError, match=r"CudaArena: .* run on the CPU"):
        CudaArena(0, 4096, 1, SLAB_BYTES, None)


def test_a_cuda_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="CUDA"):
        CudaArena(1000, 4096, 1, SLAB_BYTES, None)


def test_crc32c_is_the_one_of_rfc_3720() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283

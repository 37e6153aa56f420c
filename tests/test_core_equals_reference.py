"""The compiled core and the plain-Python model give the same commands and counters after every event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from core_draws import draw_config, draw_gate_row
from core_walk import Walk
from finemoe import _core
from finemoe.errors import CoreError
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import ReferenceCore
from reference_devices import Command, Config
from reference_formulas import delta_of, delta_set_brute_force, round_f16, unit_embedding
from reference_predictions import Row
from reference_store import ReferenceStore

SEEDS = st.integers(0, 2**32 - 1)
COMMANDS = ("Search", "WaitSearch", "PreemptPrefetch", "Wait", "Load", "Abort")
FIRST_COMMAND = 11  # RecordKind of csrc/types.hpp: events come first
SEARCHES = ("semantic", "trajectory", "update")
LOADS = ("demand", "prefetch")


class CompiledCore:
    """The compiled core behind the reference's methods: commands come from its log, in their total order.

    Its outboxes are drained after every event and must hold the same commands, each consumer's in order; the
    mask that the event returns must say which of them do.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.mask = 0
        self.core = _core.Core(_core.CoreConfig(**asdict(config)), log_iterations=1 << 40)

    def begin_iteration(self, rows: Sequence[Row]) -> list[Command]:
        width = self.config.embedding_width
        given = [r.embedding is not None and width > 0 for r in rows]
        embeddings = np.zeros((len(rows), width), dtype=np.float16)
        for i, r in enumerate(rows):
            if given[i] and r.embedding is not None:
                embeddings[i] = round_f16(r.embedding)
        tuples = [(r.request, r.phase, r.tokens, has) for r, has in zip(rows, given, strict=True)]
        return self._after(self.core.begin_iteration(tuples, embeddings if any(given) else None))

    def gate(
        self, layer: int, probabilities: npt.ArrayLike, experts: Sequence[int], token_counts: Sequence[int]
    ) -> list[Command]:
        return self._after(
            self.core.gate(layer, np.asarray(probabilities), list(experts), list(token_counts))
        )

    def speculation(self, layer: int, target: int, probabilities: npt.ArrayLike) -> list[Command]:
        return self._after(self.core.speculation(layer, target, np.asarray(probabilities)))

    def search_done(self, ticket: int) -> list[Command]:
        return self._after(self.core.search_done(ticket))

    def loaded(self, expert: int) -> list[Command]:
        return self._after(self.core.loaded(expert))

    def paused(self, expert: int, bytes_done: int) -> list[Command]:
        return self._after(self.core.paused(expert, bytes_done))

    def load_failed(self, expert: int, reason: str) -> list[Command]:
        return self._after(self.core.load_failed(expert, reason))

    def computed(self, layer: int, experts: Sequence[int]) -> list[Command]:
        return self._after(self.core.computed(layer, list(experts)))

    def end_iteration(self) -> list[Command]:
        return self._after(self.core.end_iteration())

    def seed_store(
        self, maps: npt.ArrayLike, embeddings: npt.ArrayLike, written: npt.ArrayLike
    ) -> list[Command]:
        units = np.asarray(embeddings, dtype=np.float16) if self.config.embedding_width else None
        halves = np.asarray(maps, dtype=np.float16)
        return self._after(self.core.seed_store(halves, units, np.asarray(written).tolist()))

    def foresight(self, step: int, required: Sequence[Sequence[int]]) -> list[Command]:
        return self._after(self.core.foresight(step, [list(ids) for ids in required]))

    def counter_values(self) -> dict[str, Any]:
        """All counters by name, misses derived."""
        counts = {name: value.tolist() for name, value in self.core.layer_counts().items()}
        other = np.array(counts["activated"]) - counts["hits"] - counts["late"]
        return dict(self.core.counters()) | counts | {"misses": other.tolist()}

    def _after(self, mask: int) -> list[Command]:
        commands = self._logged()
        forward, searches = self.core.take_forward(), self.core.take_searches()
        devices = [self.core.take_device(g) for g in range(self.config.devices)]
        # A Wait goes into no box, and the reason of an Abort is asked for.
        assert forward == [c[:2] for c in commands if c[0] in ("WaitSearch", "Abort")]
        assert [self.core.abort_reason()] == ([c[2] for c in commands if c[0] == "Abort"] or [""])
        assert searches == [c for c in commands if c[0] == "Search"]
        for g, box in enumerate(devices):
            mine = {"PreemptPrefetch": 1, "Load": 2}
            assert box == [c for c in commands if c[0] in mine and c[mine[c[0]]] == g]
        flags = {_core.FORWARD_PENDING: forward, _core.SEARCH_PENDING: searches}
        flags |= {1 << _core.DEVICE_SHIFT + g: box for g, box in enumerate(devices)}
        assert all(bool(mask & bit) == bool(box) for bit, box in flags.items())
        self.mask = mask
        return commands

    def _logged(self) -> list[Command]:
        log: dict[str, Any] = self.core.take_log()
        columns = {key: value.tolist() for key, value in log.items() if not isinstance(value, tuple)}
        kinds = columns["kind"]
        experts, texts = (lists(*log[name]) for name in ("experts", "reason"))
        return [
            command({key: value[i] for key, value in columns.items()}, experts[i], texts[i])
            for i, kind in enumerate(kinds)
            if kind >= FIRST_COMMAND
        ]


def lists(values: Any, ends: npt.NDArray[np.int64]) -> list[Any]:
    """A list column of the log, one slice per record."""
    return [values[begin:end] for begin, end in pairwise([0, *ends.tolist()])]


def command(record: dict[str, Any], experts: npt.NDArray[np.int32], reason: bytes) -> Command:
    """One record of the log as the tuple that the reference returns."""
    name = COMMANDS[record["kind"] - FIRST_COMMAND]
    if name == "Search":
        kind = SEARCHES[record["detail"]]
        return (name, record["ticket"], kind, *(record[k] for k in ("layer", "target", "work", "blocking")))
    if name == "Load":
        place = (record[k] for k in ("expert", "device", "slot", "offset", "bytes"))
        return (name, *place, LOADS[record["detail"]], record["evicts"])
    if name == "Wait":
        return (name, tuple(experts.tolist()))
    if name == "Abort":
        return (name, record["expert"], reason.decode())
    return (name, record["ticket" if name == "WaitSearch" else "device"])


class Both:
    """Drives both cores with the same events and compares what comes back."""

    def __init__(self, config: Config) -> None:
        self.compiled, self.reference = CompiledCore(config), ReferenceCore(config)

    def __getattr__(self, event: str) -> Any:
        def drive(*arguments: Any) -> list[Command]:
            try:
                commands: list[Command] = getattr(self.reference, event)(*arguments)
            except CoreError:
                with pytest.raises(CoreError):
                    getattr(self.compiled, event)(*arguments)
                raise
            assert getattr(self.compiled, event)(*arguments) == commands, (event, arguments)
            reference = self.reference
            chunk: dict[int, object] = {_core.CHUNK_OPEN: reference.chunk, _core.MORE_CHUNKS: reference.rest}
            chunk[_core.CHUNK_READY] = all(reference.states[e].status == "resident" for e in reference.chunk)
            assert all(bool(self.compiled.mask & bit) == bool(state) for bit, state in chunk.items())
            return commands

        return drive

    def counter_values(self) -> dict[str, Any]:
        """The counters of both, which are the same."""
        values = self.reference.counter_values()
        assert self.compiled.counter_values() == values
        return values


def compare_on(seed: int, iterations: int) -> None:
    """One walk through both."""
    rng = np.random.default_rng(seed)
    config = draw_config(rng)
    both = Both(config)
    Walk(both, config, rng).run(iterations)
    compiled, reference = both.compiled.core, both.reference
    for g in range(config.devices):
        resident = [e for e in reference.slots[g] if e >= 0 and reference.states[e].status == "resident"]
        assert compiled.residents(g) == resident
    maps, embeddings, written = compiled.store_contents()
    assert np.array_equal(maps, reference.store.maps)
    assert np.array_equal(np.argsort(written), np.argsort(reference.store.written)), "only their order counts"
    assert embeddings is None or np.array_equal(embeddings, reference.store.embeddings)


@given(SEEDS)
@settings(deadline=None, max_examples=200)
def test_both_give_the_same_commands_and_counters(seed: int) -> None:
    compare_on(seed, iterations=4)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_both_agree_on_a_thousand_longer_walks() -> None:
    for seed in range(1000):
        compare_on(seed, iterations=6)


@given(SEEDS)
@settings(deadline=None, max_examples=60)
def test_searches_and_replacement_equal_the_formulas_bit_for_bit_on_larger_stores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, experts, width = (int(rng.integers(1, n)) for n in (7, 70, 70))
    capacity, maps = int(rng.integers(1, 70)), int(rng.integers(1, 100))
    distance = int(rng.integers(1, layers + 1))
    config = Config(
        layers,
        experts,
        1,
        1,
        1,
        1,
        prefetch_distance=distance,
        store_capacity=capacity,
        embedding_width=width,
    )
    searcher = _core.Searcher(_core.CoreConfig(**asdict(config)))
    store = ReferenceStore(layers, experts, width, capacity)
    gates = [round_f16([draw_gate_row(rng, experts) for _ in range(layers)]) for _ in range(maps)]
    embeddings = [round_f16(rng.normal(size=width) * (rng.random() < 0.7)) for _ in range(maps)]
    for i in range(1, maps):
        if rng.random() < 0.2:
            twin = int(rng.integers(i))
            gates[i], embeddings[i] = gates[twin], embeddings[twin]
    searcher.fill(np.stack(gates), np.stack(embeddings))
    for rows, embedding in zip(gates, embeddings, strict=True):
        store.update(rows, unit_embedding(embedding), distance)
    kept_maps, kept_embeddings, written = searcher.contents()
    assert np.array_equal(kept_maps, store.maps)
    assert kept_embeddings is not None
    assert np.array_equal(kept_embeddings, store.embeddings)
    assert np.array_equal(np.argsort(written), np.argsort(store.written))
    asked = int(rng.integers(maps))
    rows = gates[asked]
    if rng.random() < 0.7:
        rows = round_f16([draw_gate_row(rng, experts) for _ in range(layers)])
    unit = unit_embedding(embeddings[asked])
    expected = [] if unit is None else [store.semantic(unit)]
    expected += [store.trajectory(rows[: m + 1]) for m in range(layers - distance)]
    assert searcher.search_iteration(rows, embeddings[asked]) == expected


@given(SEEDS, st.floats(-1.0, 1.5, width=32), st.integers(1, 8))
@settings(deadline=None, max_examples=200)
def test_delta_sets_equal_brute_force(seed: int, score: float, top_k: int) -> None:
    rng = np.random.default_rng(seed)
    p = round_f16(draw_gate_row(rng, int(rng.integers(top_k, 9))))
    reachable = 1.0 - np.cumsum(np.sort(p.astype(np.float64))[::-1])
    for s in [score, *reachable.astype(np.float32).tolist()]:
        expected = delta_set_brute_force(p, delta_of(float(np.float32(s))), top_k)
        assert _core.select_experts(p.astype(np.float32), s, top_k) == expected

"""Events that a policy core has to refuse at a given moment of a random walk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from reference_predictions import Row

if TYPE_CHECKING:
    from core_walk import Walk

Attempt = tuple[Any, ...]


def illegal_events(walk: Walk) -> list[Attempt]:
    """(event, arguments …), none of which may be accepted now."""
    return [
        *_gates(walk),
        *_iterations(walk),
        *_transfers(walk),
        *_before_the_run(walk),
    ]


def _gates(walk: Walk) -> list[Attempt]:
    rules, config = walk.rules, walk.config
    batch, width = max(len(walk.rows), 1), config.experts
    layer, rows = rules.layer, np.full((batch, width), 0.25, dtype=np.float32)
    one = np.zeros((batch, width), dtype=np.int32)  # the first row has one token for expert 0
    one[0, 0] = 1
    counts = one if config.counts_rows else None
    nothing, last = np.zeros_like(one), np.roll(one, -1, axis=1)
    attempts: list[Attempt] = [
        ("gate", layer + 2, rows, [0], [1], counts),
        ("gate", layer + 1, rows, [], [], nothing if config.counts_rows else None),
        ("gate", layer + 1, rows, [0, 0], [1, 1], counts),
        ("gate", layer + 1, rows, [width], [1], last if config.counts_rows else None),
        ("gate", layer + 1, rows + np.float32(1.5), [0], [1], counts),
        ("gate", layer + 1, np.full_like(rows, np.nan), [0], [1], counts),
        ("gate", layer + 1, rows[:, :-1], [0], [1], counts),
        ("gate", layer + 1, rows, [0], [1, 1], counts),
        ("gate", layer + 1, rows, [0], [0], nothing if config.counts_rows else None),
        ("gate", layer + 1, rows, [0], [1], None if config.counts_rows else one),
        ("speculation", layer, layer, rows),
    ]
    if config.counts_rows:
        attempts += [
            ("gate", layer + 1, rows, [0], [2], one),
            ("gate", layer + 1, rows, [0], [1], one[:, :-1]),
            ("gate", layer + 1, rows, [0], [1], one[1:]),
        ]
    if config.counts_rows and width > 1:
        attempts.append(("gate", layer + 1, rows, [0], [1], one + last))
    if config.counts_rows and batch > 1:
        bent = one.copy()
        bent[:2, 0] = 2, -1
        attempts.append(("gate", layer + 1, rows, [0], [1], bent))
    if not rules.open or not rules.layer_done:
        attempts.append(("gate", layer + 1, rows, [0], [1], counts))
    if not rules.open or config.predictor != "speculate":
        attempts.append(("speculation", layer, layer + 1, rows))
    return attempts


def _iterations(walk: Walk) -> list[Attempt]:
    rules, config = walk.rules, walk.config
    if rules.open:
        attempts: list[Attempt] = [("begin_iteration", walk.rows)]
    else:
        attempts = [
            ("end_iteration", []),
            ("begin_iteration", []),
            ("begin_iteration", [Row(1, "decode", 1), Row(2, "prefill", 9)]),
            ("begin_iteration", [Row(1, "decode", 0)]),
        ]
        if config.embedding_width:
            hot = np.full(config.embedding_width, 1e6, dtype=np.float32)  # infinite in half precision
            attempts.append(("begin_iteration", [Row(1, "decode", 1, hot)]))
    if not rules.layer_done or rules.layer < config.layers - 1:
        attempts.append(("end_iteration", []))
    attempts.append(("end_iteration", [5, 3, 5]))
    return attempts


def _transfers(walk: Walk) -> list[Attempt]:
    rules, config = walk.rules, walk.config
    flights = [d.transfer for d in rules.devices if d.transfer is not None]
    flying, here = {transfer.expert for transfer in flights}, max(rules.layer, 0) * config.experts
    attempts: list[Attempt] = [
        ("search_done", rules.searches.next_ticket),
        ("loaded", -1),
        ("loaded", rules.total),
        ("foresight", -1, [[0]]),
        ("foresight", walk.known_steps + 2 * config.layers, [[0]]),
        ("foresight", max(0, rules.iteration * config.layers + rules.layer + 1), [[rules.total]]),
    ]
    ready = rules.computable()
    attempts += [("computed", rules.layer, [e]) for e in range(here, here + config.experts) if e not in ready]
    attempts += [("loaded", e) for e in range(rules.total) if e not in flying]
    for transfer in flights:
        wrong = config.expert_bytes if transfer.asked_to_stop else transfer.offset
        attempts.append(("paused", transfer.expert, wrong))
    done_next = rules.searches.done_next()
    attempts += [("search_done", n) for n, *_ in rules.searches.pending if n not in done_next]
    return attempts


def _before_the_run(walk: Walk) -> list[Attempt]:
    rules, config = walk.rules, walk.config
    attempts: list[Attempt] = [("preload", [0, 0]), ("preload", [-1]), ("preload", [rules.total])]
    owned = [config.owned(g) for g in range(config.devices)]
    attempts += [  # all slots of a device that owns more
        ("preload", [g + n * config.devices for n in range(config.slots(g))])
        for g in range(config.devices)
        if config.slots(g) < owned[g]
    ]
    if rules.iteration >= 0:
        shape = (0, config.layers, config.experts)
        store = np.zeros(shape), np.zeros((0, config.embedding_width)), np.zeros(0, int)
        attempts += [("seed_store", *store), ("preload", [])]
    return attempts

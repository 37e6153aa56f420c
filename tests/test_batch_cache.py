"""The batch cache against plain concatenation, row by row."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="torch is not installed (extra `real`)")
pytest.importorskip("transformers", reason="transformers is not installed (extra `real`)")

import torch
from finemoe.realexec.batch_cache import BatchCache

LAYERS, HEADS, MOST = 2, 3, 6
WIDTHS = (4, 5)  # of keys and values


class Rows:
    """What each row should hold: per layer, keys and values [heads, length, width]."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: list[list[list[torch.Tensor]]] = []  # [row][layer][keys, values]

    def new(self, count: int, positions: int) -> list[list[torch.Tensor]]:
        """States [count, heads, positions, width] of each layer."""
        return [
            [torch.randn(count, HEADS, positions, width, generator=self.generator) for width in WIDTHS]
            for _ in range(LAYERS)
        ]

    def prefill(self, cache: BatchCache, lengths: list[int]) -> None:
        longest = max(lengths)
        joining = BatchCache(LAYERS, len(lengths), room=0)
        joining.begin(lengths)
        states = self.new(len(lengths), longest)
        for layer in range(LAYERS):
            joining.cache.update(*states[layer], layer)
        joining.advance(longest)
        joining.trim()
        cache.join(joining)
        for row, length in enumerate(lengths):
            self.rows.append([[s[row, :, longest - length :] for s in of] for of in states])

    def decode(self, cache: BatchCache) -> None:
        cache.before_step()
        mask = cache.mask(1, torch.device("cpu"))
        assert mask.sum(dim=1).tolist() == [length + 1 for length in cache.lengths]
        assert mask[:, -1].all()
        states = self.new(len(self.rows), 1)
        assert cache.cache.get_seq_length() == cache.width
        for layer in range(LAYERS):
            seen = cache.cache.update(*states[layer], layer)
            for row, own in enumerate(self.rows):
                for kind in range(2):
                    own[layer][kind] = torch.cat([own[layer][kind], states[layer][kind][row]], dim=1)
                    length = own[layer][kind].shape[1]
                    assert torch.equal(seen[kind][row, :, seen[kind].shape[2] - length :], own[layer][kind])
                    assert torch.isfinite(seen[kind]).all()
            assert seen[0].shape[2] == mask.shape[1]
        cache.step_done()

    def leave(self, cache: BatchCache, row: int) -> None:
        cache.leave(row)
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last


@pytest.mark.parametrize("seed", range(6))
def test_rows_stay_what_they_are(seed: int) -> None:
    draw, rows = random.Random(seed), Rows(seed)
    cache = BatchCache(LAYERS, MOST, room=3)
    for _ in range(150):
        free = MOST - len(rows.rows)
        if free and draw.random() < 0.15:
            rows.prefill(cache, [draw.randint(1, 40) for _ in range(draw.randint(1, free))])
        elif rows.rows and draw.random() < 0.15:
            rows.leave(cache, draw.randrange(len(rows.rows)))
        elif rows.rows:
            rows.decode(cache)
        assert cache.lengths == [own[0][0].shape[1] for own in rows.rows]
        assert cache.width == max(cache.lengths, default=0)


def test_a_step_copies_nothing_but_its_own_position() -> None:
    """Buffers grow by half: over many steps few allocations."""
    rows, cache = Rows(0), BatchCache(LAYERS, MOST)
    rows.prefill(cache, [10, 20])
    grown, before = 0, cache.bytes()
    for _ in range(400):
        rows.decode(cache)
        grown += cache.bytes() != before
        before = cache.bytes()
    assert grown <= 6
    whole = sum(WIDTHS) * 4 * HEADS * LAYERS * 2 * max(cache.lengths)
    assert before <= 2.5 * whole

"""One dense FFN as experts: perturbed copies, fitted slices, and counts that cannot be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from finemoe.errors import SettingError
from finemoe.realexec.clustering import choose
from finemoe.realexec.dense import Ffn, shared_prefix, shipped_prompts
from finemoe.realexec.slices import deal_out, neuron_outputs, slice_ffn
from finemoe.realexec.upcycle import Upcycling, upcycle_layer

Floats = npt.NDArray[np.float32]
HIDDEN, WIDTH = 16, 24


def random_ffn(seed: int = 0) -> Ffn:
    rng = np.random.default_rng(seed)
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    return Ffn(*(rng.standard_normal(shape, dtype=np.float32) * np.float32(0.25) for shape in shapes))


def random_inputs(count: int = 600, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN), dtype=np.float32) + np.float32(0.5)


def dense_output(ffn: Ffn, inputs: Floats) -> Floats:
    output: Floats = neuron_outputs(ffn, inputs) @ ffn.down.T
    return output


def moe_output(experts: list[Ffn], router: Floats, inputs: Floats, top_k: int) -> Floats:
    """As Mixtral computes it, token by token."""
    chosen, weights = choose(inputs @ router.T, top_k)
    rows = [
        sum(w * dense_output(experts[e], x[None])[0] for e, w in zip(picked, shares, strict=True))
        for x, picked, shares in zip(inputs, chosen, weights, strict=True)
    ]
    return np.array(rows, dtype=np.float32)


def test_copies_are_five_percent_off_and_all_different() -> None:
    ffn = random_ffn()
    experts = list(upcycle_layer(0, ffn, random_inputs(), Upcycling()).experts)
    assert len(experts) == 8
    for name in ("gate", "up", "down"):
        plain = getattr(ffn, name)
        for expert in experts:
            off = np.linalg.norm(getattr(expert, name) - plain) / np.linalg.norm(plain)
            assert off == pytest.approx(0.05, rel=0.15)
        assert len({getattr(expert, name).tobytes() for expert in experts}) == 8


def test_a_choice_of_copies_is_near_the_dense_output_and_a_wrong_one_differs() -> None:
    ffn, inputs = random_ffn(), random_inputs()
    layer = upcycle_layer(0, ffn, inputs, Upcycling())
    experts = list(layer.experts)
    dense = dense_output(ffn, inputs)
    mixed = moe_output(experts, layer.router.weight, inputs, 2)
    assert np.linalg.norm(mixed - dense) < 0.12 * np.linalg.norm(dense)
    wrong = moe_output(experts[1:] + experts[:1], layer.router.weight, inputs, 2)
    assert np.linalg.norm(wrong - mixed) > 0.02 * np.linalg.norm(dense)


@pytest.mark.parametrize("slices", [False, True])
def test_seed_and_layer_decide_every_byte(slices: bool) -> None:
    def weights(layer: int, seed: int) -> bytes:
        made = upcycle_layer(layer, random_ffn(), random_inputs(), Upcycling(seed=seed, slices=slices))
        return made.router.weight.tobytes() + b"".join(
            array.tobytes() for expert in made.experts for array in (expert.gate, expert.up, expert.down)
        )

    assert weights(3, 7) == weights(3, 7)
    assert len({weights(3, 7), weights(4, 7), weights(3, 8)}) == 3


def test_slices_are_a_partition_of_the_neurons() -> None:
    ffn = random_ffn()
    experts = slice_ffn(ffn, random_inputs(), np.eye(8, HIDDEN, dtype=np.float32), 2).experts
    assert {expert.gate.shape for expert in experts} == {(WIDTH // 8, HIDDEN)}
    for name in ("gate", "up"):
        rows = np.concatenate([getattr(expert, name) for expert in experts])
        assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, getattr(ffn, name).tolist()))


def test_all_slices_with_equal_weights_are_the_dense_ffn() -> None:
    ffn, inputs = random_ffn(), random_inputs()
    flat = np.zeros((8, HIDDEN), dtype=np.float32)
    sliced = slice_ffn(ffn, inputs, flat, 8)
    assert sliced.error < 1e-5
    fresh = random_inputs(seed=9)
    assert moe_output(sliced.experts, flat, fresh, 8) == pytest.approx(dense_output(ffn, fresh), abs=1e-4)


def test_fitted_slices_beat_scaled_ones_on_inputs_not_seen() -> None:
    ffn, seen, fresh = random_ffn(), random_inputs(4000), random_inputs(400, seed=9)
    made = upcycle_layer(0, ffn, seen, Upcycling(8, 4, slices=True))
    experts, router = list(made.experts), made.router.weight
    dense = dense_output(ffn, fresh)
    error = np.linalg.norm(moe_output(experts, router, fresh, 4) - dense) / np.linalg.norm(dense)
    assert made.error is not None
    assert made.error < error < 1.5 * made.error
    column = {ffn.gate[n].tobytes(): n for n in range(WIDTH)}
    places = [[column[row.tobytes()] for row in expert.gate] for expert in experts]
    plain = [Ffn(ffn.gate[own], ffn.up[own], ffn.down[:, own]) for own in places]
    scaled = moe_output(plain, router, fresh, 4)
    scaled *= np.sum(scaled * dense) / np.sum(scaled * scaled)  # the best factor there is
    assert error < 0.95 * np.linalg.norm(scaled - dense) / np.linalg.norm(dense)


def test_neurons_go_where_they_are_active() -> None:
    chosen = np.eye(4, dtype=bool).repeat(10, axis=0)  # ten tokens for each of four experts
    home = np.array([2, 0, 1, 3, 3, 1, 0, 2])
    energy = np.full((40, 8), 0.1, dtype=np.float32)
    energy[np.argmax(chosen, axis=1)[:, None] == home] = 5
    assert deal_out(energy, chosen).tolist() == home.tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Upcycling(experts=1, top_k=1), "--experts 1: choose from 2 to 1024."),
        (Upcycling(experts=2000), "--experts 2000: choose from 2 to 1024."),
        (Upcycling(top_k=9), "--top-k 9: choose from 1 to the 8 experts."),
        (Upcycling(top_k=0), "--top-k 0: choose from 1 to the 8 experts."),
        (Upcycling(seed=-1), "--seed -1: choose a number from 0 on."),
    ],
)
def test_counts_that_cannot_be(settings: Upcycling, message: str) -> None:
    with pytest.raises(SettingError) as error:
        settings.check_counts()
    assert str(error.value) == message


def test_slices_that_do_not_divide_the_width() -> None:
    with pytest.raises(SettingError, match=r"width of 1536 is no multiple .* 24, 32, 48, 64\."):
        Upcycling(experts=60, slices=True).check_width(1536)
    Upcycling(experts=64, slices=True).check_width(1536)
    Upcycling(experts=60).check_width(1536)  # copies are of any number


def test_fewer_tokens_than_experts() -> None:
    with pytest.raises(SettingError, match="8 experts are to be made from 5 prompt tokens"):
        upcycle_layer(0, random_ffn(), random_inputs(5), Upcycling())


def test_shared_prefix() -> None:
    assert shared_prefix([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3]]) == 2
    assert shared_prefix([[1, 2], [1, 2, 3]]) == 2
    assert shared_prefix([[1, 2]]) == 0


def test_the_shipped_prompts_are_varied() -> None:
    prompts = shipped_prompts()
    words = [len(prompt.split()) for prompt in prompts]
    assert len(set(prompts)) == len(prompts) > 64
    assert min(words) < 12
    assert max(words) > 100

"""The recorder against the model's own word, on tiny models of every family."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from finemoe.traces.routing import RequestRouting, RoutingMeta
from finemoe.traces.routing_check import check_routing
from tiny_models import EXPERTS, FAMILIES, TOP_K, VOCABULARY, tiny_model, torch

from finemoe.realexec.gates import MoeModel, find_moe  # isort: skip  # after torch is known to be there
from finemoe.realexec.generate import generate_recorded  # isort: skip
from finemoe.realexec.recorder import GateRecorder, Iteration  # isort: skip

NEW = 5
LENGTHS = (7, 12, 3)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, VOCABULARY, length).tolist() for length in lengths]


def record(
    model: Any, some: list[list[int]], distances: tuple[int, ...] = (1,), ends: frozenset[int] = frozenset()
) -> tuple[list[RequestRouting], list[list[int]]]:
    with GateRecorder(model, find_moe(model), distances) as recorder:
        return generate_recorded(model, recorder, some, NEW, ends)


def own_word(model: Any, moe: MoeModel, ids: list[int]) -> list[npt.NDArray[np.float32]]:
    """Router logits [tokens, J] of each layer as the model itself returns them for one sequence."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), output_router_logits=True)
    return [logits.reshape(len(ids), moe.num_experts).float().numpy() for logits in output.router_logits]


def distribution(logits: npt.NDArray[np.float32], scoring: str) -> npt.NDArray[np.float32]:
    """Written here anew, with torch only for the exponential, whose last bit is its own."""
    values = torch.from_numpy(logits)
    if scoring == "softmax":
        return np.asarray(torch.softmax(values, dim=-1).numpy())
    scores = torch.sigmoid(values)
    return np.asarray((scores / scores.sum(dim=-1, keepdim=True)).numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_models_own_of_the_same_batch(family: str) -> None:
    """f16(softmax(router_logits)) bit for bit where an iteration has one token per request; the choices are
    those that the experts get."""
    model = tiny_model(family)
    moe = find_moe(model)
    ids = torch.tensor([[5], [50], [77]])
    asked: list[Any] = []
    hooks = [
        layer.experts.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[1]))
        for layer in moe.layers
    ]
    with GateRecorder(model, moe) as recorder, torch.no_grad():
        recorder.begin(torch.ones(3, 1, dtype=torch.bool))
        output = model(input_ids=ids, output_router_logits=True)
        iteration = recorder.end()
    for hook in hooks:
        hook.remove()
    assert len(output.router_logits) == len(asked) == len(moe.layers)
    for layer, (logits, chosen) in enumerate(zip(output.router_logits, asked, strict=True)):
        rows = distribution(logits.reshape(3, EXPERTS).float().numpy(), moe.scoring)
        assert np.array_equal(iteration.gate[:, layer], rows.astype(np.float16))
        expected = np.zeros((3, EXPERTS), np.int32)
        np.put_along_axis(expected, chosen.numpy(), 1, axis=1)
        assert np.array_equal(iteration.counts[:, layer], expected)
    embedded = model.get_input_embeddings().weight[ids[:, 0]]
    assert np.array_equal(iteration.embedding, embedded.detach().numpy().astype(np.float16))


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batch_equals_single_runs(family: str) -> None:
    """As recorded: within 1e-5 and a step of f16; choices equal where the top-K margin exceeds 1e-5. The mean
    of a prompt's rows is over its own tokens."""
    model = tiny_model(family)
    moe = find_moe(model)
    some = prompts()
    together, new = record(model, some)
    for prompt, batched, made in zip(some, together, new, strict=True):
        (alone,), (same,) = record(model, [prompt])
        assert made == same
        assert np.abs(batched.gate.astype(np.float32) - alone.gate).max() <= 1e-5 + 2**-11
        assert batched.embedding is not None
        assert alone.embedding is not None
        assert np.abs(batched.embedding.astype(np.float32) - alone.embedding).max() <= 1e-3
        for distance in (1,):
            difference = batched.speculation[distance].astype(np.float32) - alone.speculation[distance]
            assert np.abs(difference).max() <= 1e-5 + 2**-11
        logits = own_word(model, moe, prompt + made[:-1])
        clear = clear_layers(model, moe, prompt + made[:-1])
        for iteration in range(NEW):
            part = slice(0, len(prompt)) if iteration == 0 else slice(len(prompt) + iteration - 1, None)
            for layer in range(len(moe.layers)):
                own = logits[layer][part] if iteration == 0 else logits[layer][part][:1]
                expected = distribution(own, moe.scoring).mean(axis=0)
                assert np.abs(batched.gate[iteration, layer] - expected).max() <= 1e-5 + 2**-11
                if clear[layer][part if iteration == 0 else part.start].all():
                    ids, counts = batched.required(iteration, layer)
                    assert ids.tolist() == alone.required(iteration, layer)[0].tolist()
                    assert counts.tolist() == alone.required(iteration, layer)[1].tolist()


def clear_layers(model: Any, moe: MoeModel, ids: list[int]) -> list[npt.NDArray[np.bool_]]:
    """Whether the margin between the K-th and the next score exceeds 1e-5, per layer and token. With groups
    and correction biases there is no one such margin, so there every distance between two scores counts."""
    found = []
    for logits in own_word(model, moe, ids):
        scores = -np.sort(-distribution(logits, moe.scoring), axis=-1)
        gaps = scores[:, :-1] - scores[:, 1:]
        plain = not moe.family.startswith("deepseek")
        found.append(gaps[:, TOP_K - 1] > 1e-5 if plain else gaps.min(axis=-1) > 1e-5)
    assert np.mean(found) > 0.9
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_means_are_within_1e_5(family: str) -> None:
    """The same comparison before rounding to f16: the recorder's own rows, padded against alone."""
    model = tiny_model(family)
    moe = find_moe(model)
    some = prompts()
    pads = [max(LENGTHS) - length for length in LENGTHS]
    ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, some, strict=True)])
    mask = torch.arange(max(LENGTHS)) >= torch.tensor(pads)[:, None]
    exact: dict[str, Any] = {}

    class Unrounded(GateRecorder):
        """Keeps the means that the recorder rounds."""

        name = ""

        def _mean(self, values: Any) -> Any:
            exact.setdefault(self.name, []).append(mean := super()._mean(values))
            return mean

    def run(name: str, tokens: Any, own: Any) -> Iteration:
        recorder = Unrounded(model, moe)
        recorder.name = name
        with recorder, torch.no_grad():
            recorder.begin(own)
            positions = (own.long().cumsum(dim=1) - 1).clamp(min=0)
            model(input_ids=tokens, attention_mask=own.long(), position_ids=positions)
            return recorder.end()

    run("batch", ids, mask)
    for row, prompt in enumerate(some):
        run(str(row), torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.bool))
        for batched, alone in zip(exact["batch"], exact[str(row)], strict=True):
            assert (batched[..., row, :] - alone[..., 0, :]).abs().max() <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_is_the_later_gate_on_this_layers_input(family: str) -> None:
    model = tiny_model(family, num_hidden_layers=5)
    moe = find_moe(model)
    inputs: list[Any] = []
    hooks = [
        layer.router.register_forward_hook(lambda _, given, __: inputs.append(given[0].clone()))
        for layer in moe.layers
    ]
    ids = torch.tensor([[5], [50]])
    with GateRecorder(model, moe, (1, 3)) as recorder, torch.no_grad():
        recorder.begin(torch.ones(2, 1, dtype=torch.bool))
        model(input_ids=ids)
        iteration = recorder.end()
        for hook in hooks:
            hook.remove()
        for distance in (1, 3):
            rows = iteration.speculation[distance]
            for layer in range(len(moe.layers) - distance):
                logits = moe.logits(moe.layers[layer + distance].router(inputs[layer]))
                expected = distribution(logits.numpy(), moe.scoring).astype(np.float16)
                assert np.array_equal(rows[:, layer], expected)
            assert not rows[:, len(moe.layers) - distance :].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_obey_the_format(family: str) -> None:
    model = tiny_model(family)
    moe = find_moe(model)
    found, new = record(model, prompts())
    meta = RoutingMeta(
        model="tiny",
        layers=len(moe.layers),
        experts=moe.num_experts,
        top_k=moe.top_k,
        expert_bytes=moe.expert_bytes(),
        embedding_width=32,
        source="recorded",
        gate_content="full",
        speculation=(1,),
    )
    for number, (routing, length, made) in enumerate(zip(found, LENGTHS, new, strict=True)):
        check_routing(routing, meta, "x", number)
        assert routing.tokens(TOP_K).tolist() == [length] + [1] * (NEW - 1)
        assert len(made) == NEW


def test_many_tokens_are_worked_off_in_parts() -> None:
    """A prompt beyond what the hooks hold gives the mean of the model's own rows."""
    model = tiny_model("mixtral", max_position_embeddings=1024)
    moe = find_moe(model)
    (prompt,) = prompts((700,))
    (routing,), _ = record(model, [prompt], distances=(1, 2))
    for layer, logits in enumerate(own_word(model, moe, prompt)):
        expected = distribution(logits, moe.scoring).mean(axis=0)
        assert np.abs(routing.gate[0, layer] - expected).max() <= 1e-5 + 2**-11
    assert routing.speculation[2][:, 0].any()
    assert not routing.speculation[2][:, 1:].any()


def test_a_request_ends_at_an_end_token_but_not_with_its_first() -> None:
    model = tiny_model("mixtral")
    _, free = record(model, prompts())
    ends = frozenset({free[0][0], free[1][2]})
    found, new = record(model, prompts(), ends=ends)
    assert all(made[0] not in ends for made in new)
    assert len(new[1]) <= 3 or new[1][:3] != free[1][:3]
    for routing, made in zip(found, new, strict=True):
        assert routing.iterations == len(made)
        assert len(made) == NEW or made[-1] in ends
        assert not ends & set(made[:-1])


def test_the_recorder_leaves_the_model_as_it_was() -> None:
    model = tiny_model("mixtral")
    moe = find_moe(model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with GateRecorder(model, moe, (1,)) as recorder:
            recorder.begin(torch.ones(1, 3, dtype=torch.bool))
            assert torch.equal(model(input_ids=ids).logits, before)
            recorder.end()
            assert torch.equal(model(input_ids=ids).logits, before)  # outside begin … end: not recorded
            with pytest.raises(RuntimeError, match="0 of 3 MoE layers"):
                recorder.end()
    assert all(not layer.router._forward_hooks for layer in moe.layers)

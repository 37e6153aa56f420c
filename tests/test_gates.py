"""`find_moe` on tiny models of every family: where experts and routers are, and how routers are read."""

from __future__ import annotations

from typing import Any

import pytest
from finemoe.errors import SettingError
from tiny_models import EXPERTS, FAMILIES, TOP_K, tiny_model, torch, transformers

from finemoe.realexec.gates import find_moe  # isort: skip  # after torch is known to be there

SIGMOID = {"deepseek_v3"}


@pytest.mark.parametrize("family", FAMILIES)
def test_finds_layers_and_scoring(family: str) -> None:
    model = tiny_model(family)
    moe = find_moe(model)
    dense = 1 if family.startswith("deepseek") else 0
    assert (moe.family, moe.num_experts, moe.top_k) == (family, EXPERTS, TOP_K)
    assert moe.scoring == ("sigmoid" if family in SIGMOID else "softmax")
    assert [layer.index for layer in moe.layers] == list(range(3 - dense))
    for layer in moe.layers:
        assert layer.name.split(".")[2] == str(layer.index + dense)
        assert {layer.router, layer.experts} <= set(model.get_submodule(layer.name).children())
    assert moe.expert_bytes() == 3 * 32 * 24 * 4  # gate, up, down of width 32 x 24 in fp32


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_touched_and_meta_will_do(family: str) -> None:
    model = tiny_model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    moe = find_moe(model)
    assert model.training
    assert all(layer.router.training for layer in moe.layers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.device("meta"):
        found = find_moe(transformers.AutoModelForCausalLM.from_config(model.config))
    assert (found.num_experts, found.top_k, found.scoring) == (moe.num_experts, moe.top_k, moe.scoring)


@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_order_experts_as_the_router_does(family: str) -> None:
    """Sums are 1, and where nothing but the scores decides, the chosen experts are the most probable ones."""
    plain: dict[str, dict[str, Any]] = {
        "deepseek_v2": {"topk_method": "greedy"},
        "deepseek_v3": {"n_group": 1, "topk_group": 1},
    }
    model = tiny_model(family, **plain.get(family, {}))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    moe = find_moe(model)
    hidden = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
    for layer in moe.layers:
        with torch.no_grad():
            output = layer.router(hidden)
            rows = moe.probabilities(moe.logits(output))
            assert torch.equal(moe.ask(layer.index, hidden), moe.logits(output))
        assert torch.allclose(rows.sum(dim=-1), torch.ones(20))
        best = rows.topk(TOP_K, dim=-1).indices.sort(dim=-1).values
        assert torch.equal(best, moe.chosen(output).sort(dim=-1).values)


def test_one_expert_per_token() -> None:
    """Weights that are all 1 show nothing; Qwen2's are not normalised and do."""
    assert find_moe(tiny_model("mixtral", num_experts_per_tok=1)).scoring == "softmax"
    assert find_moe(tiny_model("qwen2_moe", num_experts_per_tok=1)).scoring == "softmax"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LlamaConfig", "llama models have no routed experts"),
        ("JetMoeConfig", "jetmoe models are not supported: its attention is routed"),
        ("LongcatFlashConfig", "chooses among 768 experts, 512 have weights"),
        ("DeepseekV4Config", "DeepseekV4TopKRouter scores by neither softmax nor sigmoid"),
        ("AfmoeConfig", "AfmoeTokenChoiceRouter does not answer to hidden states alone"),
        ("InklingTextConfig", "InklingTopkRouter does not return logits, weights and chosen experts"),
    ],
)
def test_refusals_name_family_and_reason(name: str, message: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)())
    with pytest.raises(SettingError, match=message):
        find_moe(model)


def test_a_model_whose_config_turns_experts_off() -> None:
    model = tiny_model("qwen3_moe", decoder_sparse_step=99)
    with pytest.raises(SettingError, match="this qwen3_moe model has no layer with routed experts"):
        find_moe(model)

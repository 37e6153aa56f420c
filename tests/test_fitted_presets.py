"""The presets fitted to recordings, against the requests that they were not fitted to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from finemoe.traces.fit import TRAINING_SHARE
from finemoe.traces.fit_sample import recorded_requests
from finemoe.traces.fit_search import generated_figures
from finemoe.traces.fit_statistics import mean_figures, measure
from finemoe.traces.npz_import import import_chosen_experts
from finemoe.traces.routing_file import RoutingFile
from finemoe.traces.routing_preset import load_preset
from shared_data import shared

HITS = ("static_hit", "overlap_1", "nearest_1K_d3", "nearest_10K_d3", "blend_1K_d3", "blend_10K_d3")


def categories(name: str) -> list[str]:
    if name.startswith("gpt"):
        lines = shared("routing/gpt-oss-20b_mmlu524.meta.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line)["category"] for line in lines]
    with np.load(shared("routing/deepseek-v2-lite_esft173.npz"), allow_pickle=False) as arrays:
        return [str(domain) for domain in arrays["domain"]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "recording"),
    [
        ("gpt-oss-20b", "gpt-oss-20b_mmlu524.npz"),
        ("deepseek-v2-lite", "deepseek-v2-lite_esft173.npz"),
    ],
)
def test_fitted_presets_reproduce_requests_held_out(tmp_path: Path, model: str, recording: str) -> None:
    """Hits within 0.03, entropy of every layer within 5 %, cosines of requests within 0.05."""
    import_chosen_experts(shared(f"routing/{recording}"), tmp_path / "t.parquet")
    file = RoutingFile(tmp_path / "t.parquet")
    order = np.random.default_rng(0).permutation(file.requests).tolist()
    requests = recorded_requests(file, order, categories(model), 512)
    cut = int(TRAINING_SHARE * len(requests))
    stored, served = requests[:cut], requests[cut:]
    lengths = ([len(request.gate) for request in stored], [len(request.gate) for request in served])
    recorded = measure(stored, served, file.meta.top_k, searches=500, rng=np.random.default_rng(0))
    preset = load_preset(model)
    generated = mean_figures([generated_figures(preset, file.meta, lengths, seed, 500) for seed in (0, 1, 2)])
    for name in HITS:
        assert generated.values[name] == pytest.approx(recorded.values[name], abs=0.03), name
    for name in ("cosine_within", "cosine_across"):
        assert generated.values[name] == pytest.approx(recorded.values[name], abs=0.05), name
    assert generated.entropy == pytest.approx(recorded.entropy, rel=0.05)

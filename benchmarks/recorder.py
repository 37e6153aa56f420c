"""What recording costs: time on a forward pass, and memory with the number of requests.

    python benchmarks/recorder.py [MODEL_DIR]

Without a folder the model is random and of Mixtral's shape, 8 layers x 8 experts, as wide as SmolLM2 (576).
Forward passes with and without the recorder take turns; each turn's CPU times make one ratio.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import measure  # before torch: it sets the thread pools
import torch
import transformers
from finemoe.realexec.gates import find_moe
from finemoe.realexec.record import RecordProgress, RecordSettings, record_routing
from finemoe.realexec.recorder import GateRecorder
from finemoe.realexec.stock_model import load_whole

CONTEXT = 64
REPEATS = 120
REQUESTS = 300
NEW_TOKENS = 8


def mixtral(layers: int, width: int, inner: int) -> Any:
    """A random model in fp32, seed 0."""
    config = transformers.MixtralConfig(
        vocab_size=2048,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def forward(model: Any, batch: int, tokens: int, context: int) -> Callable[[GateRecorder | None], None]:
    """A forward pass of `tokens` tokens per request behind `context` others, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    cache = transformers.DynamicCache(config=model.config)
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    with torch.no_grad():
        if context:
            model(input_ids=torch.randint(vocabulary, (batch, context), generator=generator), cache=cache)
    ids = torch.randint(vocabulary, (batch, tokens), generator=generator)
    positions = torch.arange(context, context + tokens).expand(batch, -1)

    def once(recorder: GateRecorder | None) -> None:
        with torch.no_grad():
            if recorder is not None:
                recorder.begin(mask)
            model(input_ids=ids, position_ids=positions, cache=cache, logits_to_keep=1)
            if recorder is not None:
                recorder.end()
        cache.crop(-tokens)

    return once


def overheads(model: Any) -> None:
    """Prints the ratio with distances none and 1, 3, for decode and prefill."""
    moe = find_moe(model)
    print(f"{'pass':<32}{'bare, ms':>9}{'recorded: median (quartiles)':>30}{'with 1,3':>16}")
    for name, batch, tokens, context in (
        ("decode, batch 1", 1, 1, CONTEXT),
        ("decode, batch 4", 4, 1, CONTEXT),
        (f"prefill of {CONTEXT} tokens, batch 1", 1, CONTEXT, 0),
    ):
        once = forward(model, batch, tokens, context)
        recorders = {
            "bare": None,
            "recorded": GateRecorder(model, moe),
            "with 1,3": GateRecorder(model, moe, (1, 3)),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in recorders}
        for turn in range(REPEATS + 2):
            for kind, recorder in recorders.items():
                with recorder or nullcontext():
                    begin = time.process_time()
                    once(recorder)
                    taken = time.process_time() - begin
                if turn > 1:  # the first ones warm caches
                    seconds[kind].append(taken)
        bare = seconds.pop("bare")
        shares = [
            statistics.quantiles([one / other - 1 for one, other in zip(more, bare, strict=True)], n=4)
            for more in seconds.values()
        ]
        cells = [f"{middle:>+10.1%} ({low:+.1%} … {high:+.1%})" for low, middle, high in shares]
        print(f"{name:<32}{statistics.median(bare) * 1e3:>9.1f}{''.join(cells)}")


def memory(folder: Path) -> None:
    """Prints the most memory that the process holds while it records N and 3 N requests, and when it then
    writes the file of all, whose footer Arrow keeps in memory until it is complete."""
    mixtral(4, 72, 96).save_pretrained(folder / "model")
    print(f"{'requests':>8}{'recording, MB':>15}{'writing the file, MB':>22}")
    for count in (REQUESTS, REQUESTS, 3 * REQUESTS):  # the first run warms caches and allocators
        prompts = folder / "prompts.jsonl"
        ids = ([(7 * i + j) % 2000 for j in range(24)] for i in range(count))
        prompts.write_text("".join(json.dumps({"token_ids": row}) + "\n" for row in ids))
        most = 0.0

        def follow(_: RecordProgress) -> None:
            nonlocal most
            most = max(most, resident_mb())

        settings = RecordSettings(
            model=folder / "model",
            prompts=prompts,
            output=folder / "routing.parquet",
            max_new_tokens=NEW_TOKENS,
            batch_size=4,
        )
        record_routing(settings, follow)
        print(f"{count:>8}{most:>15.1f}{resident_mb():>22.1f}")


def resident_mb() -> float:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def main() -> None:
    """Both measurements."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"{measure.machine()}, torch {torch.__version__}, transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        memory(Path(folder))
    model = load_whole(Path(sys.argv[1]), "cpu", "float32") if sys.argv[1:] else mixtral(8, 576, 1536)
    overheads(model)


if __name__ == "__main__":
    main()

"""Real execution on the CPU: what offloading costs, against the plain model and against accelerate.

    python benchmarks/real.py MODEL [--tokens N] [--repeats N] [--only overhead|throughput|stall]

MODEL: a checkpoint, such as `finemoe model build` makes. One thread computes; the engine's threads use the
other core. Decoding one request, in turns, so that a busy machine slows all alike; ratios are of the medians.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import machine

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
LIMIT_BYTES_PER_S = 400e6  # of the slow source; an expert of the SmolLM2 MoE takes 27 ms

Generate = Callable[[], float]  # tokens per second of one generation


def main() -> None:
    """Print the tables of docs/measurements/real.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("overhead", "throughput", "stall"))
    given = parser.parse_args()
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(f"{machine()}; torch {torch.__version__}")
    bench = Bench(given.model, given.tokens, given.repeats)
    for part in ("overhead", "throughput", "stall"):
        if given.only in (None, part):
            getattr(bench, part)()


class Bench:
    """One checkpoint, one prompt."""

    def __init__(self, folder: Path, tokens: int, repeats: int) -> None:
        from transformers import AutoTokenizer

        self._folder, self._tokens, self._repeats = folder, tokens, repeats
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPT}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )

    def overhead(self) -> None:
        """Everything resident: the hooks' cost, and the core's share of an iteration."""
        print("\neverything resident, in turns with the plain model")
        with self._plain() as plain:
            for policy in ("no-offload", "lru", "finemoe"):
                with self._offloaded(policy, "1.0") as (model, generate):
                    generate()
                    ratios = [1 / (generate() / plain()) for _ in range(self._repeats)]
                    share = _policy_share(model, generate)
                print(
                    f"  {policy:<11} {statistics.median(ratios) - 1:+6.1%} time "
                    f"(of {self._repeats}: {min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}); "
                    f"policy work {share:.2%} of an iteration"
                )

    def throughput(self) -> None:
        """Tokens per second with all, half and a quarter of the experts cached, files in the page cache."""
        print("\ndecode, tokens/s; experts from files (page cache)")
        with self._plain() as plain:
            plain()
            reference = statistics.median(plain() for _ in range(self._repeats))
        print(f"  plain model, resident            {reference:6.2f}")
        for cache in ("1.0", "0.5", "0.25"):
            for policy in ("finemoe", "lru"):
                with self._offloaded(policy, cache) as (model, generate):
                    generate()
                    before = model.finemoe.statistics()
                    rate = statistics.median(generate() for _ in range(self._repeats))
                    after = model.finemoe.statistics()
                hits = (after["hits"] - before["hits"]) / (after["activated"] - before["activated"])
                print(f"  {policy:<8} {cache:>4} of the experts     {rate:6.2f}   hit rate {hits:.1%}")
        for name, make in (("disk_offload", self._disk_offload), ("device_map auto", self._device_map)):
            with make() as generate:
                generate()
                rate = statistics.median(generate() for _ in range(self._repeats))
            print(f"  accelerate {name:<16}      {rate:6.2f}")

    def stall(self) -> None:
        """A slow source: how long the forward pass waits for demand loads."""
        print(f"\nsource limited to {LIMIT_BYTES_PER_S / 1e6:,.0f} MB/s, warm cache: per token")
        for cache in ("0.5", "0.25"):
            for policy in ("lru", "lfu", "finemoe"):
                with self._offloaded(policy, cache, bandwidth_limit=LIMIT_BYTES_PER_S) as (model, generate):
                    generate()
                    before = model.finemoe.statistics()
                    for _ in range(self._repeats):
                        generate()
                    after = model.finemoe.statistics()
                delta = {name: after[name] - before[name] for name in ("iterations", "stall_s", "hits")}
                activated, moved = after["activated"] - before["activated"], _moved(after) - _moved(before)
                print(
                    f"  {policy:<8} {cache:>4}   stall {delta['stall_s'] / delta['iterations'] * 1e3:7.1f} ms"
                    f"   hit rate {delta['hits'] / activated:.1%}"
                    f"   moved {moved / delta['iterations'] / 1e6:7.1f} MB"
                )

    def _rate(self, model: Any) -> float:
        begin = time.perf_counter()
        model.generate(**self._ids, max_new_tokens=self._tokens, min_new_tokens=self._tokens, do_sample=False)
        return self._tokens / (time.perf_counter() - begin)

    @contextmanager
    def _plain(self) -> Iterator[Generate]:
        model = self._resident()
        yield lambda: self._rate(model)

    def _resident(self, **options: Any) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        gc.collect()  # models before this one
        model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32, **options)
        model.set_experts_implementation("grouped_mm")
        return model

    @contextmanager
    def _offloaded(self, policy: str, cache: str, **options: Any) -> Iterator[tuple[Any, Generate]]:
        from finemoe import load_model

        gc.collect()
        model = load_model(self._folder, policy, cache, progress=False, **options)
        try:
            yield model, lambda: self._rate(model)
        finally:
            model.finemoe.close()

    @contextmanager
    def _disk_offload(self) -> Iterator[Generate]:
        """All weights on disk, each module's read when it runs."""
        import torch
        from accelerate import disk_offload

        with tempfile.TemporaryDirectory() as folder:
            model = disk_offload(self._resident(), folder, execution_device=torch.device("cpu"))
            yield lambda: self._rate(model)

    @contextmanager
    def _device_map(self) -> Iterator[Generate]:
        """As many modules resident as fit into dense weights and half of the experts, the others on disk."""
        from finemoe.realexec.load import layout_of

        layout = layout_of(self._folder)
        experts = len(layout.file) * layout.slab_bytes
        whole = sum(path.stat().st_size for path in self._folder.glob("*.safetensors"))
        memory = whole - experts + experts // 2
        with tempfile.TemporaryDirectory() as folder:
            model = self._resident(device_map="auto", max_memory={"cpu": memory}, offload_folder=folder)
            yield lambda: self._rate(model)


def _policy_share(model: Any, generate: Generate) -> float:
    before = model.finemoe.statistics()
    begin = time.perf_counter()
    generate()
    elapsed = time.perf_counter() - begin
    return float((model.finemoe.statistics()["policy_s"] - before["policy_s"]) / elapsed)


def _moved(statistics: dict[str, Any]) -> int:
    return sum(int(device["bytes"]) for device in statistics["engine"]["devices"])


if __name__ == "__main__":
    main()

"""What a GPU gives: copies, overlap, a model of Mixtral's widths resident and offloaded. docs/gpu-check.md

    python benchmarks/gpu.py WORK [--device cuda|cpu] [--tiny] [--table FILE] [--write-budget-s N]

WORK: a folder with room for the model (23 GB), which is made there. Prints a line per figure and check; the
table in FILE is whole after each. Exit code 1 if a check failed. One file for the model, one source in pinned
host memory for all systems, which take turns on it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import finemoe
import torch
import transformers
from finemoe.policy.systems import find_system
from finemoe.realexec.load import model_options, read_checkpoint
from finemoe.realexec.versions import cache_argument
from gpu_copies import copy_rates, engine_rates, overlap, synchronize
from gpu_model import MIXTRAL, TINY, TOP_2_MASS, Shape, make_model, requests

MIB = 1 << 20
COPY_SIZES = [MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 512 * MIB]
WARM, MEASURED = 4, 4  # requests: one of each topic, then one more
RUNS = (("lru", "0.5"), ("finemoe", "0.5"), ("lru", "0.25"), ("finemoe", "0.25"))


class Table:
    """The figures so far, in order, and which checks failed."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._rows, self.failed = path, [("figure", "value"), ("---", "---")], 0

    def say(self, name: str, value: str) -> None:
        """A figure."""
        self._rows.append((name, value))
        print(f"{name:<64} {value}", flush=True)
        if self._path is not None:
            partial = self._path.with_name(self._path.name + ".partial")
            partial.write_text("".join(f"| {a} | {b} |\n" for a, b in self._rows))
            os.replace(partial, self._path)

    def check(self, name: str, good: bool, found: str = "") -> None:
        """A check and what it found."""
        self.failed += not good
        self.say(f"check: {name}", ("passed" if good else "FAILED") + (f" ({found})" if found else ""))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A failure here is a failed check; what follows is still measured."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            lines = str(error).splitlines() or [""]
            self.check(name, False, f"{type(error).__name__}: {lines[0]}")


class Bench:
    """One checkpoint: the resident model and the offloaded ones on the same tokens."""

    def __init__(self, folder: Path, shape: Shape, device: str, table: Table) -> None:
        self._folder, self._shape, self._device, self._table = folder, shape, device, table
        self._tokens = [ids.to(device) for ids in requests(shape, WARM + MEASURED)]
        self._wanted: list[Any] = []  # logits of all steps
        self._resident_s = float("nan")  # per token
        self._model: Any = None

    def resident(self) -> None:
        """The plain model: its TPOT, its logits, and how its gates are."""
        began_s = time.perf_counter()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=torch.bfloat16, device_map=self._device
        )
        model.set_experts_implementation("grouped_mm")
        self._table.say("resident: seconds to load", f"{time.perf_counter() - began_s:.1f}")
        with self._gate_mass(model) as masses:
            self._serve(model, self._tokens[:WARM])
        mass = float(torch.stack(masses).mean())
        self._table.check(
            f"top-2 mass of the gates is near {TOP_2_MASS}", abs(mass - TOP_2_MASS) < 0.1, f"{mass:.3f}"
        )
        self._resident_s, self._wanted = self._serve(model, self._tokens[WARM:])
        self._table.say("TPOT, resident", f"{self._resident_s * 1e3:.2f} ms")

    def offloaded(self, policy: str, cache: str) -> None:
        """A system's TPOT beside the resident model's, its bits, where its time went, and its replay."""
        name = f"{policy} {cache}"
        logged = (policy, cache) == ("finemoe", "0.5")
        model = self._with(policy, cache, logged)
        self._serve(model, self._tokens[:WARM])
        before, began_s = model.finemoe.statistics(), time.perf_counter()
        per_token_s, logits = self._serve(model, self._tokens[WARM:])
        elapsed_s, after = time.perf_counter() - began_s, model.finemoe.statistics()
        same = all(torch.equal(a, b) for a, b in zip(logits, self._wanted, strict=True))
        self._table.check(f"{name}: logits are the resident model's, bit for bit", same)
        self._figures(name, per_token_s, elapsed_s, before, after)
        if logged:
            self._replay(model)

    def _with(self, policy: str, cache: str, logged: bool) -> Any:
        """The offloaded model, loaded once, with this system and expert cache."""
        if self._model is None:
            began_s = time.perf_counter()
            self._model = finemoe.load_model(
                self._folder, policy, cache, self._device, "host", progress=False
            )
            self._table.say("offloaded: seconds to load", f"{time.perf_counter() - began_s:.1f}")
        system, checkpoint = find_system(policy), read_checkpoint(self._folder)
        _, slots = checkpoint.cache(cache, 1, "expert_cache")
        options = model_options(system, checkpoint, 1, slots, prefetch_distance=3, store_capacity=1000)
        self._model.finemoe.use(system, options, log_iterations=-1 if logged else 0, history=None)
        return self._model

    def _figures(
        self, name: str, per_token_s: float, elapsed_s: float, before: dict[str, Any], after: dict[str, Any]
    ) -> None:
        def grown(key: str) -> float:
            return float(after[key] - before[key])

        def moved(key: str) -> float:
            first, last = (s["engine"]["devices"][0] for s in (before, after))
            return float(last[key] - first[key])

        say, iterations = self._table.say, grown("iterations")
        ratio = per_token_s / self._resident_s
        say(f"TPOT, {name}", f"{per_token_s * 1e3:.2f} ms, {ratio:.2f} times the resident model's")
        say(f"{name}: hit rate", f"{grown('hits') / grown('activated'):.1%}")
        say(f"{name}: policy work, share of the time", f"{grown('policy_s') / elapsed_s:.2%}")
        say(f"{name}: waiting for the gates, share of the time", f"{grown('gate_wait_s') / elapsed_s:.1%}")
        say(f"{name}: waiting for demand loads, share of the time", f"{grown('stall_s') / elapsed_s:.1%}")
        say(f"{name}: copied per iteration", f"{moved('bytes') / iterations / 1e6:.1f} MB")
        if moved("busy_s") > 0:
            say(f"{name}: rate while copying", f"{moved('bytes') / moved('busy_s') / 1e9:.2f} GB/s")

    def _replay(self, model: Any) -> None:
        import pyarrow.parquet as pq
        from finemoe.serving.replay import replay

        with tempfile.TemporaryDirectory() as folder:
            pq.write_table(model.finemoe.decisions(), Path(folder) / "decisions.parquet")
            report = replay(Path(folder))
        found = f"{report.events} events, {report.commands} commands"
        self._table.check("a fresh core decides alike on the same log", report.identical, found)

    def _serve(self, model: Any, served: list[Any]) -> tuple[float, list[Any]]:
        """Given tokens, one request after another: mean seconds of a decode step, and the logits of all."""
        logits, steps_s, prompt = [], 0.0, self._shape.prompt
        with torch.no_grad():
            for ids in served:
                past = {cache_argument(model): transformers.DynamicCache(config=model.config)}
                logits.append(model(input_ids=ids[:, :prompt], **past).logits.cpu())
                for at in range(prompt, ids.shape[1]):
                    synchronize(self._device)
                    began_s = time.perf_counter()
                    out = model(input_ids=ids[:, at : at + 1], **past)
                    synchronize(self._device)
                    steps_s += time.perf_counter() - began_s
                    logits.append(out.logits.cpu())
        return steps_s / (len(served) * self._shape.decode), logits

    @contextmanager
    def _gate_mass(self, model: Any) -> Iterator[list[Any]]:
        from finemoe.realexec.gates import find_moe

        moe, masses = find_moe(model), []

        def hook(_: Any, __: Any, output: Any) -> None:
            masses.append(moe.probabilities(moe.logits(output)).topk(2).values.sum(dim=-1).mean().cpu())

        hooks = [layer.router.register_forward_hook(hook) for layer in moe.layers]
        yield masses
        for one in hooks:
            one.remove()


def main() -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--write-budget-s", type=float, default=60.0)
    given = parser.parse_args()
    device, tiny = given.device, given.tiny
    shape = TINY if tiny else MIXTRAL
    warnings.filterwarnings("ignore", ".*at or below one token cycle")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    table = Table(given.table)
    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU: its figures mean nothing"
    table.say("device", name)
    table.say(
        "torch / CUDA / transformers",
        f"{torch.__version__} / {torch.version.cuda} / {transformers.__version__}",
    )
    steps: list[tuple[str, Callable[[], None]]] = [
        ("copies", lambda: copy_rates(device, COPY_SIZES[: 2 if tiny else None], table.say)),
        ("overlap", lambda: overlap(device, MIB if tiny else 512 * MIB, 64 if tiny else 8192, table.say)),
        ("engine", lambda: _engine(device, shape, tiny, table)),
    ]
    for step, run in steps:
        with table.step(step):
            run()
    folder = given.work / "model"
    with table.step("model"):
        began_s = time.perf_counter()
        layers = make_model(folder, shape, device, given.write_budget_s)
        written = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
        table.say("model: layers", f"{layers} (hidden {shape.hidden}, FFN {shape.ffn}, 8 experts, top 2)")
        table.say("model: written", f"{written:.1f} GB in {time.perf_counter() - began_s:.1f} s")
        bench = Bench(folder, shape, device, table)
        bench.resident()
        for policy, cache in RUNS:
            gc.collect()  # models before this one
            with table.step(f"{policy} {cache}"):
                bench.offloaded(policy, cache)
    table.check("all checks", table.failed == 0)
    return 1 if table.failed else 0


def _engine(device: str, shape: Shape, tiny: bool, table: Table) -> None:
    chunks = [MIB // 64] if tiny else [MIB, 4 * MIB, 16 * MIB, 64 * MIB]
    engine_rates(device, shape.layer_bytes() // 8, chunks, table.say)


if __name__ == "__main__":
    sys.exit(main())

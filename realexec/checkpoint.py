"""A checkpoint directory, written shard by shard and moved into place when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ..errors import SettingError
from .clustering import Floats

Dtype = Literal["float32", "bfloat16"]

SHARD_BYTES = 1_000_000_000
INDEX = "model.safetensors.index.json"


class CheckpointWriter:
    """Writes `output` as a Hugging Face checkpoint: weights by `add`, the rest into `folder`, then `finish`.

    Everything goes into a folder beside `output` first, which `finish` renames; an error or Ctrl-C removes
    it. Memory holds one shard at most.
    """

    def __init__(self, output: Path, dtype: Dtype, shard_bytes: int = SHARD_BYTES) -> None:
        check_output(output)
        self.folder = output.with_name(f".{output.name}.{os.getpid()}.partial")
        self.total_bytes = 0
        self.parameters = 0
        self._output = output
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        self._waiting: dict[str, Any] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []

    def __enter__(self) -> CheckpointWriter:
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise SettingError(
                f"--output: {self.folder.parent} cannot be written ({error.strerror or error}). "
                "Choose another directory."
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # finish has moved it away, or it is not to be kept

    def add(self, name: str, values: Floats) -> None:
        """Add a weight under its name in the file, in the checkpoint's dtype."""
        import torch

        tensor = torch.from_numpy(values).to(getattr(torch, self._dtype)).contiguous()
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._waiting_bytes + size > self._shard_bytes:
            self._write_shard()
        self._waiting[name] = tensor
        self._waiting_bytes += size
        self.total_bytes += size
        self.parameters += tensor.numel()

    def finish(self) -> None:
        """Write what is left, name the shards, move the checkpoint into place; returns the number of
        shards."""
        self._write_shard()
        count = len(self._shards)
        names = _shard_names(count)
        for number, name in enumerate(names):
            self._part(number).chmod(0o644)  # safetensors writes for the owner alone
            self._part(number).rename(self.folder / name)
        if count > 1:
            places = {
                weight: name for name, weights in zip(names, self._shards, strict=True) for weight in weights
            }
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(places.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
        check_output(self._output)  # nobody has come in between
        self.folder.rename(self._output)

    def _write_shard(self) -> None:
        from safetensors.torch import save_file

        save_file(self._waiting, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._waiting))
        self._waiting = {}
        self._waiting_bytes = 0

    def _part(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}"


def check_output(output: Path) -> None:
    """Raise SettingError unless `output` names a directory that is not there yet."""
    if output.name in ("", "..") or "\0" in str(output):
        raise SettingError(f"--output is {str(output)!r}, which names no new directory. Give --output DIR.")
    if os.path.lexists(output):
        raise SettingError(f"--output: {output} exists. Choose a new directory, or remove that one first.")


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]

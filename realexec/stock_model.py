"""A transformers model as it comes, whole in memory, from a local folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ..errors import SettingError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, eq=False)
class StockModel:
    """A causal language model in eval mode, its tokenizer (None where the folder has none), and the token ids
    that end an answer."""

    name: str
    model: Any
    tokenizer: Any
    ends: frozenset[int]


def check_folder(folder: Path) -> None:
    """Raise `SettingError` unless this is a folder with config.json and safetensors weights."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is no folder"
        raise SettingError(f"--model {folder} {what}. Give a folder with config.json and *.safetensors.")
    if not (folder / "config.json").is_file():
        raise SettingError(f"--model {folder} has no config.json. Give a model's folder.")
    if not any(folder.glob("*.safetensors")):
        raise SettingError(
            f"--model {folder} has no *.safetensors. Convert its weights: FineMoE loads no pickles."
        )


def check_device(device: str) -> None:
    """Raise `SettingError` unless `device` is cpu, or cuda and there is one."""
    if device not in DEVICES:
        raise SettingError(f"--device is {device!r}. Give one of {', '.join(DEVICES)}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device cuda: torch finds no CUDA device here. Give --device cpu.")


def fingerprint(folder: Path) -> str:
    """Tells one checkpoint from another without reading its weights: config, names, sizes and times."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        state = path.stat()
        digest.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def load_stock(folder: Path, device: str, dtype: str) -> StockModel:
    """Load a model and its tokenizer from `folder`; nothing is fetched, no code of the folder's is run.

    Raises `SettingError` for a folder that cannot be loaded, and for weights that do not fill the model.
    """
    check_folder(folder)
    check_device(device)
    if dtype not in DTYPES:
        raise SettingError(f"--dtype is {dtype!r}. Give one of {', '.join(DTYPES)}.")
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **local
        )
        has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local) if has_tokenizer else None
    except Exception as error:  # whatever a broken folder makes transformers, tokenizers or safetensors raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise SettingError(f"--model {folder} cannot be loaded: {reason}. Check the folder.") from error
    finally:
        transformers.logging.set_verbosity(level)
    absent = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if absent:
        raise SettingError(
            f"--model {folder}: its weights lack {len(absent)} of the model's tensors, {absent[0]} first. "
            "Fetch the missing shards, or correct config.json."
        )
    ends = model.generation_config.eos_token_id
    if ends is None and tokenizer is not None:
        ends = tokenizer.eos_token_id
    all_ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    known = frozenset(end for end in all_ends if end < model.config.get_text_config().vocab_size)
    return StockModel(folder.resolve().name, model.to(device).eval(), tokenizer, known)

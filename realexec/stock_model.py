"""A transformers model as it comes, whole in memory, from a local folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from ..errors import FineMoEError, SettingError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


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


def check_dtype(dtype: str) -> None:
    """Raise `SettingError` unless `dtype` is one of `DTYPES`."""
    if dtype not in DTYPES:
        raise SettingError(f"--dtype is {dtype!r}. Give one of {', '.join(DTYPES)}.")


def fingerprint(folder: Path) -> str:
    """Tells one checkpoint from another without reading its weights: config, names, sizes and times."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        state = path.stat()
        digest.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, None where it has none. Raises `SettingError` where it cannot be loaded."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return None
    with one_error(folder, "the tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)


def load_outline(folder: Path) -> Any:
    """The model without its weights, on `meta`. Raises `SettingError` where config.json makes none."""
    with one_error(folder, "config.json"), torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
        return transformers.AutoModelForCausalLM.from_config(config)


def load_whole(folder: Path, device: str, dtype: str) -> Any:
    """The model in eval mode, all of it in memory; nothing is fetched, no code of the folder's is run.

    Raises `SettingError` for weights that cannot be loaded or do not fill the model.
    """
    with one_error(folder, "the weights"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **_LOCAL
        )
    check_filled(folder, info)
    return model.to(device).eval()


def check_filled(folder: Path, info: Mapping[str, Any]) -> None:
    """Raise `SettingError` where weights did not fill the model: transformers made the others up.

    info: what `from_pretrained` tells of a loading.
    """
    absent = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if absent:
        raise SettingError(
            f"--model {folder}: its weights lack {len(absent)} of the model's tensors, {absent[0]} first. "
            "Fetch the missing shards, or correct config.json."
        )


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Token ids that end an answer, of those the model has."""
    ends = model.generation_config.eos_token_id
    if ends is None and tokenizer is not None:
        ends = tokenizer.eos_token_id
    every = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return frozenset(end for end in every if end < model.config.get_text_config().vocab_size)


@contextmanager
def one_error(folder: Path, what: str) -> Iterator[None]:
    """Loading says nothing of its own, and whatever a broken folder makes transformers, tokenizers or
    safetensors raise is one `SettingError`."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    except FineMoEError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise SettingError(
            f"--model {folder}: {what} cannot be loaded: {reason}. Check the folder."
        ) from error
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()

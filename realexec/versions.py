"""What differs between the transformers versions that are supported, told by signature."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any) -> str:
    """What a model's forward calls its KV cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

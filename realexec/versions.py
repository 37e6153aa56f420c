"""What differs between transformers' versions and models, told by a forward's signature."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any) -> str:
    """What a model's forward calls its KV cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def last_logits_only(model: Any) -> dict[str, int]:
    """What makes a model's forward compute the last position's logits alone, where it can."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

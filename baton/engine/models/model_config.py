"""Reads a model's ``config.json`` before the model is loaded. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError

CONTEXT_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "seq_length")
"""Names of the context length in the configs of various architectures; the first one present counts."""
# Parts of composite configs, for which only the architecture's code knows the language model's part.
_NESTED = ("decoder", "generator", "thinker_config", "llm_config", "language_config")


def read_model_config(folder: Path) -> dict[str, Any]:
    """The model's config; empty if it is missing or unreadable, which loaders refuse with a reason."""
    return json_object(folder / "config.json")


def json_object(path: Path) -> dict[str, Any]:
    """Like :func:`read_model_config`, for any file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part that describes the language model; ``None`` where only the architecture's own code knows it."""
    if any(name in config for name in _NESTED):
        return None
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def stated_context_length(config: Mapping[str, Any]) -> int | None:
    """Context length in tokens; ``None`` if it is not stated. The loaded model may take fewer, never more."""
    text = text_config(config) or {}
    lengths = (text.get(name) for name in CONTEXT_LENGTH_NAMES)
    return next((length for length in lengths if type(length) is int and length > 0), None)


def check_context_length(max_model_len: int | None, own: int | None) -> None:
    """Checks a configured context length.

    Args:
        max_model_len: as configured; ``None`` allows whatever the model does.
        own: the model's context length; ``None`` if it is not known.

    Raises:
        ConfigError: it exceeds the model's.
    """
    if max_model_len is not None and own is not None and max_model_len > own:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model's context length is {own}. "
            "Lower it, or leave it out to use as much as the model and the KV cache allow."
        )

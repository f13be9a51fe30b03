"""What a model's ``config.json`` tells before anything of the model is loaded. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError

CONTEXT_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "seq_length")
"""As architectures call the longest sequence that they were made for; the first that is stated counts."""
# Configs of several models in one, of which only the code knows which one speaks.
_NESTED = ("decoder", "generator", "thinker_config", "llm_config", "language_config")


def read_model_config(folder: Path) -> dict[str, Any]:
    """Empty for what is not there or cannot be read: loaders refuse that, and say why."""
    return json_object(folder / "config.json")


def json_object(path: Path) -> dict[str, Any]:
    """As :func:`read_model_config`, of any file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part that describes the language model; None where only the architecture's own code could tell."""
    if any(name in config for name in _NESTED):
        return None
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def stated_context_length(config: Mapping[str, Any]) -> int | None:
    """Tokens; None when it is not stated. The loaded model may take fewer, never more."""
    text = text_config(config) or {}
    lengths = (text.get(name) for name in CONTEXT_LENGTH_NAMES)
    return next((length for length in lengths if type(length) is int and length > 0), None)


def check_context_length(max_model_len: int | None, own: int | None) -> None:
    """
    Args:
        max_model_len: as configured; None: whatever the model allows.
        own: the model's; None: not known here.

    Raises:
        ConfigError: more is asked for than the model was made for.
    """
    if max_model_len is not None and own is not None and max_model_len > own:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model's context length is {own}. "
            "Lower it, or leave it out: then it is as much as the model and the KV cache allow."
        )

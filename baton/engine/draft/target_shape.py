"""Sizes of a target that its drafts depend on. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.engine.models.model_config import text_config

# Names in config.json across architectures.
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Sizes of the model that a draft guesses for."""

    num_layers: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> TargetShape | None:
        """The sizes in a model's ``config.json``; ``None`` where only the architecture's own code knows them."""
        text = text_config(config)
        if text is None:
            return None
        sizes = [
            next((text[name] for name in names if type(text.get(name)) is int), None)
            for names in (_NUM_LAYERS, _HIDDEN_SIZE, ("vocab_size",))
        ]
        num_layers, hidden_size, vocab_size = sizes
        if num_layers is None or hidden_size is None or vocab_size is None:
            return None
        return cls(num_layers, hidden_size, vocab_size)

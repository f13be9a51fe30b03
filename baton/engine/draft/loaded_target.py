"""Sizes of a target that is loaded."""

from __future__ import annotations

from transformers import PreTrainedModel

from baton.core.errors import UnsupportedModelError
from baton.engine.draft.target_shape import TargetShape
from baton.engine.parallel.layers import head_size


def shape_of(target: PreTrainedModel) -> TargetShape:
    """The sizes of a target. Raises :class:`UnsupportedModelError` if it has no language model head."""
    config = target.config.get_text_config(decoder=True)
    vocab_size = head_size(target)
    if vocab_size is None:
        raise UnsupportedModelError(f"{type(target).__name__} has no language model head to draft for.")
    return TargetShape(int(config.num_hidden_layers), int(config.hidden_size), vocab_size)

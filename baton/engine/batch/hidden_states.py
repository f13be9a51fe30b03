"""Reads hidden states of a running model, for drafts that build on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from baton.core.errors import UnsupportedModelError


class HiddenStates(Protocol):
    """The hidden states of a forward that a draft reads."""

    def take(self) -> torch.Tensor:
        """The states of the last forward, ``[num_tokens, len(layers) * hidden_size]``, in the order of the layers.

        Raises:
            RuntimeError: no forward has run since the last call.
        """
        ...

    def close(self) -> None:
        """Stops reading hidden states."""
        ...


class FeatureTap:
    """Keeps selected hidden states of the model's last forward.

    Args:
        model: the target.
        layers: ``k`` is the residual stream that goes *into* decoder layer ``k``, before any norm, as in transformers'
            ``hidden_states``; the number of layers is the output of the last one, before the final norm;
            :data:`baton.engine.batch.hidden_states.FINAL_HIDDEN` is the state after that norm.

    Raises:
        UnsupportedModelError: the model has no such layer, or its layers cannot be found.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        decoder_layers = find_decoder_layers(model)
        self._captured: dict[int, torch.Tensor] = {}
        self._order = tuple(layers)
        self._hooks = []
        for index in sorted(set(layers)):
            if not FINAL_HIDDEN <= index <= len(decoder_layers):
                raise UnsupportedModelError(
                    f"hidden state {index} was requested, but {type(model).__name__} has {len(decoder_layers)} layers."
                )
            if index == FINAL_HIDDEN:
                hook = model.get_decoder().register_forward_hook(self._keep_output(index))
            elif index == len(decoder_layers):
                hook = decoder_layers[-1].register_forward_hook(self._keep_output(index))
            else:
                hook = decoder_layers[index].register_forward_pre_hook(self._keep_input(index), with_kwargs=True)
            self._hooks.append(hook)

    def take(self) -> torch.Tensor:
        """The states of the last forward, ``[num_tokens, len(layers) * hidden_size]``, in the order of the layers.

        Raises:
            RuntimeError: no forward has run since the last call.
        """
        if len(self._captured) != len(set(self._order)):
            raise RuntimeError("there was no forward to take features from")
        features = torch.cat([self._captured[index] for index in self._order], dim=-1)
        self._captured.clear()
        return features

    def discard(self) -> None:
        """Frees states that were not taken."""
        self._captured.clear()

    def close(self) -> None:
        """Removes the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._captured.clear()

    def _keep_input(self, index: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            self._captured[index] = states[0]

        return keep

    def _keep_output(self, index: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            states = output if isinstance(output, torch.Tensor) else output[0]
            self._captured[index] = states[0]

        return keep


def find_decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers, in order: the longest list of modules below its decoder.

    Raises:
        UnsupportedModelError: there is none of the configured length.
    """
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == expected:
            return list(module)
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {expected} decoder layers to read from.")


FINAL_HIDDEN = -1
"""In ``feature_layers``: the target's last hidden state after its final norm, the input of its lm_head."""

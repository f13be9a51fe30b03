"""Probes how a model attends by running it once: which modules call the attention function, with which shapes, and
through which window.

The window is read from the mask that the model builds, since its own attention computes with that. The
``sliding_window`` that it passes can differ: some models slide without passing it (PhiMoE).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from baton.core.errors import UnsupportedModelError
from baton.core.kv_spec import LayerSpec
from baton.engine.attention.latent import project_latents

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_PROBE_NAME = "baton_probe"
_PROBE_TOKENS = 4
# Tensors that may reach an attention function besides queries, keys and values. Others change what it computes.
_KNOWN_TENSORS = frozenset({"s_aux", "position_ids", "cache_position"})


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer of the cache.

    Attributes:
        module: the caller of the attention function.
        spec: the shapes of its keys and values.
        sliding_window: a query sees itself and the ``sliding_window - 1`` positions before it; ``None`` means all.
    """

    module: nn.Module
    spec: LayerSpec
    sliding_window: int | None


def probe_attention(model: PreTrainedModel) -> tuple[AttentionLayer, ...]:
    """Runs a few tokens through the model with an attention function that records its callers, in their order.

    Raises:
        UnsupportedModelError: a paged cache cannot serve the model's attention; the message says why.
    """
    kind = type(model).__name__
    probe = _Probe(kind, _num_positions(model.config))
    # transformers has no way to unregister, and a name that stays registered would keep the model alive.
    ALL_ATTENTION_FUNCTIONS.register(_PROBE_NAME, probe.attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE_NAME, probe.mask)
    try:
        model.set_attn_implementation(_PROBE_NAME)
        token_ids = torch.arange(_PROBE_TOKENS, device=model.device)[None]
        with torch.inference_mode():
            model(input_ids=token_ids, position_ids=token_ids, use_cache=False)
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{kind} cannot run with pluggable attention ({type(error).__name__}: {error}). "
            "It must be a decoder-only transformers model that uses AttentionInterface."
        ) from error
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(_PROBE_NAME, None)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(_PROBE_NAME, None)
    layers = probe.layers
    if not layers:
        raise UnsupportedModelError(f"{kind} never called its attention interface, so its KV cannot be paged.")
    if len({id(layer.module) for layer in layers}) != len(layers):
        raise UnsupportedModelError(f"{kind} runs one attention module more than once per token.")
    expected = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", len(layers))
    if len(layers) != expected:
        raise UnsupportedModelError(f"{kind} has {expected} layers, but {len(layers)} attend over a cache.")
    return tuple(layers)


def _num_positions(config: Any) -> int:
    """Number of positions over which masks are examined."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return max(64, positions if isinstance(positions, int) else 0)


class _Probe:
    """Replaces attention and mask creation during one forward.

    A mask is a constant tensor with the index of its entry in ``windows``.
    """

    def __init__(self, kind: str, num_positions: int) -> None:
        self.layers: list[AttentionLayer] = []
        self._kind = kind
        self._num_positions = num_positions
        self._windows: list[int | None] = []

    def mask(
        self, batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **kwargs: Any
    ) -> torch.Tensor:
        """Called by transformers instead of creating a mask."""
        self._windows.append(self._window_of(mask_function))
        return torch.full((batch_size, 1, q_length, kv_length), len(self._windows) - 1, device=kwargs.get("device"))

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Called by transformers instead of attention: ``[1, heads, tokens, dim]`` → ``[1, tokens, heads, dim]``."""
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(f"{self._kind} has {num_heads} query heads for {num_kv_heads} KV heads.")
        if key.shape[2] != query.shape[2]:
            raise UnsupportedModelError(f"{self._kind} attends to positions other than those of its own tokens.")
        unknown = sorted({name for name, given in kwargs.items() if torch.is_tensor(given)} - _KNOWN_TENSORS)
        if unknown:
            raise UnsupportedModelError(
                f"{self._kind} passes {', '.join(unknown)} to its attention, which the paged cache does not support."
            )
        window = kwargs.get("sliding_window") if attention_mask is None else self._window_behind(attention_mask)
        spec = LayerSpec(num_kv_heads, int(key.shape[3]), int(value.shape[3]))
        self.layers.append(AttentionLayer(module, spec, int(window) if window else None))
        output = value.repeat_interleave(num_heads // num_kv_heads, dim=1).transpose(1, 2)
        return project_latents(module, output).contiguous(), None

    def _window_behind(self, mask: torch.Tensor) -> int | None:
        index = int(mask.flatten()[0])
        if not bool((mask == index).all()) or not 0 <= index < len(self._windows):
            raise UnsupportedModelError(
                f"{self._kind} adds its own bias or mask to attention, which the paged cache cannot honour."
            )
        return self._windows[index]

    def _window_of(self, mask_function: MaskFunction) -> int | None:
        """Raises :class:`UnsupportedModelError` unless the mask is causal, with or without a sliding window."""
        last = self._num_positions - 1
        num_visible = int(self._visible(mask_function, last).sum())
        window = None if num_visible == self._num_positions else num_visible
        keys = torch.arange(self._num_positions)
        for position in {last, last - 1, last // 2, last // 3, 1, 0}:
            expected = keys <= position
            if window is not None:
                expected &= keys > position - window
            if not torch.equal(self._visible(mask_function, position), expected):
                raise UnsupportedModelError(
                    f"{self._kind} needs another mask than a causal one with an optional sliding window (attention in "
                    "both directions or in chunks, for example), which the paged cache does not support."
                )
        return window

    def _visible(self, mask_function: MaskFunction, position: int) -> torch.Tensor:
        """Which of all positions a query at ``position`` sees; bool ``[num_positions]``."""
        zero = torch.tensor(0)
        return (
            mask_function(zero, zero, torch.tensor(position), torch.arange(self._num_positions))
            .cpu()
            .expand(self._num_positions)
        )

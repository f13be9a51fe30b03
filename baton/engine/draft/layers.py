"""The decoder layer of draft heads: Llama's, or Qwen3's with its norms of queries and keys.

Shapes may have leading dimensions: ``[..., num_tokens, hidden_size]``. The caller chooses the attention: over a paged
cache while serving, over the sequence itself otherwise, or under a training scheme's own mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton.engine.attention.base import AttentionVariant
from baton.engine.device.uploads import upload

Rotation = tuple[torch.Tensor, torch.Tensor]


class Attend(Protocol):
    """Attention of one layer's new tokens."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: AttentionVariant
    ) -> torch.Tensor:
        """Takes ``[..., num_tokens, num_heads, head_dim]``, keys and values with ``num_kv_heads``.

        Returns:
            The shape of ``query``.
        """
        ...


def causal_attend(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: AttentionVariant
) -> torch.Tensor:
    """Attends within the given tokens, which are one sequence from its start; stores nothing."""
    num_tokens = query.shape[-3]
    mask = None
    if variant.sliding_window is not None and variant.sliding_window < num_tokens:
        ones = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query.device)
        mask = ones.tril() & ones.triu(1 - variant.sliding_window)
    output = scaled_dot_product_attention(
        query.transpose(-3, -2),
        key.transpose(-3, -2),
        value.transpose(-3, -2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=variant.scaling,
        enable_gqa=query.shape[-2] != key.shape[-2],
    )
    return output.transpose(-3, -2)


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """Sizes and switches of a draft's decoder layers.

    Attributes:
        rope: transformers' ``rope_parameters``.
        windows: window of each layer: a query sees itself and the ``window - 1`` positions before it; ``None`` means
            all.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope: Mapping[str, Any]
    max_positions: int
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.windows)


class RotaryTable:
    """Rotary angles of positions. Not a module, so that the frequencies stay float32 whatever the network's dtype.

    Raises:
        KeyError, ValueError: ``settings.rope`` is invalid.
    """

    def __init__(self, settings: LayerSettings) -> None:
        config = LlamaConfig(
            hidden_size=settings.num_heads * settings.head_dim,
            num_attention_heads=settings.num_heads,
            head_dim=settings.head_dim,
            max_position_embeddings=settings.max_positions,
            rope_parameters=dict(settings.rope),
        )
        kind = settings.rope["rope_type"]
        default: Any = LlamaRotaryEmbedding.compute_default_rope_parameters
        compute = default if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
        with torch.device("cpu"):  # heads are built on the meta device before they are loaded
            frequencies, scaling = compute(config, device="cpu")
        self._scaling = float(scaling)
        self._frequencies = {torch.device("cpu"): frequencies}

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Cosines and sines, each ``[..., num_tokens, 1, head_dim]``."""
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = upload(self._frequencies[torch.device("cpu")].numpy(), device)
        angles = positions[..., None, None].float() * self._frequencies[device]
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


def rotate(states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotary position embedding of ``[..., num_tokens, num_heads, head_dim]``, in halves as in Llama."""
    cos, sin = rotation
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


class DraftAttention(nn.Module):
    """Grouped-query attention whose input may be wider than its output."""

    def __init__(self, settings: LayerSettings, index: int, input_size: int) -> None:
        super().__init__()
        dim, bias = settings.head_dim, settings.qkv_bias
        self.index = index
        self.head_dim = dim
        self.variant = AttentionVariant(scaling=dim**-0.5, sliding_window=settings.windows[index])
        self.q_proj = nn.Linear(input_size, settings.num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(input_size, settings.num_kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(input_size, settings.num_kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(settings.num_heads * dim, settings.hidden_size, bias=settings.output_bias)
        if settings.qk_norm:
            self.q_norm = nn.RMSNorm(dim, eps=settings.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, eps=settings.rms_norm_eps)
        self.has_qk_norm = settings.qk_norm

    def keys_values(self, states: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these tokens for a cache, each ``[..., num_tokens, num_kv_heads, head_dim]``."""
        key = self._heads(self.k_proj(states))
        if self.has_qk_norm:
            key = self.k_norm(key)
        return rotate(key, rotation), self._heads(self.v_proj(states))

    def forward(self, states: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        query = self._heads(self.q_proj(states))
        if self.has_qk_norm:
            query = self.q_norm(query)
        key, value = self.keys_values(states, rotation)
        output: torch.Tensor = attend(self.index, rotate(query, rotation), key, value, self.variant)
        projected: torch.Tensor = self.o_proj(output.flatten(-2))
        return projected

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:-1], -1, self.head_dim)


class DraftMLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, settings: LayerSettings) -> None:
        super().__init__()
        size, inner_size, bias = settings.hidden_size, settings.intermediate_size, settings.mlp_bias
        self.gate_proj = nn.Linear(size, inner_size, bias=bias)
        self.up_proj = nn.Linear(size, inner_size, bias=bias)
        self.down_proj = nn.Linear(inner_size, size, bias=bias)
        self.act: Any = ACT2FN[settings.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(self.act(self.gate_proj(states)) * self.up_proj(states))
        return output


class DraftLayer(nn.Module):
    """Attention and feed-forward around a residual stream.

    Args:
        fused: True for EAGLE-3's first layer, whose attention input is embedding and hidden state side by side.
        norms_input: False for EAGLE-1's first layer, whose attention input is not normalised.
    """

    def __init__(self, settings: LayerSettings, index: int, *, fused: bool = False, norms_input: bool = True) -> None:
        super().__init__()
        size, eps = settings.hidden_size, settings.rms_norm_eps
        self.self_attn = DraftAttention(settings, index, 2 * size if fused else size)
        self.mlp = DraftMLP(settings)
        self.input_layernorm = nn.RMSNorm(size, eps=eps) if norms_input else nn.Identity()
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        if fused:
            self.hidden_norm = nn.RMSNorm(size, eps=eps)

    def fuse(self, embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A fused layer's attention input ``[..., 2 * hidden_size]``, and the hidden state's norm."""
        normed = self.hidden_norm(hidden)
        return torch.cat((self.input_layernorm(embeds), normed), dim=-1), normed

    def forward(self, states: torch.Tensor, residual: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """Feeds ``states`` to attention and adds the output to ``residual``."""
        hidden = residual + self.self_attn(states, rotation, attend)
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output

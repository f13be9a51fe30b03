"""Multi-head latent attention over a cache of latents (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).

The keys and values of all heads are products of one latent vector per token; besides, the heads share a key that has
been rotated by its position. A model of transformers expands both before it attends. Here the products with the
latents move to the other side, where there is one per new token instead of one per cached token:

    score    q . (K c) + q_rotated . k  =  (K^T q) . c + q_rotated . k       K, V: those of a head, [dim, rank]
    output   sum of p (V c)             =  V (sum of p c)                    c: latent, k: rotated key of a token

So a layer of the cache has one KV head, whose key is ``k`` and whose value is ``c``, and scores read both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

OWN_IMPLEMENTATIONS = "baton_"
"""Beginning of the names of attention functions that take latents."""
_LATENT_ATTRIBUTE = "baton_latent_heads"
_ABSORBED_ATTRIBUTE = "baton_is_absorbed"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LatentHeads:
    """The heads of one attention module, on this rank.

    Args:
        module: has ``kv_b_proj``, whose weight ``[num_heads * (nope_dim + value_dim), rank]`` stays the only copy.
    """

    def __init__(self, module: Any) -> None:
        self._projection: nn.Linear = module.kv_b_proj
        self._nope_dim, self._value_dim = int(module.qk_nope_head_dim), int(module.v_head_dim)

    def _weight(self) -> torch.Tensor:
        """``[num_heads, nope_dim + value_dim, rank]``"""
        weight = self._projection.weight
        return weight.view(-1, self._nope_dim + self._value_dim, weight.shape[1])

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Queries for keys and latents.

        Args:
            query: ``[1, num_heads, num_tokens, nope_dim + rotated_dim]``

        Returns:
            ``[1, num_heads, num_tokens, rotated_dim + rank]``
        """
        nope, rotated = query[..., : self._nope_dim], query[..., self._nope_dim :]
        return torch.cat((rotated, nope @ self._weight()[:, : self._nope_dim]), dim=-1)

    def project(self, output: torch.Tensor) -> torch.Tensor:
        """``[1, num_tokens, num_heads, rank]``, sums of latents, to ``[1, num_tokens, num_heads, value_dim]``."""
        values = self._weight()[:, self._nope_dim :]
        return (output.transpose(1, 2) @ values.transpose(1, 2)).transpose(1, 2)


def share_latents(model: nn.Module) -> None:
    """Makes modules of latent attention pass rotated keys and latents to baton's attention functions.

    The attention functions of transformers still get expanded keys and values. Modules whose weights are not plain
    numbers stay as they are.
    """
    for module in model.modules():
        projection = getattr(module, "kv_b_proj", None)
        if not hasattr(module, "expand_kv") or type(projection) is not nn.Linear:
            continue
        if projection.weight.dtype in _DTYPES and projection.bias is None:
            object.__setattr__(module, _LATENT_ATTRIBUTE, LatentHeads(module))
            object.__setattr__(projection, _ABSORBED_ATTRIBUTE, True)
            object.__setattr__(module, "expand_kv", partial(_keys_and_values, module))


def latent_heads(module: nn.Module) -> LatentHeads | None:
    """The heads of a module of latent attention; ``None`` for any other module."""
    found: LatentHeads | None = getattr(module, _LATENT_ATTRIBUTE, None)
    return found


def project_latents(module: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """What a module expects of its attention function, from ``[1, num_tokens, num_heads, value_dim]`` of the cache."""
    heads = latent_heads(module)
    return output if heads is None else heads.project(output)


def is_absorbed(module: nn.Module) -> bool:
    """Whether attention multiplies the weight of a linear layer itself, so that it must stay plain numbers."""
    return bool(getattr(module, _ABSORBED_ATTRIBUTE, False))


def _keys_and_values(module: Any, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces ``expand_kv``: ``[1, 1, num_tokens, rank]`` and ``[1, 1, num_tokens, rotated_dim]``."""
    if str(module.config._attn_implementation).startswith(OWN_IMPLEMENTATIONS):
        return rotated, latents
    expanded: tuple[torch.Tensor, torch.Tensor] = type(module).expand_kv(module, latents, rotated)
    return expanded

"""The interface of attention backends, and how transformers' models call it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from baton.core.errors import UnsupportedModelError
from baton.engine.attention.key_sharing import KeySharing
from baton.engine.attention.latent import latent_heads, project_latents
from baton.engine.batch.attention_groups import AttentionGroup

ATTENTION_NAME = "baton_paged"
_SLOT_ATTRIBUTE = "baton_attention_slot"


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """How a layer differs from plain causal attention.

    Attributes:
        scaling: factor on the scores, before the cap.
        sliding_window: a query sees itself and the ``sliding_window - 1`` positions before it.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sinks: ``[num_heads]`` extra logit of each head that takes probability and contributes nothing.
        has_latents: queries multiply keys and values, one after the other (:mod:`baton.engine.attention.latent`).
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    has_latents: bool = False


class AttentionBatch(Protocol):
    """The part of a batch that attention reads.

    Attributes:
        slots: int64 ``[num_tokens]``, slots of the new keys and values.
        groups: covers the new tokens, in order.
    """

    @property
    def slots(self) -> torch.Tensor: ...

    @property
    def groups(self) -> list[AttentionGroup]: ...


class AttentionBackend(Protocol):
    """Causal attention of new tokens over everything that their sequences hold in the cache.

    Attributes:
        key_sharing: how the plan of a :class:`baton.engine.attention.paged_plan.PlannedBatch` divides keys; ``None``
            if a batch cannot be planned.
    """

    @property
    def key_sharing(self) -> KeySharing | None: ...

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """Writes the new keys and values to the cache, then attends.

        Args:
            query: ``[num_tokens, num_heads, key_dim]``, the batch's sequences one after the other; with latents
                ``[num_tokens, num_heads, key_dim + value_dim]``.
            key: ``[num_tokens, num_kv_heads, key_dim]``
            value: ``[num_tokens, num_kv_heads, value_dim]``

        Returns:
            ``[num_tokens, num_heads, value_dim]``
        """
        ...


@dataclass(slots=True)
class AttentionSlot:
    """Binds one attention module of the model to a layer of the cache. ``batch`` changes with every step."""

    layer: int
    backend: AttentionBackend
    sliding_window: int | None
    batch: AttentionBatch | None = None


def bind_slot(module: nn.Module, slot: AttentionSlot) -> None:
    """Makes ``module`` attend through ``slot``. The module stores the slot, so that several models can coexist."""
    object.__setattr__(module, _SLOT_ATTRIBUTE, slot)


def variant_of(
    slot: AttentionSlot, scaling: float | None, kwargs: dict[str, Any], key_dim: int, *, has_latents: bool = False
) -> AttentionVariant:
    """Converts what transformers passes to an attention function; the window is the one that the probe found."""
    return AttentionVariant(
        scaling=key_dim**-0.5 if scaling is None else float(scaling),
        sliding_window=slot.sliding_window,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        has_latents=has_latents,
    )


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: ``[1, heads, num_tokens, dim]`` in, ``[1, num_tokens, heads, dim]`` out.

    Raises:
        UnsupportedModelError: the model brings a mask of its own (a position bias, for example).
    """
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes its own attention mask, which paged attention cannot honour."
        )
    slot: AttentionSlot = getattr(module, _SLOT_ATTRIBUTE)
    if slot.batch is None:
        raise RuntimeError("an attention layer ran outside a forward batch")
    heads = latent_heads(module)
    variant = variant_of(slot, scaling, kwargs, query.shape[-1], has_latents=heads is not None)
    output = slot.backend.forward(
        slot.layer,
        (query if heads is None else heads.absorb(query))[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        slot.batch,
        variant,
    ).unsqueeze(0)
    return project_latents(module, output).contiguous(), None

"""The memory that a model takes, from its config alone: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from baton.core.kv_spec import KVCacheSpec, KVEncoding, LayerSpec
from baton.core.ranks import share_of
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.models.empty_model import attention_shapes, empty_model
from baton.engine.models.fp8_linear import can_be_fp8
from baton.engine.parallel.plan import COLUMNS, EMBEDDINGS, GATHERED, PACKED, ROWS, ShardPlan, make_plan

_SCALE_BYTES = 4
_FLOAT32_BYTES = 4
_STATES = 6
"""Rows of the hidden size that a layer holds at once: residual, normed and rotated states, and copies in float32."""
_GATE_UP_PRODUCT = 3
_LOGIT_COPIES = 3
"""Copies of a step's logits in float32: those of sampling included."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one rank holds. All sizes are bytes, those of the rank with most.

    Attributes:
        num_parameters: of the whole model.
        weights: its part of them.
        kv_per_token: KV of one token, of its heads.
        whole_kv_per_token: KV of one token, of all heads: what a hand-off sends.
        activations_per_token: estimate of what a step allocates for one token.
        logits_per_row: estimate of what it allocates for one row of logits.
    """

    num_parameters: int
    weights: int
    kv_per_token: int
    whole_kv_per_token: int
    activations_per_token: int
    logits_per_row: int

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Estimate of what a step allocates."""
        return num_tokens * self.activations_per_token + num_rows * self.logits_per_row


def footprint_of(
    config: Any,
    dtype_name: str,
    size: int = 1,
    weights: str = "native",
    encoding: KVEncoding = KVEncoding.NATIVE,
    *,
    is_plain: bool = True,
) -> Footprint:
    """The footprint of a model of transformers that ``size`` ranks share.

    Args:
        weights: ``native`` or ``fp8``.
        is_plain: see :func:`~.empty_model.empty_model`.

    Raises:
        UnsupportedModelError: it cannot be divided among so many ranks; or its cache cannot be sized without weights.
    """
    dtype = TORCH_DTYPES[dtype_name]
    model = empty_model(config, dtype, is_plain=is_plain)
    plan = make_plan(model, size) if size > 1 else None
    own = _OwnParameters(model, plan, weights)
    layers = attention_shapes(model if dtype is torch.bfloat16 else empty_model(config, is_plain=is_plain))
    spec = KVCacheSpec("", dtype_name, 1, layers, weights, encoding=encoding)
    held = replace(spec, layers=tuple(_held(layer, plan, model) for layer in layers))
    text = config.get_text_config(decoder=True)
    widest = max(_widths(model, plan), default=text.hidden_size)
    return Footprint(
        num_parameters=own.total,
        weights=own.num_bytes,
        kv_per_token=held.bytes_per_token,
        whole_kv_per_token=spec.bytes_per_token,
        activations_per_token=dtype.itemsize * (_STATES * text.hidden_size + _GATE_UP_PRODUCT * widest),
        logits_per_row=_LOGIT_COPIES * _FLOAT32_BYTES * text.vocab_size,
    )


class _OwnParameters:
    """Adds up the parameters of rank 0, which has as many as any other. Tied ones count once."""

    def __init__(self, model: PreTrainedModel, plan: ShardPlan | None, weights: str) -> None:
        self.total = self.num_bytes = 0
        self._plan = plan
        self._cut = {} if plan is None else _shares_of_heads(plan)
        decoder = model.get_decoder()
        inside = {id(module) for module in decoder.modules()}
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            is_fp8 = weights == "fp8" and id(module) in inside and can_be_fp8(module)
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                full_name = f"{prefix}.{name}" if prefix else name
                self.total += parameter.numel()
                held = self._held(full_name, prefix, parameter)
                self.num_bytes += held * (1 if is_fp8 and name == "weight" else parameter.element_size())
                if is_fp8 and name == "weight":
                    self.num_bytes += held // parameter.shape[1] * _SCALE_BYTES

    def _held(self, name: str, module_name: str, parameter: torch.Tensor) -> int:
        """Numbers of a parameter that rank 0 holds."""
        plan = self._plan
        if plan is None:
            return parameter.numel()
        if module_name in self._cut:
            count, share = self._cut[module_name]
            return parameter.numel() // count * share
        style = plan.style_of(name) or plan.style_of(module_name)
        if style in COLUMNS | PACKED | EMBEDDINGS:
            return -(-parameter.numel() // plan.size)
        if style in ROWS:
            return -(-parameter.numel() // plan.size) if parameter.ndim > 1 else parameter.numel()
        return parameter.numel()


def _shares_of_heads(plan: ShardPlan) -> dict[str, tuple[int, int]]:
    """For projections that are cut after loading: the number of heads, and how many of them rank 0 holds."""
    found: dict[str, tuple[int, int]] = {}
    for attention in plan.attention.values():
        heads = attention.heads
        for projection in attention.projections:
            is_kv = projection in attention.kv_projections
            if plan.style_of(projection) in COLUMNS | ROWS:
                continue
            own = heads.kv_of(0, plan.size) if is_kv else heads.of(0, plan.size)
            found[projection] = (heads.num_kv_heads if is_kv else heads.num_heads, len(own))
    return found


def _held(layer: LayerSpec, plan: ShardPlan | None, model: PreTrainedModel) -> LayerSpec:
    """The heads of a layer that rank 0 holds."""
    if plan is None or not _divides_heads(plan, model):
        return layer
    return replace(layer, num_kv_heads=len(share_of(layer.num_kv_heads, 0, plan.size)))


def _divides_heads(plan: ShardPlan, model: PreTrainedModel) -> bool:
    """Whether the ranks have different heads; some plans divide the weights of attention, and gather their outputs."""
    if plan.attention:
        return True
    styles = {
        plan.style_of(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ("attn" in name or "attention" in name)
    }
    return bool(styles & (COLUMNS - GATHERED))


def _widths(model: PreTrainedModel, plan: ShardPlan | None) -> list[int]:
    """Columns of the linear layers of the decoder on one rank."""
    found = []
    for name, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Linear):
            divided = plan is not None and plan.style_of(f"{model.base_model_prefix}.{name}") in COLUMNS - GATHERED
            found.append(module.out_features // plan.size if divided and plan is not None else module.out_features)
    return found

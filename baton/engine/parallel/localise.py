"""Turns a model that transformers divided among ranks into one of plain tensors and our own parallel layers.

transformers loads each rank's part of the weights as distributed tensors, and lets every layer convert its inputs and
outputs. Here each such tensor becomes its local part, and the few layers that exchange something are wrapped. All that
reads a model's structure afterwards (fp8, hooks, CUDA graphs) sees ordinary modules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from baton.engine.parallel import plan as styles
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.held_part import HeldPart, held_part
from baton.engine.parallel.layers import GatheredLayer, SharedInput, SlicedLayer, SplitEmbedding, SummedLayer
from baton.engine.parallel.plan import CuttableAttention, ShardPlan


def localise(model: PreTrainedModel, plan: ShardPlan, group: RankGroup) -> None:
    """Converts a model in place, as transformers loaded it with ``plan.styles``."""
    held = _take_local(model, group)
    _remove_hooks(model)
    for attention in plan.attention.values():
        held |= _cut(model.get_submodule(attention.name), attention, group)
    for name, module in list(model.named_modules()):
        wrapped = _wrap(name, module, plan.style_of(name), held, group)
        if wrapped is not module:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, wrapped)


def _take_local(model: PreTrainedModel, group: RankGroup) -> dict[str, HeldPart]:
    """Replaces distributed tensors by their local parts, shared ones by shared ones."""
    held: dict[str, HeldPart] = {}
    local_of: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in local_of:
                local_of[id(parameter)] = nn.Parameter(parameter.to_local(), requires_grad=False)
            full_name = f"{prefix}.{name}" if prefix else name
            part = held_part(parameter, group)
            if part is not None:
                held[full_name] = part
            module._parameters[name] = local_of[id(parameter)]
    return held


def _remove_hooks(model: PreTrainedModel) -> None:
    for module in model.modules():
        if "_is_hooked" in module.__dict__:
            del module._is_hooked
            module.__dict__.pop("forward", None)
    model._device_mesh = model._tp_size = None
    model._mesh_manager = None
    for config in {id(each): each for each in (model.config, model.config.get_text_config(decoder=True))}.values():
        config.__dict__.pop("distributed_config", None)


def _cut(module: nn.Module, attention: CuttableAttention, group: RankGroup) -> dict[str, HeldPart]:
    """Keeps this rank's heads of projections that were loaded whole."""
    heads = attention.heads
    own, own_kv = heads.of(group.rank, group.size), heads.kv_of(group.rank, group.size)
    if hasattr(module, "num_key_value_groups"):
        setattr(module, "num_key_value_groups", len(own) // len(own_kv))  # noqa: B010 - nn.Module declares tensors only
    held: dict[str, HeldPart] = {}
    for name, dim, kept, count in (
        ("q_proj", 0, own, heads.num_heads),
        ("k_proj", 0, own_kv, heads.num_kv_heads),
        ("v_proj", 0, own_kv, heads.num_kv_heads),
        (attention.output, 1, own, heads.num_heads),
    ):
        layer: nn.Linear = module.get_submodule(name)  # type: ignore[assignment]
        whole = layer.out_features if dim == 0 else layer.in_features
        if layer.weight.shape[dim] != whole:
            continue  # divided already
        width = whole // count
        places = range(kept.start * width, kept.stop * width)
        for parameter_name, parameter in list(layer.named_parameters(recurse=False)):
            if dim < parameter.ndim:
                part = parameter.detach().narrow(dim, places.start, len(places)).clone()
                layer._parameters[parameter_name] = nn.Parameter(part, requires_grad=False)
                held[f"{attention.name}.{name}.{parameter_name}"] = HeldPart(parameter.shape, dim, (places,))
    return held


def _wrap(name: str, module: nn.Module, style: str | None, held: Mapping[str, HeldPart], group: RankGroup) -> nn.Module:
    part = held.get(f"{name}.weight")
    if style in styles.EMBEDDINGS and part is not None:
        return _split_embedding(module, part, group)
    if isinstance(module, nn.Linear) and part is not None:
        if style in styles.GATHERED:
            return GatheredLayer(module, group, _counts(part.shape[0], group.size))
        if part.dim == 1:  # rows of the layer, as columns of its weight
            if group.rank and module.bias is not None:
                module.register_parameter("bias", None)  # it is added once
            if style in styles.SLICED:
                columns = part.ranges[0]
                return SlicedLayer(module, group, slice(columns.start, columns.stop))
            return SummedLayer(module, group)
    if style in styles.SUMMED:
        return SummedLayer(module, group)
    return SharedInput(module, group) if style in styles.SHARED_INPUT else module


def _split_embedding(module: nn.Module, part: HeldPart, group: RankGroup) -> nn.Module:
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    padded = torch.cat((weight, weight.new_zeros(1, weight.shape[1])))
    weight.data = padded[:-1]  # a head that shares the weight keeps sharing it
    module.weight = nn.Parameter(padded, requires_grad=False)
    return SplitEmbedding(module, group, _counts(part.shape[0], group.size))


def _counts(total: int, size: int) -> list[int]:
    """Columns or rows of each rank, as transformers divides them."""
    each = -(-total // size)
    return [max(0, min(total, (rank + 1) * each) - rank * each) for rank in range(size)]

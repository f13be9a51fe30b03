"""How a model is divided among ranks: transformers' plan for it, and the degrees that are possible.

A plan names a style for each module or parameter, with ``*`` for the number of a layer. It divides columns and rows
evenly. Heads that it cannot divide are loaded whole and cut afterwards: an uneven number of them, and KV heads that
several ranks share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from baton.core.errors import UnsupportedModelError
from baton.core.ranks import MAX_RANKS
from baton.engine.parallel.heads import Heads

WHOLE = "replicate"
COLUMNS = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
SLICED = frozenset({"rowwise_split_input", "rowwise_rep"})
PACKED = frozenset({"packed_colwise", "packed_rowwise"})
EMBEDDINGS = frozenset({"embedding_rowwise"})
SUMMED = frozenset({"moe_tp_experts", "all_reduce"})
SHARED_INPUT = frozenset({"moe_identity_expert"})
NOTHING = frozenset({WHOLE, "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"})
_KNOWN = COLUMNS | ROWS | PACKED | EMBEDDINGS | SUMMED | SHARED_INPUT | NOTHING

_QUERIES, _KEYS, _VALUES, _OUTPUTS = "q_proj", "k_proj", "v_proj", ("o_proj", "dense", "out_proj")
_NUM_PACKED = 2
_EXPERTS_NDIM = 3
_EXPERT_BYTES = 16
"""Alignment of the rows of experts, required by torch's grouped products."""


@dataclass(frozen=True, slots=True)
class CuttableAttention:
    """An attention module whose projections are separate layers, each divided by heads.

    Attributes:
        name: of the module.
        output: the name of its last projection.
    """

    name: str
    output: str
    heads: Heads

    @property
    def projections(self) -> tuple[str, ...]:
        return (*self.kv_projections, f"{self.name}.{_QUERIES}", f"{self.name}.{self.output}")

    @property
    def kv_projections(self) -> tuple[str, ...]:
        return (f"{self.name}.{_KEYS}", f"{self.name}.{_VALUES}")


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A model's plan for a number of ranks.

    Attributes:
        styles: by name of a module or parameter, as transformers' own plan.
        attention: the attention modules that may need a cut; by their names.
    """

    size: int
    styles: Mapping[str, str]
    attention: Mapping[str, CuttableAttention]

    def style_of(self, name: str) -> str | None:
        """The style of a module or parameter, ``None`` if every rank holds it whole."""
        return self.styles.get(pattern_of(name))


def pattern_of(name: str) -> str:
    """The name in a plan of a module or parameter: numbers of layers become ``*``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def make_plan(model: PreTrainedModel, size: int) -> ShardPlan:
    """Returns the plan of a model for ``size`` ranks.

    Args:
        model: may be empty.

    Raises:
        UnsupportedModelError: the model cannot be divided, or not among so many ranks; the message names the degrees
            that are possible.
    """
    name = type(model).__name__
    styles = dict(model.tp_plan or {})
    present = {pattern_of(each) for each, _ in (*model.named_modules(), *model.named_parameters())}
    styles = {pattern: style for pattern, style in styles.items() if pattern in present}
    if not any(style in COLUMNS | PACKED for pattern, style in styles.items() if pattern != "lm_head"):
        raise UnsupportedModelError(
            f"{name} cannot be divided among ranks: transformers has no plan for its layers. Use a tensor-parallel "
            "degree of 1."
        )
    unknown = sorted(set(styles.values()) - _KNOWN)
    if unknown:
        raise UnsupportedModelError(
            f"{name} cannot be divided among ranks: its plan has the styles {', '.join(unknown)}, which are not "
            "supported. Use a tensor-parallel degree of 1."
        )
    attention = {each.name: each for each in _cuttable(model, styles)}
    obstacle = _obstacle(model, styles, attention, size)
    if obstacle:
        degrees = [str(n) for n in range(1, MAX_RANKS + 1) if not _obstacle(model, styles, attention, n)]
        raise UnsupportedModelError(
            f"{name} cannot be divided among {size} ranks: {obstacle}. Possible tensor-parallel degrees are: "
            f"{', '.join(degrees)}."
        )
    for each in attention.values():
        if each.heads.num_kv_heads % size:  # these are cut after loading
            styles |= {pattern_of(projection): WHOLE for projection in each.kv_projections}
            if size <= each.heads.num_kv_heads:
                styles |= {pattern_of(projection): WHOLE for projection in each.projections}
    return ShardPlan(size, styles, attention)


def _cuttable(model: PreTrainedModel, styles: Mapping[str, str]) -> list[CuttableAttention]:
    found = []
    for name, module in model.named_modules():
        output = next((each for each in _OUTPUTS if isinstance(getattr(module, each, None), nn.Linear)), None)
        projections = [getattr(module, each, None) for each in (_QUERIES, _KEYS, _VALUES)]
        queries, keys, values = projections
        dim = getattr(module, "head_dim", None)
        if (
            output is not None
            and isinstance(dim, int)
            and isinstance(queries, nn.Linear)
            and isinstance(keys, nn.Linear)
            and isinstance(values, nn.Linear)
            and {styles.get(pattern_of(f"{name}.{each}")) for each in (_QUERIES, _KEYS, _VALUES)} == {"colwise"}
            and styles.get(pattern_of(f"{name}.{output}")) == "rowwise"
        ):
            heads = Heads(queries.out_features // dim, keys.out_features // dim)
            found.append(CuttableAttention(name, output, heads))
    return found


def _obstacle(
    model: PreTrainedModel, styles: Mapping[str, str], attention: Mapping[str, CuttableAttention], size: int
) -> str:
    """Why a model cannot be divided among so many ranks; empty if it can."""
    for each in attention.values():
        if not each.heads.can_split(size):
            return f"{each.name} has {each.heads.num_heads} heads and {each.heads.num_kv_heads} KV heads"
        own = [name for name, _ in model.get_submodule(each.name).named_parameters(recurse=False)]
        if own and each.heads.num_heads % size:  # such as sinks, which are divided evenly
            return f"{each.name}.{own[0]} has {each.heads.num_heads} heads"
    cut = {projection for each in attention.values() for projection in each.projections}
    num_heads = model.config.get_text_config(decoder=True).num_attention_heads
    for name, module in model.named_modules():
        style = styles.get(pattern_of(name))
        if name in cut or not isinstance(module, nn.Linear):
            continue
        if style == "colwise" and _is_attention(name) and num_heads % size:
            return f"{name} has {num_heads} heads"
        width = module.out_features if style in COLUMNS | PACKED else module.in_features
        if style in COLUMNS | ROWS and not _shares(width, size):
            return f"{name} has {width} columns to divide"
        if style in PACKED and width % (_NUM_PACKED * size):
            return f"{name} has {width // _NUM_PACKED} columns to divide"
    for name, parameter in model.named_parameters():
        style = styles.get(pattern_of(name))
        if parameter.ndim < _EXPERTS_NDIM:
            continue
        least = size * (_EXPERT_BYTES // parameter.element_size())
        if style == "packed_colwise" and parameter.shape[-2] % (_NUM_PACKED * least):
            return f"{name} has {parameter.shape[-2] // _NUM_PACKED} rows to divide, which is no multiple of {least}"
        if style == "rowwise" and parameter.shape[-1] % least:
            return f"{name} has {parameter.shape[-1]} columns to divide, which is no multiple of {least}"
    return ""


def _shares(width: int, size: int) -> bool:
    """Whether every rank gets some of ``width`` columns, where all but the last get equally many."""
    return (size - 1) * -(-width // size) < width


def _is_attention(name: str) -> bool:
    return any("attn" in part or "attention" in part for part in name.split(".")[:-1])

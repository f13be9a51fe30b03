"""Derives the network to build from an EAGLE checkpoint. ``eagle_layout.py`` covers names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN

from baton.core.errors import ConfigError
from baton.engine.batch.hidden_states import FINAL_HIDDEN
from baton.engine.draft.eagle.eagle_layout import (
    EagleFormat,
    check_sizes,
    flag,
    layer_config_of,
    layer_type_of,
    read_layout,
    refused,
)
from baton.engine.draft.eagle.head import EagleSettings
from baton.engine.draft.layers import LayerSettings, RotaryTable
from baton.engine.draft.target_shape import TargetShape
from baton.engine.draft.tensor_names import FileNames

# Other types change frequencies with the length of the longest sequence, so cached keys would be wrong.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Errors of transformers for values of the wrong kind or size.
_CONFIG_FAULTS = (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def read_settings(
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    target: TargetShape,
    kind: EagleFormat,
    where: str,
    in_file: FileNames,
) -> tuple[EagleSettings, tuple[tuple[int, ...], ...]]:
    """Returns the settings for this checkpoint and target, and possible readings of its layer ids, likeliest first.

    Args:
        tensors: by canonical name.
        in_file: maps tensor names for messages.

    Raises:
        ConfigError: the config is invalid.
        UnsupportedModelError: the head belongs to another target, or has a feature that baton does not support.
    """
    layer_config = layer_config_of(config, tensors, kind, where)
    parsed = _transformers_config(layer_config, where)
    layers = _layer_settings(layer_config, parsed, tensors, kind, where, in_file)
    check_sizes(config, parsed.vocab_size, layers.hidden_size, target, where)
    layout = read_layout(config, tensors, layers.hidden_size, target, kind, where, in_file)
    if kind is EagleFormat.EAGLE:
        settings = EagleSettings(
            version=1,
            layers=layers,
            target=target,
            feature_layers=(FINAL_HIDDEN,),
            draft_vocab_size=layout.draft_vocab_size,
            fc_bias=flag(config, "bias", True, where),
            own_embedding=layout.own_embedding,
            own_lm_head=layout.own_lm_head,
        )
        return settings, (settings.feature_layers,)
    choices = layout.feature_layers or ((FINAL_HIDDEN,),)
    settings = EagleSettings(
        version=3,
        layers=layers,
        target=target,
        feature_layers=choices[0],
        draft_vocab_size=layout.draft_vocab_size,
        has_fc=bool(layout.feature_layers),
        norm_before_fc=flag(config, "norm_before_fc", False, where),
        fc_norm=flag(config, "fc_norm", False, where),
        norm_before_residual=flag(config, "norm_before_residual", kind is EagleFormat.SPECULATORS, where),
        # As servers read it: which output is fed back. The file does not show whether SpecForge trained it that way.
        norm_output=flag(config, "norm_output", False, where),
        maps_vocabulary=layout.draft_vocab_size < target.vocab_size or _moves_ids(tensors),
        own_embedding=layout.own_embedding,
        own_lm_head=layout.own_lm_head,
    )
    if settings.norm_before_fc and settings.fc_norm:
        raise ConfigError(f"draft checkpoint {where}: norm_before_fc and fc_norm exclude each other.")
    return settings, choices


def _moves_ids(tensors: Mapping[str, torch.Tensor]) -> bool:
    return "d2t" in tensors and bool(tensors["d2t"].any())


def _transformers_config(raw: Mapping[str, Any], where: str) -> Any:
    """The layer's config as transformers reads it, with defaults for what a diff-only config omits."""
    try:
        return CONFIG_MAPPING[layer_type_of(raw)](**{key: value for key, value in raw.items() if key != "model_type"})
    except _CONFIG_FAULTS as error:
        raise ConfigError(f"draft checkpoint {where}: config.json cannot be used: {error}") from error


def _layer_settings(
    raw: Mapping[str, Any],
    parsed: Any,
    tensors: Mapping[str, torch.Tensor],
    kind: EagleFormat,
    where: str,
    in_file: FileNames,
) -> LayerSettings:
    attention = "layers.0.self_attn"
    bias = bool(getattr(parsed, "attention_bias", False))
    rope = dict(parsed.rope_parameters)
    if rope.get("rope_type") == "mrope" or "mrope_section" in rope:  # text has the same position in all sections
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if rope.get("rope_type") not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise refused(where, f"a head with the rotary embedding {rope}; supported are: {', '.join(_ROPE_TYPES)}")
    settings = LayerSettings(
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        num_heads=parsed.num_attention_heads,
        num_kv_heads=parsed.num_key_value_heads or parsed.num_attention_heads,
        head_dim=getattr(parsed, "head_dim", None) or parsed.hidden_size // parsed.num_attention_heads,
        rms_norm_eps=parsed.rms_norm_eps,
        hidden_act=parsed.hidden_act,
        rope=rope,
        max_positions=parsed.max_position_embeddings,
        windows=_windows(raw, parsed, where),
        # Formats name these switches differently, but a stored bias is always used.
        qkv_bias=bias or bool(raw.get("qkv_bias")) or f"{attention}.q_proj.bias" in tensors,
        output_bias=bias or f"{attention}.o_proj.bias" in tensors,
        mlp_bias=bool(getattr(parsed, "mlp_bias", False)) or "layers.0.mlp.gate_proj.bias" in tensors,
        qk_norm=(kind is EagleFormat.SPECULATORS and parsed.model_type == "qwen3")
        or f"{attention}.q_norm.weight" in tensors,
    )
    sizes = (settings.hidden_size, settings.intermediate_size, settings.num_kv_heads, settings.head_dim)
    if min(sizes) < 1 or not settings.windows or settings.num_heads % settings.num_kv_heads or settings.head_dim % 2:
        raise ConfigError(f"draft checkpoint {where}: the sizes in config.json do not fit together.")
    if settings.hidden_act not in ACT2FN:
        raise ConfigError(f"draft checkpoint {where}: hidden_act is {settings.hidden_act!r}, which is not supported.")
    query_name = f"{attention}.q_proj.weight"
    query = tensors.get(query_name)
    rows = settings.num_heads * settings.head_dim
    if query is None or query.ndim != 2 or query.shape[0] != rows:
        found = "is missing" if query is None else f"is {list(query.shape)}"
        raise refused(where, f"damaged: {in_file(query_name)} {found}, expected {rows} rows")
    try:
        RotaryTable(settings)
    except _CONFIG_FAULTS as error:
        raise ConfigError(f"draft checkpoint {where}: the rotary embedding {rope} cannot be used: {error}") from error
    return settings


def _windows(raw: Mapping[str, Any], parsed: Any, where: str) -> tuple[int | None, ...]:
    """The window of each layer. Without ``layer_types`` only Mistral's window is used, as in other servers."""
    count = int(parsed.num_hidden_layers)
    window = raw.get("sliding_window") or getattr(parsed, "sliding_window", None)
    types = getattr(parsed, "layer_types", None)
    if types is None:
        return (window if parsed.model_type == "mistral" else None,) * count
    if others := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise refused(where, f"a head whose layer_types contain {', '.join(others)}, which is not supported")
    if "sliding_attention" in types and (type(window) is not int or window < 1):
        raise ConfigError(
            f"draft checkpoint {where}: layer_types contain sliding_attention, so sliding_window must "
            f"be at least 1, got {window!r}."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)

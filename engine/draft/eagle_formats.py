"""The formats of EAGLE checkpoints: which one it is, and what its config means.

``EAGLE``       SafeAILab's first heads: a Llama config, ``fc`` over embedding and hidden state.
``EAGLE3``      SafeAILab, SpecForge and SGLang: a flat config with ``draft_vocab_size``, ``midlayer.*``.
``SPECULATORS`` speculators and vLLM: the decoder layer's config nested in ``transformer_layer_config``, ``layers.*``.

Formats disagree on what a missing flag or a layer id means; every such rule stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN

from engine.draft.eagle import FINAL_HIDDEN, EagleSettings, TargetShape
from engine.draft.layers import LayerSettings, RotaryTable
from engine.errors import ConfigError, UnsupportedModelError

# What draft layers are written as. Mistral's is Llama's with a window, Qwen2's is Llama's with biases.
_LAYER_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# With the others, frequencies change with the length of the longest sequence, and cached keys would be wrong.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What transformers raises for values of the wrong kind or size.
_CONFIG_FAULTS = (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Of the target, stored beside the head for training only; rotary tables follow from the config.
_IGNORED_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight")


class EagleFormat(StrEnum):
    """A way of writing EAGLE heads."""

    EAGLE = "an EAGLE-1/2 head"
    EAGLE3 = "an EAGLE-3 head"
    SPECULATORS = "a speculators EAGLE-3 head"


def canonical_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the names of :class:`engine.draft.eagle.EagleHead`, without those that nothing reads."""
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = f"layers.0.{name.removeprefix('midlayer.')}"
        if name not in _IGNORED_TENSORS and not name.endswith("rotary_emb.inv_freq"):
            found[name] = tensor
    return found


def format_of(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str) -> EagleFormat:
    """Tells the format from the config, and where that says nothing from the (canonical) tensors.

    Raises:
        UnsupportedModelError: another kind of draft, by name, or none that is known.
    """
    kind = config.get("speculators_model_type")
    if kind == "peagle" or "mask_hidden" in tensors or config.get("parallel_drafting"):
        raise _refused(where, "a P-EAGLE head, which drafts in parallel and is not supported. Use an EAGLE-3 head")
    is_mtp = any(name.startswith("mtp.") or ".eh_proj." in name for name in tensors)
    if kind == "mtp" or config.get("num_nextn_predict_layers") or is_mtp:
        raise _refused(where, "a multi-token-prediction (MTP) module, which is not supported. Use an EAGLE-3 head")
    if kind not in (None, "eagle3"):
        raise _refused(where, f"a speculators model of the kind {kind!r}; of these, only 'eagle3' is supported")
    if any(key in config for key in ("medusa_num_heads", "medusa_num_layers")) or "blocks.0.layers.0.weight" in tensors:
        raise _refused(where, "Medusa heads. Use them with the method medusa")
    if kind == "eagle3":
        return EagleFormat.SPECULATORS
    if "layers.0.hidden_norm.weight" in tensors:
        return EagleFormat.EAGLE3
    if "fc.weight" in tensors and "layers.0.self_attn.q_proj.weight" in tensors:
        return EagleFormat.EAGLE
    raise _refused(
        where,
        "in no known format: expected fc.weight and midlayer.* or layers.0.* tensors, as EAGLE-1/2, EAGLE-3 "
        "(SafeAILab, SpecForge, SGLang) or speculators (vLLM) heads have",
    )


def read_settings(
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    target: TargetShape,
    kind: EagleFormat,
    where: str,
) -> tuple[EagleSettings, tuple[tuple[int, ...], ...]]:
    """What to build for this checkpoint and target, and the possible readings of its layer ids, likeliest first.

    Args:
        tensors: by canonical name.

    Raises:
        ConfigError: the config cannot be used.
        UnsupportedModelError: the head belongs to another target, or has what baton does not support.
    """
    layer_config = config.get("transformer_layer_config") if kind is EagleFormat.SPECULATORS else config
    if not isinstance(layer_config, Mapping):
        raise ConfigError(f"draft checkpoint {where}: transformer_layer_config is missing from config.json.")
    _check_num_layers(layer_config, tensors, where)
    parsed = _transformers_config(layer_config, where)
    layers = _layer_settings(layer_config, parsed, tensors, kind, where)
    _same(where, "vocabulary", "tokens", parsed.vocab_size, target.vocab_size)
    feature_size = config.get("target_hidden_size")
    if feature_size is None:
        feature_size = layers.hidden_size
    _same(where, "hidden size of its target", "", feature_size, target.hidden_size)
    own_embedding = "embed_tokens.weight" in tensors
    if not own_embedding and layers.hidden_size != target.hidden_size:
        raise _refused(
            where,
            f"{layers.hidden_size} wide and has no embed_tokens, but the target's embedding is "
            f"{target.hidden_size} wide",
        )
    if kind is EagleFormat.EAGLE:
        settings = EagleSettings(
            version=1,
            layers=layers,
            target=target,
            feature_layers=(FINAL_HIDDEN,),
            draft_vocab_size=target.vocab_size,
            fc_bias=_flag(config, "bias", True, where),
            own_embedding=own_embedding,
            own_lm_head=False,
        )
        return settings, (settings.feature_layers,)
    has_fc = _flag(config, "use_aux_hidden_state", True, where)
    choices = _feature_layers(config, target, where) if has_fc else ((FINAL_HIDDEN,),)
    _check_num_features(tensors, target, len(choices[0]), where)
    draft_vocab_size, own_lm_head = _draft_vocabulary(config, tensors, target, where)
    if not own_lm_head and layers.hidden_size != target.hidden_size:
        raise _refused(where, f"{layers.hidden_size} wide without an lm_head, but the target is {target.hidden_size}")
    settings = EagleSettings(
        version=3,
        layers=layers,
        target=target,
        feature_layers=choices[0],
        draft_vocab_size=draft_vocab_size,
        has_fc=has_fc,
        norm_before_fc=_flag(config, "norm_before_fc", False, where),
        fc_norm=_flag(config, "fc_norm", False, where),
        norm_before_residual=_flag(config, "norm_before_residual", kind is EagleFormat.SPECULATORS, where),
        # As servers read it: what is fed back. Whether SpecForge trained it so cannot be seen from the file.
        norm_output=_flag(config, "norm_output", False, where),
        maps_vocabulary=draft_vocab_size < target.vocab_size or _moves_ids(tensors),
        own_embedding=own_embedding,
        own_lm_head=own_lm_head,
    )
    if settings.norm_before_fc and settings.fc_norm:
        raise ConfigError(f"draft checkpoint {where}: norm_before_fc and fc_norm exclude each other.")
    return settings, choices


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Early, middle and late hidden states, as SafeAILab, vLLM and SGLang choose them.

    Raises:
        UnsupportedModelError: the target is too shallow for three.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 0 <= layers[0] <= layers[1] <= layers[2]:
        raise UnsupportedModelError(
            f"a target of {num_layers} layers has no usual early, middle and late ones; the draft's config.json must "
            f"name them in {_LAYER_IDS}."
        )
    return layers


def _feature_layers(config: Mapping[str, Any], target: TargetShape, where: str) -> tuple[tuple[int, ...], ...]:
    """Readings of the layer ids as indices into ``hidden_states``, the likeliest first.

    At the top level an id means a layer's input, which is the index itself. In ``eagle_config`` it mostly means a
    layer's output, one further (SpecForge, SGLang), but some write inputs there as well.
    """
    top = _layer_ids(config.get(_LAYER_IDS), where)
    nested = _layer_ids(_eagle_config(config).get(_LAYER_IDS), where)
    if top is None and nested is None:
        return (default_feature_layers(target.num_layers),)
    if top is not None:
        choices = [top]
    else:
        ids = nested or ()
        choices = [tuple(layer + 1 for layer in ids), ids]
    possible = tuple(ids for ids in choices if all(0 <= layer <= target.num_layers for layer in ids))
    if not possible:
        raise _refused(
            where, f"trained on layers {list(top or nested or ())}, but the target has {target.num_layers} layers"
        )
    return possible


def _layer_ids(value: Any, where: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(layer) is int for layer in value):
        raise ConfigError(f"draft checkpoint {where}: {_LAYER_IDS} is {value!r}, expected a list of layer numbers.")
    return tuple(value)


def _check_num_layers(layer_config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Before anything is made in this number."""
    stated = layer_config.get("num_hidden_layers", 1)
    stored = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    if stated != stored:
        raise _refused(where, f"of {stated} layers by its config.json, but holds tensors of {stored} layers")


def _check_num_features(tensors: Mapping[str, torch.Tensor], target: TargetShape, expected: int, where: str) -> None:
    fc = tensors.get("fc.weight")
    if fc is None or fc.ndim != 2 or fc.shape[1] == expected * target.hidden_size:
        return  # whatever else is wrong shows when names and shapes are compared
    found = fc.shape[1] / target.hidden_size
    raise _refused(
        where,
        f"made for {found:g} features of {target.hidden_size} numbers (fc.weight is {list(fc.shape)}), but its config "
        f"names {expected} layers of the target",
    )


def _draft_vocabulary(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: TargetShape, where: str
) -> tuple[int, bool]:
    """Size of the draft vocabulary, and whether the head has an lm_head of its own."""
    stated = config.get("draft_vocab_size")
    lm_head = tensors.get("lm_head.weight")
    if lm_head is not None and lm_head.ndim != 2:
        raise _refused(where, f"broken: lm_head.weight is {list(lm_head.shape)}")
    size = stated if stated is not None else target.vocab_size if lm_head is None else int(lm_head.shape[0])
    if type(size) is not int or not 0 < size <= target.vocab_size:
        raise ConfigError(
            f"draft checkpoint {where}: draft_vocab_size is {stated!r}, expected a number of tokens up to the "
            f"target's {target.vocab_size}."
        )
    if lm_head is not None:
        _same(where, "lm_head.weight", "rows", int(lm_head.shape[0]), size, "its config")
    return size, lm_head is not None or size < target.vocab_size


def _moves_ids(tensors: Mapping[str, torch.Tensor]) -> bool:
    return "d2t" in tensors and bool(tensors["d2t"].any())


def _transformers_config(raw: Mapping[str, Any], where: str) -> Any:
    """The layer's config as transformers reads it, which fills in what a diff-only config leaves out."""
    kind = raw.get("model_type") or "llama"
    if kind not in _LAYER_TYPES:
        raise _refused(where, f"made of layers of the kind {kind!r}; supported are: {', '.join(_LAYER_TYPES)}")
    try:
        return CONFIG_MAPPING[kind](**{key: value for key, value in raw.items() if key != "model_type"})
    except _CONFIG_FAULTS as error:
        raise ConfigError(f"draft checkpoint {where}: config.json cannot be used: {error}") from error


def _layer_settings(
    raw: Mapping[str, Any], parsed: Any, tensors: Mapping[str, torch.Tensor], kind: EagleFormat, where: str
) -> LayerSettings:
    attention = "layers.0.self_attn"
    bias = bool(getattr(parsed, "attention_bias", False))
    rope = dict(parsed.rope_parameters)
    if rope.get("rope_type") == "mrope" or "mrope_section" in rope:  # text has the same position in all sections
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if rope.get("rope_type") not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refused(where, f"rotating positions by {rope}; supported are: {', '.join(_ROPE_TYPES)}")
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
        # Formats name these switches differently, but a bias that is stored is always one to add.
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
        raise ConfigError(f"draft checkpoint {where}: hidden_act is {settings.hidden_act!r}, which is not known.")
    query = tensors.get(f"{attention}.q_proj.weight")
    rows = settings.num_heads * settings.head_dim
    if query is None or query.ndim != 2 or query.shape[0] != rows:
        found = "is missing" if query is None else f"is {list(query.shape)}"
        raise _refused(where, f"broken: q_proj.weight of its first layer {found}, expected {rows} rows")
    try:
        RotaryTable(settings)
    except _CONFIG_FAULTS as error:
        raise ConfigError(f"draft checkpoint {where}: the rotary embedding {rope} cannot be used: {error}") from error
    return settings


def _windows(raw: Mapping[str, Any], parsed: Any, where: str) -> tuple[int | None, ...]:
    """Of each layer. Without ``layer_types`` only Mistral's window counts, which is what the peers do."""
    count = int(parsed.num_hidden_layers)
    window = raw.get("sliding_window") or getattr(parsed, "sliding_window", None)
    types = getattr(parsed, "layer_types", None)
    if types is None:
        return (window if parsed.model_type == "mistral" else None,) * count
    if others := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise _refused(where, f"made of layers that attend by {', '.join(others)}, which is not supported")
    if "sliding_attention" in types and (type(window) is not int or window < 1):
        raise ConfigError(f"draft checkpoint {where}: layer_types slide, but sliding_window is {window!r}.")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("eagle_config")
    return nested if isinstance(nested, Mapping) else {}


def _flag(config: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    """The nested value counts before the one at the top level."""
    value = _eagle_config(config).get(name, config.get(name))
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"draft checkpoint {where}: {name} is {value!r}, expected true or false.")
    return value


def _same(where: str, what: str, unit: str, found: object, expected: int, whose: str = "the target") -> None:
    if found != expected:
        raise UnsupportedModelError(
            f"draft checkpoint {where}: {what} of {found} {unit}".rstrip() + f", but {whose} has {expected}. "
            "Use a head that was trained for this model."
        )


def _refused(where: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"draft checkpoint {where} is {why}.")

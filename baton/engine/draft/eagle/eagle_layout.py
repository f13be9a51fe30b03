"""Formats of EAGLE checkpoints, determined from config, names and shapes. No torch here.

``EAGLE``       SafeAILab's first heads: a Llama config, ``fc`` over embedding and hidden state.
``EAGLE3``      SafeAILab, SpecForge and SGLang: a flat config with ``draft_vocab_size``, ``midlayer.*``.
``SPECULATORS`` speculators and vLLM: the decoder layer's config nested in ``transformer_layer_config``, ``layers.*``.

Formats disagree on the meaning of a missing flag or a layer id. Their rules are here; those for the decoder layer are
in ``eagle_formats.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.engine.draft.target_shape import TargetShape
from baton.engine.draft.tensor_names import FileNames, Shaped, canonical_eagle_name

# Types of draft layers. Mistral's is Llama's with a window, Qwen2's is Llama's with biases.
_LAYER_TYPES = ("llama", "mistral", "qwen2", "qwen3")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Tensors of the target, stored for training only.
_IGNORED_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight")

AnyTensor = TypeVar("AnyTensor")


class EagleFormat(StrEnum):
    """A file format of EAGLE heads."""

    EAGLE = "an EAGLE-1/2 head"
    EAGLE3 = "an EAGLE-3 head"
    SPECULATORS = "a speculators EAGLE-3 head"


@dataclass(frozen=True, slots=True)
class EagleLayout:
    """The part of a head's settings that follows from its config, names and shapes.

    Attributes:
        feature_layers: possible readings of the layer ids, likeliest first; empty for a head without ``fc`` over
            several features.
        draft_vocab_size: rows of the head's logits.
    """

    feature_layers: tuple[tuple[int, ...], ...]
    draft_vocab_size: int
    own_embedding: bool
    own_lm_head: bool


def canonical_names(tensors: Mapping[str, AnyTensor]) -> dict[str, AnyTensor]:
    """Tensors under the names of :class:`baton.engine.draft.eagle.head.EagleHead`, without unused ones."""
    found = {canonical_eagle_name(name): tensor for name, tensor in tensors.items()}
    return {
        name: tensor
        for name, tensor in found.items()
        if name not in _IGNORED_TENSORS and not name.endswith("rotary_emb.inv_freq")
    }


def format_of(config: Mapping[str, Any], tensors: Mapping[str, Shaped], where: str) -> EagleFormat:
    """Determines the format from the config, or else from the (canonical) tensors.

    Raises:
        UnsupportedModelError: it is another kind of draft, which the message names, or unknown.
    """
    kind = config.get("speculators_model_type")
    if kind == "peagle" or "mask_hidden" in tensors or config.get("parallel_drafting"):
        raise refused(where, "a P-EAGLE head, which drafts in parallel and is not supported. Use an EAGLE-3 head")
    is_mtp = any(name.startswith("mtp.") or ".eh_proj." in name for name in tensors)
    if kind == "mtp" or config.get("num_nextn_predict_layers") or is_mtp:
        raise refused(where, "a multi-token-prediction (MTP) module, which is not supported. Use an EAGLE-3 head")
    if kind not in (None, "eagle3"):
        raise refused(where, f"a speculators model of the kind {kind!r}; of these, only 'eagle3' is supported")
    if any(key in config for key in ("medusa_num_heads", "medusa_num_layers")) or "blocks.0.layers.0.weight" in tensors:
        raise refused(where, "a set of Medusa heads. Use it with the method medusa")
    if kind == "eagle3":
        return EagleFormat.SPECULATORS
    if "layers.0.hidden_norm.weight" in tensors:
        return EagleFormat.EAGLE3
    if "fc.weight" in tensors and "layers.0.self_attn.q_proj.weight" in tensors:
        return EagleFormat.EAGLE
    raise refused(
        where,
        "not in a known format: expected fc.weight and midlayer.* or layers.0.* tensors, as in EAGLE-1/2, EAGLE-3 "
        "(SafeAILab, SpecForge, SGLang) or speculators (vLLM) heads",
    )


def layer_config_of(
    config: Mapping[str, Any], tensors: Mapping[str, Shaped], kind: EagleFormat, where: str
) -> Mapping[str, Any]:
    """The decoder layer's part of the config.

    Raises:
        ConfigError: it is missing.
        UnsupportedModelError: the layers are of another kind, or their number differs from the tensors'.
    """
    layer_config = config.get("transformer_layer_config") if kind is EagleFormat.SPECULATORS else config
    if not isinstance(layer_config, Mapping):
        raise ConfigError(f"draft checkpoint {where}: transformer_layer_config is missing from config.json.")
    _check_num_layers(layer_config, tensors, where)
    if (layer_type := layer_type_of(layer_config)) not in _LAYER_TYPES:
        raise refused(where, f"a head with layers of the kind {layer_type!r}; supported are: {', '.join(_LAYER_TYPES)}")
    return layer_config


def layer_type_of(layer_config: Mapping[str, Any]) -> str:
    """Transformers' name of the layer type."""
    return str(layer_config.get("model_type") or "llama")


def check_sizes(
    config: Mapping[str, Any], vocab_size: int | None, hidden_size: int | None, target: TargetShape, where: str
) -> None:
    """Compares a head's config with its target.

    Args:
        vocab_size: vocabulary size in the config; ``None`` if it is not stated.
        hidden_size: width of the head's layers; ``None`` if the config does not state it.

    Raises:
        UnsupportedModelError: the head belongs to another target.
    """
    if vocab_size is not None:
        same(where, "vocabulary", "tokens", vocab_size, target.vocab_size)
    feature_size = config.get("target_hidden_size")
    if feature_size is None:
        feature_size = hidden_size
    if feature_size is not None:
        same(where, "hidden size of its target", "", feature_size, target.hidden_size)


def read_layout(
    config: Mapping[str, Any],
    tensors: Mapping[str, Shaped],
    hidden_size: int | None,
    target: TargetShape,
    kind: EagleFormat,
    where: str,
    in_file: FileNames,
) -> EagleLayout:
    """Reads the layout without the tensors' values, and checks it against the target.

    Args:
        tensors: by canonical name.
        hidden_size: width of the head's layers; ``None`` if the config does not state it.
        in_file: maps tensor names for messages.

    Raises:
        ConfigError: the config is invalid.
        UnsupportedModelError: the head belongs to another target.
    """
    own_embedding = "embed_tokens.weight" in tensors
    narrow = hidden_size is not None and hidden_size != target.hidden_size
    if not own_embedding and narrow:
        raise refused(
            where,
            f"a head of hidden size {hidden_size} without embed_tokens, but the target's hidden size is "
            f"{target.hidden_size}",
        )
    if kind is EagleFormat.EAGLE:
        return EagleLayout((), target.vocab_size, own_embedding, own_lm_head=False)
    choices = _feature_layers(config, target, where) if flag(config, "use_aux_hidden_state", True, where) else ()
    _check_num_features(tensors, target, len(choices[0]) if choices else 1, where, in_file)
    draft_vocab_size, own_lm_head = _draft_vocabulary(config, tensors, target, where, in_file("lm_head.weight"))
    if not own_lm_head and narrow:
        raise refused(
            where, f"a head of hidden size {hidden_size} without an lm_head, but the target's is {target.hidden_size}"
        )
    return EagleLayout(choices, draft_vocab_size, own_embedding, own_lm_head)


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Early, middle and late hidden states, as SafeAILab, vLLM and SGLang choose them.

    Raises:
        UnsupportedModelError: the target has too few layers for three.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 0 <= layers[0] <= layers[1] <= layers[2]:
        raise UnsupportedModelError(
            f"a target of {num_layers} layers has too few for the default early, middle and late layers; name them in "
            f"{LAYER_IDS} of the draft's config.json."
        )
    return layers


def _feature_layers(config: Mapping[str, Any], target: TargetShape, where: str) -> tuple[tuple[int, ...], ...]:
    """Readings of the layer ids as indices into ``hidden_states``, likeliest first.

    At the top level an id means a layer's input, which is the index itself. In ``eagle_config`` it mostly means a
    layer's output, one further (SpecForge, SGLang), but some write inputs there as well.
    """
    top = _layer_ids(config.get(LAYER_IDS), where)
    nested = _layer_ids(_eagle_config(config).get(LAYER_IDS), where)
    if top is None and nested is None:
        return (default_feature_layers(target.num_layers),)
    if top is not None:
        choices = [top]
    else:
        ids = nested or ()
        choices = [tuple(layer + 1 for layer in ids), ids]
    possible = tuple(ids for ids in choices if all(0 <= layer <= target.num_layers for layer in ids))
    if not possible:
        raise refused(
            where, f"trained on layers {list(top or nested or ())}, but the target has {target.num_layers} layers"
        )
    return possible


def _layer_ids(value: Any, where: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(layer) is int for layer in value):
        raise ConfigError(f"draft checkpoint {where}: {LAYER_IDS} is {value!r}, expected a list of layer numbers.")
    return tuple(value)


def _check_num_layers(layer_config: Mapping[str, Any], tensors: Mapping[str, Shaped], where: str) -> None:
    """Compares the numbers of layers before any layer is built."""
    stated = layer_config.get("num_hidden_layers", 1)
    stored = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    if stated != stored:
        raise refused(
            where, f"a head of {stated} layers according to its config.json, but has tensors of {stored} layers"
        )


def _check_num_features(
    tensors: Mapping[str, Shaped], target: TargetShape, expected: int, where: str, in_file: FileNames
) -> None:
    fc = tensors.get("fc.weight")
    if fc is None or fc.ndim != 2 or fc.shape[1] == expected * target.hidden_size:
        return  # other errors are reported when names and shapes are compared
    found = fc.shape[1] / target.hidden_size
    raise refused(
        where,
        f"a head for {found:g} features of {target.hidden_size} numbers ({in_file('fc.weight')} is {list(fc.shape)}), "
        f"but its config names {expected} layers of the target",
    )


def _draft_vocabulary(
    config: Mapping[str, Any], tensors: Mapping[str, Shaped], target: TargetShape, where: str, lm_head_name: str
) -> tuple[int, bool]:
    """Size of the draft vocabulary, and whether the head has an lm_head of its own."""
    stated = config.get("draft_vocab_size")
    lm_head = tensors.get("lm_head.weight")
    if lm_head is not None and lm_head.ndim != 2:
        raise refused(where, f"damaged: {lm_head_name} is {list(lm_head.shape)}")
    size = stated if stated is not None else target.vocab_size if lm_head is None else int(lm_head.shape[0])
    if type(size) is not int or not 0 < size <= target.vocab_size:
        raise ConfigError(
            f"draft checkpoint {where}: draft_vocab_size is {stated!r}, expected a number of tokens up to the "
            f"target's {target.vocab_size}."
        )
    if lm_head is not None:
        same(where, lm_head_name, "rows", int(lm_head.shape[0]), size, "its config")
    return size, lm_head is not None or size < target.vocab_size


def _eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("eagle_config")
    return nested if isinstance(nested, Mapping) else {}


def flag(config: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    """A switch of the config; a value in ``eagle_config`` overrides the one at the top level.

    Raises:
        ConfigError: it is neither true nor false.
    """
    value = _eagle_config(config).get(name, config.get(name))
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"draft checkpoint {where}: {name} is {value!r}, expected true or false.")
    return value


def same(where: str, what: str, unit: str, found: object, expected: int, whose: str = "the target") -> None:
    """Raises :class:`UnsupportedModelError` unless ``found`` equals what ``whose`` has."""
    if found != expected:
        raise UnsupportedModelError(
            f"draft checkpoint {where}: {what} of {found} {unit}".rstrip() + f", but {whose} has {expected}. "
            "Use a head that was trained for this model."
        )


def refused(where: str, why: str) -> UnsupportedModelError:
    """The error for a checkpoint of a kind that baton cannot use."""
    return UnsupportedModelError(f"draft checkpoint {where} is {why}.")

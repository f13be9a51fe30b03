"""Loads and saves EAGLE heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from baton.core.errors import UnsupportedModelError
from baton.engine.draft.checkpoint import check_tensors, read_tensors, write_tensors
from baton.engine.draft.checkpoint_files import CONFIG_NAME, find_checkpoint, read_config
from baton.engine.draft.eagle.eagle_formats import read_settings
from baton.engine.draft.eagle.eagle_layout import canonical_names, default_feature_layers, format_of
from baton.engine.draft.eagle.head import EagleHead, EagleSettings
from baton.engine.draft.loaded_target import shape_of
from baton.engine.draft.target_shape import TargetShape
from baton.engine.draft.tensor_names import FileNames, eagle_file_names


def load_eagle(reference: str | Path, target: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> EagleHead:
    """Loads an EAGLE-1, EAGLE-2 or EAGLE-3 head in any supported format.

    Args:
        reference: a folder or a hub id.
        target: the model that the head drafts for; its embedding and lm_head are used where the head has none.
        dtype: dtype of the head's weights and computation.

    Raises:
        ConfigError: the checkpoint is missing or broken.
        UnsupportedModelError: it is another kind of draft, or one for another target; the message says what differs.
    """
    folder = find_checkpoint(reference)
    where = str(reference)
    config = read_config(folder)
    stored = read_tensors(folder)
    tensors, in_file = canonical_names(stored), eagle_file_names(stored)
    kind = format_of(config, tensors, where)
    settings, choices = read_settings(config, tensors, shape_of(target), kind, where, in_file)
    mask = tensors.pop("t2d", None)
    if not settings.maps_vocabulary:
        tensors.pop("d2t", None)
    with torch.device("meta"):
        head = EagleHead(settings, target)
    check_tensors(head.state_dict(), tensors, where, kind, in_file)
    if settings.maps_vocabulary:
        _check_vocabulary_map(tensors["d2t"], mask, settings, where, in_file)
    head.load_state_dict({name: _cast(tensor, dtype) for name, tensor in tensors.items()}, assign=True)
    head.feature_layer_choices = choices
    return head.to(device).eval().requires_grad_(False)


@torch.inference_mode()
def settle_feature_layers(
    head: EagleHead, hidden_states: Mapping[int, torch.Tensor], token_ids: torch.Tensor, target_choices: torch.Tensor
) -> dict[tuple[int, ...], float]:
    """Determines the meaning of a checkpoint's layer ids by trial, where its format is ambiguous.

    The head gets the reading with which it agrees most often with the target. About 200 tokens suffice.

    Args:
        head: its ``feature_layers`` become the best of its ``feature_layer_choices``, the first of equals.
        hidden_states: by layer as in ``feature_layers``, each ``[num_tokens, target_hidden_size]``, of one sequence.
        token_ids: the sequence, int64 ``[num_tokens]``.
        target_choices: the target's likeliest token after each of them, int64 ``[num_tokens]``.

    Returns:
        The share of agreement by reading.
    """
    found = {}
    for choice in head.feature_layer_choices:
        features = torch.cat([hidden_states[layer] for layer in choice], dim=-1)
        found[choice] = top1_agreement(head, features, token_ids, target_choices)
    head.feature_layers = max(found, key=lambda choice: found[choice])
    return found


@torch.inference_mode()
def top1_agreement(
    head: EagleHead, features: torch.Tensor, token_ids: torch.Tensor, target_choices: torch.Tensor
) -> float:
    """Share of positions where the head's first guess is the target's choice, over a sequence of at least two tokens.

    Args:
        features: ``[num_tokens, num_features * target_hidden_size]``
    """
    positions = torch.arange(len(token_ids) - 1, device=token_ids.device)
    _, hidden = head(token_ids[1:], head.fuse(features[:-1].to(head.dtype)), positions)
    guesses = head.to_target_ids(head.logits(hidden).argmax(dim=-1))
    return float((guesses == target_choices[1:]).float().mean())


def save_eagle3(head: EagleHead, folder: Path, target_name: str) -> None:
    """Writes ``config.json`` and ``model.safetensors`` in the flat format of SafeAILab, SpecForge and SGLang.

    vLLM reads it too. Layer ids are omitted when they are the usual ones, since servers read them differently;
    otherwise they are written as inputs at the top level (vLLM) and as outputs in ``eagle_config`` (SGLang).

    Args:
        folder: created if missing; files of an earlier checkpoint in it are replaced.
        target_name: the target's name in the config, a hub id for example.

    Raises:
        UnsupportedModelError: the format cannot express this head.
    """
    settings = head.settings
    if settings.version != 3 or settings.layers.qk_norm:
        raise UnsupportedModelError("only EAGLE-3 heads with Llama's layer can be written in the common format.")
    tensors = {_common_name(name): tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    ids = torch.arange(settings.draft_vocab_size)
    if settings.own_lm_head:
        target_ids = ids + tensors.setdefault("d2t", torch.zeros_like(ids))
        tensors["t2d"] = torch.zeros(settings.target.vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = _common_config(head, target_name)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_vocabulary_map(
    d2t: torch.Tensor, mask: torch.Tensor | None, settings: EagleSettings, where: str, in_file: FileNames
) -> None:
    """Raises :class:`UnsupportedModelError` unless the draft ids map to distinct tokens of the target."""
    size = settings.target.vocab_size
    ids_name, mask_name = in_file("d2t"), in_file("t2d")
    problem = None
    target_ids = d2t.long() + torch.arange(len(d2t))
    if bool(((target_ids < 0) | (target_ids >= size)).any()):
        problem = f"{ids_name} maps to ids outside the target's vocabulary of {size}"
    elif len(set(target_ids.tolist())) != len(target_ids):
        problem = f"{ids_name} maps several draft ids to one target id"
    elif mask is not None and tuple(mask.shape) != (size,):
        problem = f"{mask_name} has the shape {list(mask.shape)}, but the target has {size} tokens"
    elif mask is not None and not (bool(mask[target_ids].all()) and int(mask.bool().sum()) == len(target_ids)):
        problem = f"{ids_name} and {mask_name} name different tokens"
    if problem is not None:
        raise UnsupportedModelError(f"draft checkpoint {where}: {problem}.")


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor.to(torch.int64)


def _common_name(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _common_config(head: EagleHead, target_name: str) -> dict[str, Any]:
    settings, layers = head.settings, head.settings.layers
    rope = dict(layers.rope)
    theta = rope.pop("rope_theta")
    eagle_config: dict[str, Any] = {"use_aux_hidden_state": settings.has_fc}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "base_model_name_or_path": target_name,
        "vocab_size": settings.target.vocab_size,
        "draft_vocab_size": settings.draft_vocab_size if settings.own_lm_head else None,
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": layers.num_layers,
        "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads,
        "head_dim": layers.head_dim,
        "hidden_act": layers.hidden_act,
        "rms_norm_eps": layers.rms_norm_eps,
        "max_position_embeddings": layers.max_positions,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "attention_bias": layers.qkv_bias,
        "mlp_bias": layers.mlp_bias,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
        "norm_before_fc": settings.norm_before_fc,
        "fc_norm": settings.fc_norm,
        "norm_before_residual": settings.norm_before_residual,
        "norm_output": settings.norm_output,
        "eagle_config": eagle_config,
    }
    if layers.hidden_size != settings.target.hidden_size:
        config["target_hidden_size"] = settings.target.hidden_size
    if any(layers.windows):
        config["sliding_window"] = next(window for window in layers.windows if window)
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in layers.windows]
    if settings.has_fc and head.feature_layers != _usual_layers(settings.target):
        config["eagle_aux_hidden_state_layer_ids"] = list(head.feature_layers)
        eagle_config["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in head.feature_layers]
    return config


def _usual_layers(target: TargetShape) -> tuple[int, ...] | None:
    try:
        return default_feature_layers(target.num_layers)
    except UnsupportedModelError:
        return None

"""A new draft model: a small Llama with the target's vocabulary, initialised from the target as far as sizes allow."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from baton.core.errors import ConfigError
from baton.engine.batch.hidden_states import find_decoder_layers
from baton.engine.models.model_loader import LoadedModel
from baton.train.settings import DraftModelSettings

# The settings that determine a layer's computation, besides its weights.
_LAYER_SETTINGS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "rope_parameters",
)


def draft_config(settings: DraftModelSettings, target: LoadedModel) -> LlamaConfig:
    """The configuration of the draft.

    Raises:
        ConfigError: the sizes are inconsistent, or the draft would not be smaller than its target.
    """
    config: Any = target.model.config.get_text_config(decoder=True)
    own_hidden = int(config.hidden_size)
    own_heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or own_hidden // own_heads)
    hidden = settings.hidden_size or own_hidden
    if hidden == own_hidden and settings.num_layers >= config.num_hidden_layers:
        raise ConfigError(
            f"training: num_layers is {settings.num_layers}, but the target itself has {config.num_hidden_layers} of "
            "the same width. Expected fewer, or a smaller hidden_size."
        )
    num_heads = settings.num_heads or (own_heads if hidden == own_hidden else max(1, hidden // head_dim))
    own_kv_heads = int(getattr(config, "num_key_value_heads", None) or own_heads)
    num_kv_heads = settings.num_kv_heads or max(1, num_heads * own_kv_heads // own_heads)
    if num_heads % num_kv_heads:
        if settings.num_kv_heads:
            raise ConfigError(f"training: num_kv_heads is {num_kv_heads}, which does not divide {num_heads} heads.")
        num_kv_heads = num_heads
    inner = int(getattr(config, "intermediate_size", None) or 4 * own_hidden)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    is_usable = "rope_type" in rope and _is_llama(target.model)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=settings.intermediate_size or max(8, inner * hidden // own_hidden // 8 * 8),
        num_hidden_layers=settings.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_act="silu",
        max_position_embeddings=target.max_model_len,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        rope_parameters=rope if is_usable else {"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=hidden != own_hidden or _ties(target.model),
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


@torch.no_grad()
def initial_draft(settings: DraftModelSettings, target: LoadedModel) -> tuple[LlamaForCausalLM, tuple[int, ...]]:
    """Creates a float32 draft on the target's device. The weights to be trained require gradients.

    Returns:
        The draft, and the target's layers that were copied into it; empty if its layers are random.

    Raises:
        ConfigError: see :func:`draft_config`.
    """
    config = draft_config(settings, target)
    model: Any = target.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        draft: Any = LlamaForCausalLM(config).float()
    draft.requires_grad_(True)
    if config.hidden_size == model.config.get_text_config(decoder=True).hidden_size:
        draft.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight)
        draft.lm_head.weight.copy_(model.get_output_embeddings().weight)
        draft.get_input_embeddings().requires_grad_(settings.train_embedding)
        draft.lm_head.requires_grad_(settings.train_embedding)
    elif config.hidden_size < model.get_input_embeddings().weight.shape[1]:
        embedding = model.get_input_embeddings().weight
        draft.get_input_embeddings().weight.copy_(_main_components(embedding, config.hidden_size))
    layers = _layers_to_copy(config, model)
    sources: Any = find_decoder_layers(model)
    for layer, index in zip(draft.model.layers, layers, strict=False):
        layer.load_state_dict(sources[index].state_dict())
    if layers:
        draft.model.norm.load_state_dict(model.get_decoder().norm.state_dict())
    return draft.to(model.device), layers


def _main_components(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Each row in the ``size`` directions that keep most of all rows; float32 ``[num_rows, size]``."""
    full = rows.float()
    directions: torch.Tensor = torch.linalg.eigh(full.T @ full).eigenvectors[:, -size:]
    return full @ directions


def _layers_to_copy(config: LlamaConfig, target: PreTrainedModel) -> tuple[int, ...]:
    """Evenly spaced layers of the target, from the first to the last; empty if they differ in kind or size."""
    theirs: Any = target.config.get_text_config(decoder=True)
    if not _is_llama(target) or any(getattr(config, name) != getattr(theirs, name) for name in _LAYER_SETTINGS):
        return ()
    last = theirs.num_hidden_layers - 1
    gaps = max(1, config.num_hidden_layers - 1)
    return tuple(round(index * last / gaps) for index in range(config.num_hidden_layers))


def _is_llama(target: PreTrainedModel) -> bool:
    return getattr(target.config.get_text_config(decoder=True), "model_type", "") == "llama"


def _ties(target: PreTrainedModel) -> bool:
    embedding: Any = target.get_input_embeddings()
    output: Any = target.get_output_embeddings()
    return bool(embedding.weight.data_ptr() == output.weight.data_ptr())

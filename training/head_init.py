"""A new EAGLE-3.1 head that starts from what the target knows.

The head works in the space of the target's normed final hidden state ``n``: that is what the lm_head reads, and with
``norm_output`` also what the head is fed from its second step on. So

* ``fc`` starts as the linear map from the features to ``n`` that fits best (ridge regression on some samples),
* the decoder layer starts as the target's last one with that norm folded in: it reads ``n`` as the target's layer reads
  its residual stream, and what it adds is scaled to match,
* the half of attention that sees the embedding starts near zero, and the lm_head as the target's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.draft.eagle import EagleHead, EagleSettings, TargetShape
from engine.draft.eagle_formats import default_feature_layers
from engine.draft.layers import LayerSettings
from engine.feature_tap import find_decoder_layers
from training.settings import Eagle3Settings
from training.target import SampleStates
from training.vocabulary import offsets_of

# Their decoder layer is the head's, and their norm multiplies by its weight alone.
_LAYERS_TO_COPY = ("llama", "mistral", "qwen2")
_EMBEDDING_SCALE = 0.1
_INITIAL_STD = 0.02
_RIDGE = 1e-2


def head_settings(target: PreTrainedModel, settings: Eagle3Settings, num_draft_tokens: int) -> EagleSettings:
    """An EAGLE-3.1 head of one layer as wide as the target.

    Args:
        num_draft_tokens: size of the draft vocabulary.

    Raises:
        UnsupportedModelError: the target is too shallow, and ``feature_layers`` are not given.
    """
    shape = TargetShape.of(target)
    return EagleSettings(
        version=3,
        layers=_layer_settings(target.config.get_text_config(decoder=True), shape, settings.num_kv_heads),
        target=shape,
        feature_layers=settings.feature_layers or default_feature_layers(shape.num_layers),
        draft_vocab_size=num_draft_tokens,
        fc_norm=True,
        norm_output=True,
        maps_vocabulary=num_draft_tokens < shape.vocab_size,
    )


def initial_head(
    settings: EagleSettings,
    target: PreTrainedModel,
    target_ids: torch.Tensor,
    states: Sequence[SampleStates],
    seed: int,
) -> EagleHead:
    """A float32 head on the CPU.

    Args:
        target_ids: the draft vocabulary, int64 ``[draft_vocab_size]``.
        states: of some thousand tokens, to fit ``fc`` on.
    """
    generator = torch.Generator().manual_seed(seed)
    head = EagleHead(settings, target).float()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, _INITIAL_STD, generator=generator)
        if settings.maps_vocabulary:
            head.d2t.copy_(offsets_of(target_ids))
        output: Any = target.get_output_embeddings()
        head.lm_head.weight.copy_(output.weight[target_ids.to(output.weight.device)])
        scale = _fit_features(head, states)
        head.norm.weight.fill_(scale)
        if getattr(target.config.get_text_config(decoder=True), "model_type", "") in _LAYERS_TO_COPY:
            _copy_layer(head, target, states, scale)
    return head


def _layer_settings(config: Any, shape: TargetShape, num_kv_heads: int | None) -> LayerSettings:
    num_heads = int(config.num_attention_heads)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type") != "default":
        rope = {"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))}
    return LayerSettings(
        hidden_size=shape.hidden_size,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * shape.hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(config, "head_dim", None) or shape.hidden_size // num_heads),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        hidden_act="silu",
        rope=rope,
        max_positions=int(config.max_position_embeddings),
        windows=(None,),
    )


def _fit_features(head: EagleHead, states: Sequence[SampleStates]) -> float:
    """Fits ``fc`` to the final hidden state. Returns its root mean square, which becomes the head's own scale."""
    features = torch.cat([state.features[-len(state.final) :] for state in states]).float().cpu()
    final = torch.cat([state.final for state in states]).float().cpu()
    chunks = features.chunk(len(head.fc_norm), dim=-1)
    normed = torch.cat([norm(chunk) for norm, chunk in zip(head.fc_norm, chunks, strict=True)], dim=-1)
    gram = normed.T @ normed
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    head.fc.weight.copy_(torch.linalg.solve(gram, normed.T @ final).T)
    return float(final.square().mean().sqrt())


def _copy_layer(head: EagleHead, target: PreTrainedModel, states: Sequence[SampleStates], scale: float) -> None:
    source: Any = find_decoder_layers(target)[-1]
    decoder: Any = target.get_decoder()
    size = head.settings.layers.hidden_size
    final_norm = decoder.norm.weight.float().cpu()
    # The target's layer reads residual / rms * its norm's weight, where n = residual / rms * final_norm.
    unfold = 1.0 / torch.where(final_norm.abs() > 1e-3, final_norm, torch.ones_like(final_norm))
    features = torch.cat([state.features[:, -size:] for state in states]).float()
    # What the layer adds to the residual stream changes n by as much, divided by the stream's level.
    fold = final_norm / features.square().mean(dim=-1).sqrt().median().cpu()
    layer: Any = head.layers[0]
    level = scale * float(unfold.square().mean().sqrt())
    layer.hidden_norm.weight.copy_(source.input_layernorm.weight.cpu() * unfold * scale / max(level, 1.0) * 1.0)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight.cpu() * unfold * scale)
    for name in ("gate_proj", "up_proj", "down_proj"):
        ours, theirs = getattr(layer.mlp, name).weight, getattr(source.mlp, name).weight.float().cpu()
        if ours.shape == theirs.shape:
            ours.copy_(theirs * fold[:, None] if name == "down_proj" else theirs)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        ours, theirs = getattr(layer.self_attn, name).weight, getattr(source.self_attn, name).weight.float().cpu()
        if name == "o_proj" and ours.shape == theirs.shape:
            ours.copy_(theirs * fold[:, None])
        elif name != "o_proj" and ours.shape[0] % theirs.shape[0] == 0:
            dim, copies = head.settings.layers.head_dim, ours.shape[0] // theirs.shape[0]
            ours[:, size:].copy_(theirs.view(-1, dim, size).repeat_interleave(copies, dim=0).reshape(-1, size))
            ours[:, :size].mul_(_EMBEDDING_SCALE)

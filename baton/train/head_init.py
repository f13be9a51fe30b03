"""Creates an EAGLE-3.1 head that starts as a linear model of its target; see :mod:`baton.train.linear_start`.

* One query head of each key head attends to its own row: it and its key project the row's embedding in the same way.
  Its values and its part of the output projection come from the fit. The other query heads are free to learn from the
  context.
* The input weights of the feed-forward are those of the target's last layer; its output is 0 at first.
* The lm_head is the target's, scaled down a little, because a guess is less certain than the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from baton.core.errors import ConfigError
from baton.engine.batch.hidden_states import find_decoder_layers
from baton.engine.draft.eagle.eagle_layout import default_feature_layers
from baton.engine.draft.eagle.head import EagleHead, EagleSettings
from baton.engine.draft.layers import LayerSettings
from baton.engine.draft.loaded_target import shape_of
from baton.engine.draft.target_shape import TargetShape
from baton.train.batches import num_rows_of
from baton.train.dataset import Sample
from baton.train.linear_start import LowRankMap, Regression, low_rank, mean_square
from baton.train.settings import Eagle3Settings
from baton.train.target import SampleStates
from baton.train.vocabulary import offsets_of

# Architectures whose feed-forward is like the head's, and whose norm only multiplies by its weight.
_LAYERS_TO_COPY = ("llama", "mistral", "qwen2", "qwen3")
_INITIAL_STD = 0.02
# Attention score of a row with itself, before the softmax; scores of other rows are around 0.
_SELF_SCORE = 12.0
_MIN_NORM = 0.05


def head_settings(target: PreTrainedModel, settings: Eagle3Settings, num_draft_tokens: int) -> EagleSettings:
    """The settings of an EAGLE-3.1 head with one layer, as wide as the target.

    Args:
        num_draft_tokens: size of the draft vocabulary.

    Raises:
        ConfigError: ``num_kv_heads`` does not divide the number of heads.
        UnsupportedModelError: the target is too shallow and ``feature_layers`` are not given.
    """
    shape = shape_of(target)
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


@torch.no_grad()
def initial_head(
    settings: EagleSettings,
    target: PreTrainedModel,
    target_ids: torch.Tensor,
    samples: Sequence[Sample],
    states: Sequence[SampleStates],
    seed: int,
) -> EagleHead:
    """Creates a float32 head on the CPU.

    Args:
        target_ids: the draft vocabulary, int64 ``[draft_vocab_size]``.
        samples: samples for the fit; some ten thousand tokens are enough.
        states: the target's states of these samples.
    """
    generator = torch.Generator().manual_seed(seed)
    head = EagleHead(settings, target).float()
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, _INITIAL_STD, generator=generator)
    if settings.maps_vocabulary:
        head.d2t.copy_(offsets_of(target_ids))
    output: Any = target.get_output_embeddings()
    head.lm_head.weight.copy_(output.weight[target_ids.to(output.weight.device)])
    scale = mean_square(state.final for state in states) ** 0.5
    head.norm.weight.fill_(scale)
    _fit_fc(head, samples, states)
    _fit_layer(head, target, samples, states, scale, generator)
    if getattr(target.config.get_text_config(decoder=True), "model_type", "") in _LAYERS_TO_COPY:
        _copy_feed_forward(head, target, scale)
    layer: Any = head.layers[0]
    layer.mlp.down_proj.weight.zero_()
    return head


def with_rows(head: EagleHead, target: PreTrainedModel, draft_ids: torch.Tensor) -> EagleHead:
    """A copy of a head whose draft vocabulary consists of some of its ids.

    Args:
        draft_ids: the head's ids that are kept, int64 ``[size]``.
    """
    maps = head.settings.maps_vocabulary or len(draft_ids) < head.draft_vocab_size
    settings = replace(head.settings, draft_vocab_size=len(draft_ids), maps_vocabulary=maps)
    state = dict(head.state_dict())
    state["lm_head.weight"] = head.lm_head.weight[draft_ids]
    if maps:
        state["d2t"] = offsets_of(head.to_target_ids(draft_ids))
    copied = EagleHead(settings, target).float()
    copied.load_state_dict(state)
    return copied


def _layer_settings(config: Any, shape: TargetShape, num_kv_heads: int | None) -> LayerSettings:
    num_heads = int(config.num_attention_heads)
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ConfigError(
            f"training: num_kv_heads is {num_kv_heads}, which does not divide the {num_heads} attention heads of the "
            "target."
        )
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


def _fit_fc(head: EagleHead, samples: Sequence[Sample], states: Sequence[SampleStates]) -> None:
    fitted = Regression(head.fc.in_features, head.fc.out_features)
    for sample, state in zip(samples, states, strict=True):
        count = num_rows_of(sample)
        features = _predicting(state.features, sample).float().cpu()
        chunks = features.chunk(len(head.fc_norm), dim=-1)
        normed = [norm(chunk) for norm, chunk in zip(head.fc_norm, chunks, strict=True)]
        fitted.add(torch.cat(normed, dim=-1), state.final[:count].float().cpu())
    head.fc.weight.copy_(fitted.solve().T)


def _fit_layer(
    head: EagleHead,
    target: PreTrainedModel,
    samples: Sequence[Sample],
    states: Sequence[SampleStates],
    scale: float,
    generator: torch.Generator,
) -> None:
    """Fits the attention to add the difference between a token's state and the next one's."""
    layer: Any = head.layers[0]
    embeddings: Any = target.get_input_embeddings()
    size = head.settings.layers.hidden_size
    fitted = Regression(2 * size, size)
    level = 0.0
    for sample, state in zip(samples, states, strict=True):
        inputs, hidden = _layer_inputs(head, embeddings.weight, sample, state)
        fitted.add(inputs, state.final[1 : len(hidden) + 1].float().cpu() - hidden)
    found = low_rank(fitted, min(_num_self_heads(head) * head.settings.layers.head_dim, size), head.lm_head.weight)
    for sample, state in zip(samples, states, strict=True):
        inputs, hidden = _layer_inputs(head, embeddings.weight, sample, state)
        level += float((hidden + inputs @ found.values.T @ found.outputs.T).square().mean()) * len(hidden)
    _attend_to_self(head, layer.self_attn, found, generator)
    # The final norm rescales the guess, which shrinks towards the mean, to the level of true states.
    head.lm_head.weight.mul_(min(1.0, (level / max(1, fitted.num_rows)) ** 0.5 / scale))


def _layer_inputs(
    head: EagleHead, embeddings: torch.Tensor, sample: Sample, state: SampleStates
) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of the layer's attention in the first step, and its residual stream."""
    layer: Any = head.layers[0]
    hidden = head.fuse(_predicting(state.features, sample).float().cpu())
    first = max(1, sample.num_prompt_tokens)
    token_ids = torch.tensor(sample.token_ids[first : first + len(hidden)], dtype=torch.int64)
    embeds = embedding(token_ids.to(embeddings.device), embeddings).float().cpu()
    inputs: torch.Tensor = layer.fuse(embeds, hidden)[0]
    return inputs, hidden


def _predicting(features: torch.Tensor, sample: Sample) -> torch.Tensor:
    """The features of the predicting rows; see :mod:`baton.train.batches`."""
    first = max(0, sample.num_prompt_tokens - 1)
    return features[first : first + num_rows_of(sample)]


def _self_heads(head: EagleHead) -> list[tuple[int, int]]:
    """The query heads that attend to their own row, each with its key head."""
    layers = head.settings.layers
    num_groups = layers.num_heads // layers.num_kv_heads
    if num_groups > 1:
        return [(index * num_groups, index) for index in range(layers.num_kv_heads)]
    return [(index, index) for index in range(0, layers.num_kv_heads, 2)]  # the others stay free


def _num_self_heads(head: EagleHead) -> int:
    return len(_self_heads(head))


def _attend_to_self(head: EagleHead, attention: Any, found: LowRankMap, generator: torch.Generator) -> None:
    layers = head.settings.layers
    size, dim = layers.hidden_size, layers.head_dim
    # Embeddings are normed, so projections on dim orthonormal vectors have a squared length of about dim.
    strength = (_SELF_SCORE * dim**-0.5) ** 0.5
    for number, (query_head, key_head) in enumerate(_self_heads(head)):
        rows = slice(number * dim, min((number + 1) * dim, len(found.values)))
        length = max(0, rows.stop - rows.start)
        basis = torch.linalg.qr(torch.randn(size, min(dim, size), generator=generator)).Q.T * strength
        query = attention.q_proj.weight[query_head * dim : (query_head + 1) * dim]
        key = attention.k_proj.weight[key_head * dim : (key_head + 1) * dim]
        for weight in (query, key):
            weight.zero_()
            weight[: len(basis), :size].copy_(basis)
        attention.v_proj.weight[key_head * dim : key_head * dim + length].copy_(found.values[rows])
        columns = attention.o_proj.weight[:, query_head * dim : (query_head + 1) * dim]
        columns.zero_()
        columns[:, :length].copy_(found.outputs[:, rows])


def _copy_feed_forward(head: EagleHead, target: PreTrainedModel, scale: float) -> None:
    """Copies the input weights of the target's last feed-forward."""
    source: Any = find_decoder_layers(target)[-1]
    decoder: Any = target.get_decoder()
    layer: Any = head.layers[0]
    final_norm = decoder.norm.weight.float().cpu()
    # The target's layer reads residual / rms * its own norm's weight, and n = residual / rms * final_norm.
    unfold = scale / final_norm.abs().clamp_min(_MIN_NORM * scale) * final_norm.sign()
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight.cpu() * unfold)
    for name in ("gate_proj", "up_proj"):
        ours, theirs = getattr(layer.mlp, name).weight, getattr(source.mlp, name).weight
        if ours.shape == theirs.shape:
            ours.copy_(theirs)

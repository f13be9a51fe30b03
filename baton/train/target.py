"""The frozen target: its states over its own answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from baton.train.dataset import Sample

_TOKENS_PER_FORWARD = 1024  # larger batches exceed the CPU's cache
_CHOICES_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class SampleStates:
    """The target's states over one sample.

    Attributes:
        features: concatenated hidden states of the chosen layers, ``[num_tokens, num_layers * hidden_size]``.
        final: the hidden states after the final norm, at the last prompt position and the answer's positions,
            ``[num_answer_tokens + 1, hidden_size]``.
        choices: the likeliest next token after each row of ``final``, int64 ``[num_answer_tokens + 1]``.
    """

    features: torch.Tensor
    final: torch.Tensor
    choices: torch.Tensor


class FrozenTarget:
    """Runs the target over whole samples.

    Args:
        model: a causal language model of transformers; its attention is set to the ordinary implementation.
        feature_layers: indices into transformers' ``hidden_states``; empty if only the last state is needed.
    """

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.feature_layers = tuple(feature_layers)
        use_fast_attention(model)
        self._decoder: Any = model.get_decoder()
        self._lm_head: Any = model.get_output_embeddings()

    @torch.no_grad()
    def states_of(self, samples: Sequence[Sample]) -> list[SampleStates]:
        """The states of ``samples``, in order. Samples are batched by length, so that there is little padding."""
        found: dict[int, SampleStates] = {}
        for indices in batches_by_length([len(sample.token_ids) for sample in samples]):
            batch = [samples[index] for index in indices]
            found.update(zip(indices, self._run(batch), strict=True))
        return [found[index] for index in range(len(samples))]

    def _run(self, samples: Sequence[Sample]) -> list[SampleStates]:
        token_ids, wants_features = padded(samples).to(self.model.device), bool(self.feature_layers)
        output = self._decoder(input_ids=token_ids, output_hidden_states=wants_features, use_cache=False)
        states = []
        for row, sample in enumerate(samples):
            end = len(sample.token_ids)
            final = output.last_hidden_state[row, max(0, sample.num_prompt_tokens - 1) : end]
            features = final.new_zeros(end, 0)
            if wants_features:
                features = torch.cat([output.hidden_states[layer][row, :end] for layer in self.feature_layers], dim=-1)
            states.append(SampleStates(features, final, self._choices(final)))
        return states

    def _choices(self, final: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._lm_head(part).max(dim=-1).indices for part in torch.split(final, _CHOICES_AT_ONCE)])


def use_fast_attention(model: PreTrainedModel) -> None:
    """Selects the fastest of transformers' own attention implementations for whole samples."""
    # On CPUs, plain matrix products are faster than the fused kernel at the length of an answer.
    is_fused = model.device.type != "cpu" and getattr(model, "_supports_sdpa", False)
    model.set_attn_implementation("sdpa" if is_fused else "eager")


def padded(samples: Sequence[Sample]) -> torch.Tensor:
    """Token ids ``[num_samples, longest]``, padded at the end, to which causal attention does not attend."""
    token_ids = torch.zeros(len(samples), max(len(sample.token_ids) for sample in samples), dtype=torch.int64)
    for row, sample in enumerate(samples):
        token_ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
    return token_ids


def batches_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Groups indices by similar length into batches that fit into the CPU's cache."""
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[index] > _TOKENS_PER_FORWARD:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch

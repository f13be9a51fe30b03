"""Settles what a checkpoint's layer ids mean, where its format leaves that open, by trying."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton.engine.draft.eagle.head import EagleHead


@torch.inference_mode()
def settle_feature_layers(
    head: EagleHead, hidden_states: Mapping[int, torch.Tensor], token_ids: torch.Tensor, target_choices: torch.Tensor
) -> dict[tuple[int, ...], float]:
    """Gives the head the reading under which it agrees most often with the target. Some 200 tokens tell.

    Args:
        head: its ``feature_layers`` become the best of its ``feature_layer_choices``; the first wins a tie.
        hidden_states: by layer as in ``feature_layers``, each ``[num_tokens, target_hidden_size]``, of one sequence.
        token_ids: the sequence, int64 ``[num_tokens]``.
        target_choices: the token that the target finds likeliest behind each of them, int64 ``[num_tokens]``.

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
    """How often the head's first guess is the target's own choice, over one sequence of at least two tokens.

    Args:
        features: ``[num_tokens, num_features * target_hidden_size]``
    """
    positions = torch.arange(len(token_ids) - 1, device=token_ids.device)
    _, hidden = head(token_ids[1:], head.fuse(features[:-1].to(head.dtype)), positions)
    guesses = head.to_target_ids(head.logits(hidden).argmax(dim=-1))
    return float((guesses == target_choices[1:]).float().mean())

"""Cross entropy of the draft's logits against the target's distribution, without storing all logits.

Each chunk of rows passes through the lm_head, its loss and its gradients at once, so that it stays in the CPU's cache
and the backward pass has nothing left to compute (the idea of Liger Kernel's fused linear cross entropy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """The distributions that rows should predict.

    Attributes:
        probs: the target's distributions over the draft vocabulary, ``[num_targets, draft_vocab_size]``.
        indices: index into ``probs`` for each row, int64 ``[num_rows]``.
        weights: weight of each row's loss, float32 ``[num_rows]``.
    """

    probs: torch.Tensor
    indices: torch.Tensor
    weights: torch.Tensor


class _LinearSoftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, lm_head: torch.Tensor, targets: SoftTargets, tv_weight: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_gradients, learns_lm_head = any(ctx.needs_input_grad), ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden)
        grad_lm_head = torch.zeros_like(lm_head if learns_lm_head else lm_head[:0], dtype=torch.float32)
        choices = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), _ROWS_AT_ONCE):
            span = slice(start, start + _ROWS_AT_ONCE)
            rows = hidden[span]
            logits = (rows @ lm_head.T).float()
            choices[span] = logits.argmax(dim=-1)
            wanted = targets.probs[targets.indices[span]]
            loss, grad = _loss_and_gradient(logits, wanted.float(), tv_weight)
            weights = targets.weights[span]
            total += (loss * weights).sum()
            if not needs_gradients:
                continue
            grad = grad.mul_(weights[:, None]).to(rows.dtype)
            grad_hidden[span] = grad @ lm_head
            if learns_lm_head:
                grad_lm_head += grad.T @ rows
        ctx.save_for_backward(grad_hidden, grad_lm_head.to(lm_head.dtype))
        ctx.mark_non_differentiable(choices)
        return total, choices

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        grad_hidden, grad_lm_head = ctx.saved_tensors
        return grad_hidden * grads[0], grad_lm_head * grads[0] if ctx.needs_input_grad[1] else None, None, None


def soft_loss(
    hidden: torch.Tensor, lm_head: torch.Tensor, targets: SoftTargets, tv_weight: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum over rows of ``(1 - tv_weight) * cross entropy + tv_weight * total variation``.

    Total variation is the probability that a sampled draft is rejected, so it determines acceptance directly (LK
    losses); cross entropy has better gradients far from the optimum.

    Args:
        hidden: ``[num_rows, hidden_size]``
        lm_head: ``[draft_vocab_size, hidden_size]``

    Returns:
        The loss, and the draft's first choice in each row, int64 ``[num_rows]``.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _LinearSoftLoss.apply(hidden, lm_head, targets, tv_weight)  # type: ignore[no-untyped-call]
    return found


def _loss_and_gradient(
    logits: torch.Tensor, wanted: torch.Tensor, tv_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, and its gradient with respect to the logits. May overwrite both arguments."""
    log_probs = logits.log_softmax(dim=-1)
    loss = -torch.linalg.vecdot(wanted, log_probs)
    probs = log_probs.exp_()
    if tv_weight == 0.0:
        return loss, probs.sub_(wanted)
    excess = (probs > wanted).float()
    variation = ((probs - wanted) * excess).sum(dim=-1)
    # d/dz of sum(max(q - p, 0)) is q * (excess - sum(q * excess))
    variation_grad = probs * (excess - torch.linalg.vecdot(probs, excess)[:, None])
    grad = probs.sub_(wanted).mul_(1.0 - tv_weight).add_(variation_grad, alpha=tv_weight)
    return (1.0 - tv_weight) * loss + tv_weight * variation, grad

"""The hand-written gradients are those of the plain formula."""

from __future__ import annotations

import pytest
import torch

from baton.train.soft_loss import SoftTargets, soft_loss


@pytest.mark.parametrize("tv_weight", [0.0, 0.3, 1.0])
def test_gradients_match_autograd(tv_weight: float) -> None:
    torch.manual_seed(0)
    num_rows, size, vocab = 600, 12, 50  # more rows than one chunk
    probs = (torch.randn(40, vocab, dtype=torch.float64) * 2).softmax(dim=-1)
    indices = torch.randint(0, 40, (num_rows,))
    weights = torch.rand(num_rows, dtype=torch.float32)
    plain = [torch.randn(num_rows, size, dtype=torch.float64), torch.randn(vocab, size, dtype=torch.float64)]
    ours = [tensor.float().requires_grad_() for tensor in plain]
    theirs = [tensor.clone().requires_grad_() for tensor in plain]

    logits = theirs[0] @ theirs[1].T
    wanted = probs[indices]
    cross_entropy = -(wanted * logits.log_softmax(dim=-1)).sum(dim=-1)
    variation = (logits.softmax(dim=-1) - wanted).abs().sum(dim=-1) / 2
    expected = ((1 - tv_weight) * cross_entropy + tv_weight * variation) @ weights.double()
    expected.backward()
    found, choices = soft_loss(*ours, SoftTargets(probs.float(), indices, weights), tv_weight)
    (2 * found).backward()

    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(choices, logits.argmax(dim=-1))
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(mine.grad.double(), 2 * reference.grad, rtol=1e-4, atol=1e-4)


def test_the_lowest_possible_loss_is_the_entropy() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1]])
    hidden, lm_head = probs.log(), torch.eye(3)
    loss, choices = soft_loss(hidden, lm_head, SoftTargets(probs, torch.tensor([0]), torch.ones(1)))
    assert float(loss) == pytest.approx(float(-(probs * probs.log()).sum()), rel=1e-5)
    assert choices.tolist() == [0]

"""Chooses tokens. Noise is counter-based: a function of the request's seed and the token's position alone, so that a
seeded request draws the same noise whatever it is batched with, wherever it runs and whether or not it speculates.

What may still differ is the logits themselves: kernels sum in another order for another batch shape. In float32 that
is some 1e-6 and almost never shows; in bfloat16 a near tie can fall the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.logits import SamplingRow, process_logits
from engine.request import TokenLogprobs

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014, figure 16)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 53 random bits.

    Args:
        seed: of the request.
        position: of the token in its sequence.
        stream: keeps draws for different purposes at one position independent.
    """
    state = _mix((seed + _GOLDEN_GAMMA) & _MASK)
    state = _mix((state ^ _mix((position + 1) * _GOLDEN_GAMMA & _MASK)) & _MASK)
    if stream:
        state = _mix((state + stream * _GOLDEN_GAMMA) & _MASK)
    return (state >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A row's outcome; ``token_id`` is None when the logits were not numbers."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """One token per row.

    Args:
        logits: float32 ``[num_rows, vocab_size]``, straight from the model.
        rows: one per row.
    """
    if not rows:
        return []
    processed = process_logits(logits, rows)
    best, choice = processed.max(dim=-1)
    sampled = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if sampled:
        probs = torch.softmax(processed[sampled], dim=-1, dtype=torch.float64)
        choice[sampled] = draw(probs, [uniform(rows[index].params.seed, rows[index].position) for index in sampled])
    valid = torch.isfinite(best).tolist()
    token_ids = choice.tolist()
    logprobs = logprobs_at(logits, rows, token_ids)
    return [
        SampledToken(token if ok else None, logprobs.get(index))
        for index, (token, ok) in enumerate(zip(token_ids, valid, strict=True))
    ]


def probabilities(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """What :func:`sample` draws from, for rows that are not greedy.

    Args:
        logits: float32 ``[num_rows, vocab_size]``, straight from the model.
        rows: one per row.

    Returns:
        Float64 ``[num_rows, vocab_size]``; all 0 where the logits were not numbers.
    """
    processed = process_logits(logits, rows)
    valid = torch.isfinite(processed.amax(dim=-1, keepdim=True))
    return torch.softmax(processed, dim=-1, dtype=torch.float64).masked_fill(~valid, 0)


def draw(probs: torch.Tensor, noise: Sequence[float]) -> torch.Tensor:
    """Inverse transform sampling; a token of probability 0 is never drawn.

    Args:
        probs: float64 ``[num_rows, vocab_size]``; need not sum to 1.
        noise: in [0, 1), one per row.

    Returns:
        Token ids, int64 ``[num_rows]``.
    """
    cumulative = probs.cumsum(dim=-1)
    fractions = torch.tensor(noise, dtype=torch.float64, device=probs.device).unsqueeze(-1)
    choice = torch.searchsorted(cumulative, fractions * cumulative[:, -1:], right=True)
    # Rounding may land behind the last token that has any probability.
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return torch.minimum(choice, last).squeeze(-1)


def logprobs_at(
    logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """Log probabilities of chosen tokens, by row, for the rows that ask for any.

    Args:
        logits: float32 ``[num_rows, vocab_size]``, straight from the model.
        rows, token_ids: one per row.
    """
    wanted = [(index, row.params.logprobs) for index, row in enumerate(rows) if row.params.logprobs is not None]
    found: dict[int, TokenLogprobs] = {}
    for index, count in wanted:
        log_probs = torch.log_softmax(logits[index], dim=-1)
        top: tuple[tuple[int, float], ...] = ()
        if count:
            values, tokens = torch.topk(log_probs, min(count, log_probs.shape[-1]))
            top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        found[index] = TokenLogprobs(float(log_probs[token_ids[index]]), top)
    return found

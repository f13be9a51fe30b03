"""Samples tokens. Noise is counter-based, a function of the request's seed and the token's position only: a seeded
request draws the same noise in any batch, on any worker, with or without speculation.

Only the logits may still differ: kernels sum in another order for another batch shape. In float32 the difference is
about 1e-6 and almost never visible; in bfloat16 a near tie can change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.core.request import TokenLogprobs
from baton.engine.device.downloads import Download, is_on_host
from baton.engine.device.uploads import upload, upload_ints
from baton.engine.sampling.logits import SamplingRow, process_logits

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_BLOCK = 256


def _mix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014, figure 16)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 53 random bits.

    Args:
        seed: seed of the request.
        position: position of the token in its sequence.
        stream: makes draws for different purposes at one position independent.
    """
    state = _mix((seed + _GOLDEN_GAMMA) & _MASK)
    state = _mix((state ^ _mix((position + 1) * _GOLDEN_GAMMA & _MASK)) & _MASK)
    if stream:
        state = _mix((state + stream * _GOLDEN_GAMMA) & _MASK)
    return (state >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Outcome of a row; ``token_id`` is ``None`` when the logits were not finite."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


class QueuedSample:
    """One token per row, chosen on the device and in flight to the host.

    Args:
        token_ids: int64 ``[num_rows]``, on the device.
        is_valid: bool ``[num_rows]``, whether the row's logits were finite.
        logprobs: by row, for the rows that ask for any.
    """

    def __init__(
        self, token_ids: torch.Tensor, is_valid: torch.Tensor, logprobs: Mapping[int, _QueuedLogprobs]
    ) -> None:
        self.token_ids = token_ids
        self._outcome = Download(torch.stack((is_valid.long(), token_ids)))
        self._logprobs = logprobs

    def read(self) -> list[SampledToken]:
        """Returns the tokens. The only place where a step waits for the device."""
        valid, token_ids = self._outcome.read().tolist()
        logprobs = {index: queued.read() for index, queued in self._logprobs.items()}
        return [
            SampledToken(token if ok else None, logprobs.get(index))
            for index, (token, ok) in enumerate(zip(token_ids, valid, strict=True))
        ]


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Samples one token per row.

    Args:
        logits: float32 ``[num_rows, vocab_size]``, unprocessed.
        rows: one per row.
    """
    return queue_sample(logits, rows).read()


def queue_sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> QueuedSample:
    """Like :func:`sample`, without waiting. Work that is queued afterwards may overwrite the logits."""
    if not rows:
        nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
        return QueuedSample(nothing, nothing, {})
    processed = process_logits(logits, rows)
    sampled = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if len(sampled) == len(rows):
        choice, is_valid = _draw_rows(processed, rows)
    else:
        best, choice = _largest(processed)
        is_valid = torch.isfinite(best)
        if sampled:
            places = upload_ints(sampled, logits.device)
            drawn, can_draw = _draw_rows(processed.index_select(0, places), [rows[index] for index in sampled])
            choice.index_copy_(0, places, drawn)
            is_valid.index_copy_(0, places, can_draw)
    return QueuedSample(choice, is_valid, _queue_logprobs(logits, rows, choice))


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's highest logit, or NaN if it has one, and its column; of equals the first."""
    if not is_on_host(logits):
        best, choice = logits.max(dim=-1)
        return best, choice
    choice = torch.from_numpy(logits.numpy().argmax(axis=-1))  # a tenth of the time that torch takes
    return logits.gather(1, choice[:, None])[:, 0], choice


def _draw_rows(processed: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of rows that are not greedy, int64 ``[num_rows]``, and whether each row's logits were finite."""
    probs = torch.softmax(processed, dim=-1)  # float32 is as precise as the logits, at half the memory of float64
    is_valid = torch.isfinite(probs[:, 0])  # one bad logit makes its whole row NaN
    if not is_on_host(probs) or not bool(is_valid.all()):  # on a device, the check would cost more than the repair
        probs = torch.nan_to_num(probs)
    return draw(probs, [uniform(row.params.seed, row.position) for row in rows]), is_valid


def probabilities(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The distribution that :func:`sample` draws from, up to float32's rounding, for rows that are not greedy.

    Args:
        logits: float32 ``[num_rows, vocab_size]``, unprocessed.
        rows: one per row.

    Returns:
        Float64 ``[num_rows, vocab_size]``; all 0 where the logits were not finite.
    """
    processed = process_logits(logits, rows)
    valid = torch.isfinite(processed.amax(dim=-1, keepdim=True))
    return torch.softmax(processed, dim=-1, dtype=torch.float64).masked_fill(~valid, 0)


def draw(probs: torch.Tensor, noise: Sequence[float]) -> torch.Tensor:
    """Inverse transform sampling; a token of probability 0 is never drawn.

    The cumulative sum has two levels, sums of blocks and the tokens of one block, so that only a few numbers of each
    row need float64.

    Args:
        probs: floats ``[num_rows, vocab_size]``; need not sum to 1.
        noise: in [0, 1), one per row.

    Returns:
        Token ids, int64 ``[num_rows]``.
    """
    num_rows, vocab_size = probs.shape
    num_whole = vocab_size // _BLOCK
    whole = probs[:, : num_whole * _BLOCK].reshape(num_rows, num_whole, _BLOCK)
    sums = whole.sum(dim=-1, dtype=torch.float64)
    if vocab_size % _BLOCK:
        rest = probs[:, num_whole * _BLOCK :].sum(dim=-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat((sums, rest), dim=-1)
    cumulative = sums.cumsum(dim=-1)
    fractions = upload(np.array(noise, dtype=np.float64), probs.device).unsqueeze(-1)
    wanted = fractions * cumulative[:, -1:]
    block = _first_beyond(cumulative, sums, wanted)
    tokens = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(-1, tokens.clamp_max(vocab_size - 1)).double().masked_fill(tokens >= vocab_size, 0)
    left = wanted - (cumulative - sums).gather(-1, block)
    return (block * _BLOCK + _first_beyond(inside.cumsum(dim=-1), inside, left)).squeeze(-1)


def _first_beyond(cumulative: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Index of the first sum above ``wanted``, ``[num_rows, 1]``; never one of weight 0, whatever the rounding."""
    places = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(dim=-1, keepdim=True)
    index = torch.minimum(torch.searchsorted(cumulative, wanted, right=True), last)
    # A difference of sums may round to below 0, and the first place may have weight 0.
    first = torch.where(weights > 0, places, weights.shape[-1]).amin(dim=-1, keepdim=True)
    return torch.maximum(index, torch.minimum(first, last))


def logprobs_at(
    logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """Log probabilities of chosen tokens, by row, for the rows that ask for any.

    Args:
        logits: float32 ``[num_rows, vocab_size]``, unprocessed.
        rows, token_ids: one per row.
    """
    queued = _queue_logprobs(logits, rows, upload_ints(token_ids, logits.device))
    return {index: logprobs.read() for index, logprobs in queued.items()}


class _QueuedLogprobs:
    """Log probabilities of one row: the chosen token's, then those of the ``count`` likeliest tokens."""

    def __init__(self, log_probs: torch.Tensor, token_id: torch.Tensor, count: int) -> None:
        values, self._tokens = log_probs.index_select(0, token_id), None
        if count:
            top, tokens = torch.topk(log_probs, min(count, log_probs.shape[-1]))
            values, self._tokens = torch.cat((values, top)), Download(tokens)
        self._values = Download(values)

    def read(self) -> TokenLogprobs:
        own, *top = self._values.read().tolist()
        tokens = [] if self._tokens is None else self._tokens.read().tolist()
        return TokenLogprobs(own, tuple(zip(tokens, top, strict=True)))


def _queue_logprobs(
    logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: torch.Tensor
) -> dict[int, _QueuedLogprobs]:
    return {
        index: _QueuedLogprobs(torch.log_softmax(logits[index], dim=-1), token_ids[index : index + 1], count)
        for index, row in enumerate(rows)
        if (count := row.params.logprobs) is not None
    }

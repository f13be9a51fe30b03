"""The one place where logits are processed. Plain decoding and verification call the same function, row by row.

Order: logit bias → min_tokens → penalties → temperature → top-k → top-p → min-p. Each later filter sees the
distribution that the earlier ones left, as transformers' warpers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.request import SamplingParams
from engine.uploads import upload, upload_ints

_NEG_INF = float("-inf")
_LEAST_TEMPERATURE = 1e-30
# Where these hold enough probability, top-p needs no sorted vocabulary.
_LIKELY_TOKENS = (256, 4096)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits needs to know of its sequence.

    Attributes:
        position: index in the sequence of the token that the row chooses.
        prompt_token_ids, output_token_ids: everything before that token; for a draft's row, the accepted path to it.
        forbidden: tokens that must not come while fewer than ``min_tokens`` are out.
    """

    params: SamplingParams
    position: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    forbidden: frozenset[int] = frozenset()


def process_logits(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Applies every row's parameters.

    Args:
        logits: float32 ``[num_rows, vocab_size]``; not changed.
        rows: one per row.

    Returns:
        Float32 ``[num_rows, vocab_size]``; the tokens that may not be chosen are ``-inf``. Greedy rows are not scaled.
    """
    edited = [index for index, row in enumerate(rows) if _is_edited(row)]
    if edited:
        logits = logits.clone()
    for index in edited:
        _bias_and_penalise(logits[index], rows[index])
    sampled = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if len(sampled) == len(rows):
        return _filter(logits, [row.params for row in rows]) if rows else logits
    if sampled:
        if not edited:
            logits = logits.clone()
        logits[sampled] = _filter(logits[sampled], [rows[index].params for index in sampled])
    return logits


def _is_edited(row: SamplingRow) -> bool:
    """Whether single tokens' logits change, which greedy rows feel as well."""
    return row.params.needs_penalties or bool(row.params.logit_bias) or _holds_back(row)


def _holds_back(row: SamplingRow) -> bool:
    return bool(row.forbidden) and len(row.output_token_ids) < row.params.min_tokens


def _bias_and_penalise(logits: torch.Tensor, row: SamplingRow) -> None:
    """In place on one row ``[vocab_size]``."""
    params = row.params
    for token, bias in params.logit_bias:
        logits[token] += bias
    if _holds_back(row):
        logits[upload_ints(list(row.forbidden), logits.device)] = _NEG_INF
    if not params.needs_penalties:
        return
    output = torch.tensor(list(row.output_token_ids), dtype=torch.int64, device=logits.device)
    if params.repetition_penalty != 1:
        prompt = torch.tensor(list(row.prompt_token_ids), dtype=torch.int64, device=logits.device)
        seen = torch.unique(torch.cat([prompt, output]))
        scores = logits[seen]
        logits[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if output.numel() and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = torch.unique(output, return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)


def _filter(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, top-k, top-p and min-p on rows that are sampled."""
    names = ("temperature", "top_p", "min_p")
    settings = upload(np.array([[getattr(p, name) for p in params] for name in names]), logits.device).to(logits.dtype)
    column = dict(zip(names, settings.unsqueeze(-1), strict=True))
    # A temperature that float32 cannot divide by means the likeliest token, not infinity.
    logits = logits / column["temperature"].clamp_min(_LEAST_TEMPERATURE)
    vocab_size = logits.shape[-1]
    limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    if min(limits) < vocab_size:
        logits = _keep_top_k(logits, limits)
    if any(p.top_p < 1 for p in params):
        logits = _keep_top_p(logits, column["top_p"])
    if any(p.min_p > 0 for p in params):
        probs = torch.softmax(logits, dim=-1)
        floor = probs.amax(dim=-1, keepdim=True) * column["min_p"]
        logits = logits.masked_fill(probs < floor, _NEG_INF)
    return logits


def _keep_top_k(logits: torch.Tensor, limits: list[int]) -> torch.Tensor:
    """Tokens as likely as the k-th one stay too, so that the result does not depend on the order of ties."""
    largest = max(limit for limit in limits if limit < logits.shape[-1])
    top = torch.topk(logits, largest, dim=-1).values
    ranks = upload(np.array([[min(limit, largest) - 1] for limit in limits]), logits.device)
    threshold = top.gather(-1, ranks)
    unlimited = upload(np.array([[limit == logits.shape[-1]] for limit in limits]), logits.device)
    return logits.masked_fill((logits < threshold) & ~unlimited, _NEG_INF)


def _keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest set of most likely tokens whose probability reaches ``top_p``; at least one, of equals the first.

    Sorting a whole vocabulary costs more than everything else in sampling, and few rows need it.
    """
    vocab_size = logits.shape[-1]
    total = logits.logsumexp(dim=-1, keepdim=True)
    for count in (*(count for count in _LIKELY_TOKENS if count < vocab_size), vocab_size):
        top = torch.topk(logits, count, dim=-1).values
        reached = torch.exp(top - total).cumsum(dim=-1)
        if count == vocab_size or bool(((reached[:, -1:] >= top_p) | (top_p >= 1)).all()):
            break
    num_kept = 1 + (reached[:, :-1] < top_p).sum(dim=-1, keepdim=True)
    threshold = top.gather(-1, num_kept - 1)
    kept, equal = logits > threshold, logits == threshold
    num_equal_kept = num_kept - kept.sum(dim=-1, keepdim=True)
    if bool((equal.sum(dim=-1, keepdim=True) > num_equal_kept).any()):
        equal &= equal.cumsum(dim=-1) <= num_equal_kept
    return logits.masked_fill(~(kept | equal | (top_p >= 1)), _NEG_INF)

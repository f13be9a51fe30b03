"""Processes logits. Plain decoding and verification call the same function, row by row.

Order: logit bias → min_tokens → penalties → grammar → temperature → top-k → top-p → min-p. Each later filter sees the
distribution that the earlier ones left, as in transformers' warpers.

Nothing here waits for a device: the rows alone determine the work. On the CPU, where reading a value is free, values
may be read to skip work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from baton.core.request import SamplingParams
from baton.core.token_edits import TokenEdits
from baton.engine.device.downloads import is_on_host
from baton.engine.device.uploads import upload, upload_ints

_NEG_INF = float("-inf")
_MIN_TEMPERATURE = 1e-30
# If these hold enough probability, top-p needs no sorted vocabulary.
_LIKELY_TOKENS = (256, 4096)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Sampling state of the sequence of one row of logits.

    Attributes:
        position: index in the sequence of the token that the row chooses.
        prompt_token_ids, output_token_ids: all tokens before that token; for a draft's row, including the path to it.
        edits: what the parameters do to single tokens.
        allowed: the tokens that a grammar allows, as bits (:meth:`TokenGrammar.allowed`); ``None`` allows all.
    """

    params: SamplingParams
    position: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    edits: TokenEdits
    allowed: npt.NDArray[np.int32] | None = field(default=None, compare=False)


def process_logits(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Applies every row's parameters.

    Args:
        logits: float32 ``[num_rows, vocab_size]``; not changed.
        rows: one per row.

    Returns:
            Float32 ``[num_rows, vocab_size]``; excluded tokens are ``-inf``. Greedy rows are not scaled.
    """
    is_edited = any(_is_edited(row) for row in rows)
    if is_edited:
        logits = logits.clone()
        _add_biases(logits, rows)
        _hold_back(logits, rows)
        _penalise(logits, rows)
        _keep_allowed(logits, rows)
    sampled = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if len(sampled) == len(rows):
        return _filter(logits, [row.params for row in rows]) if rows else logits
    if sampled:
        if not is_edited:
            logits = logits.clone()
        places = upload_ints(sampled, logits.device)
        filtered = _filter(logits.index_select(0, places), [rows[index].params for index in sampled])
        logits.index_copy_(0, places, filtered)
    return logits


def _is_edited(row: SamplingRow) -> bool:
    """Whether single tokens' logits change, which affects greedy rows too."""
    has_edits = row.params.needs_penalties or len(row.edits.bias_ids) > 0 or _is_held_back(row)
    return has_edits or row.allowed is not None


def _is_held_back(row: SamplingRow) -> bool:
    return len(row.edits.held_back_ids) > 0 and len(row.output_token_ids) < row.params.min_tokens


def _add_biases(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Adds the biases in place."""
    biased = [(index, row.edits.bias_ids) for index, row in enumerate(rows) if len(row.edits.bias_ids)]
    if biased:
        values = np.concatenate([rows[index].edits.biases for index, _ in biased])
        added = upload(values, logits.device).to(logits.dtype)
        logits.index_put_(_places(biased, logits.device), added, accumulate=True)


def _hold_back(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    held = [(index, row.edits.held_back_ids) for index, row in enumerate(rows) if _is_held_back(row)]
    if held:
        logits.index_put_(_places(held, logits.device), logits.new_full((), _NEG_INF))


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Applies penalties in place. Tokens are counted on the host; on a device, the count's size would need a wait."""
    penalised = [(index, _penalties(row)) for index, row in enumerate(rows) if row.params.needs_penalties]
    if not penalised:
        return
    places = _places([(index, penalties.token_ids) for index, penalties in penalised], logits.device)
    factors = np.concatenate([penalties.factors for _, penalties in penalised])
    amounts = np.concatenate([penalties.amounts for _, penalties in penalised])
    factor, amount = upload(np.stack([factors, amounts]), logits.device).to(logits.dtype).unbind()
    scores = logits[places]
    logits.index_put_(places, torch.where(scores > 0, scores / factor, scores * factor) - amount)


def _keep_allowed(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Excludes what the rows' grammars do not allow, in place."""
    masks = {index: row.allowed for index, row in enumerate(rows) if row.allowed is not None}
    if not masks:
        return
    if is_on_host(logits):
        values = logits.numpy()
        for index, words in masks.items():
            values[index] += _addends_of_bytes().take(words.view(np.uint8), axis=0).ravel()[: logits.shape[-1]]
        return
    packed = np.stack(list(masks.values())).view(np.uint8).astype(np.int64)
    addends = (
        upload(_addends_of_bytes(), logits.device)
        .to(logits.dtype)
        .index_select(0, upload(packed.ravel(), logits.device))
    )
    addends = addends.view(len(masks), -1)[:, : logits.shape[-1]]
    logits.index_add_(0, upload_ints(list(masks), logits.device), addends)


@cache
def _addends_of_bytes() -> npt.NDArray[np.float32]:
    """0 for each bit that is set in a byte and -inf for the others, ``[256, 8]``: adding takes a tenth of the time of
    selecting."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(0), np.float32(_NEG_INF))


@dataclass(frozen=True, slots=True)
class _Penalties:
    """Penalties of one row, for each distinct earlier token.

    Attributes:
        token_ids: int64, without duplicates.
        factors: positive logits are divided by them, negative ones multiplied.
        amounts: subtracted afterwards.
    """

    token_ids: npt.NDArray[np.int64]
    factors: npt.NDArray[np.float32]
    amounts: npt.NDArray[np.float32]


def _penalties(row: SamplingRow) -> _Penalties:
    """Repetition counts prompt and output; presence and frequency count only the output."""
    params = row.params
    output = np.array(row.output_token_ids, dtype=np.int64)
    prompt = np.array(row.prompt_token_ids if params.repetition_penalty != 1 else (), dtype=np.int64)
    token_ids, places = np.unique(np.concatenate((prompt, output)), return_inverse=True)
    counts = np.bincount(places[len(prompt) :], minlength=len(token_ids)).astype(np.float32)
    amounts = np.where(counts > 0, params.presence_penalty + np.float32(params.frequency_penalty) * counts, 0)
    factors = np.full(len(token_ids), params.repetition_penalty, dtype=np.float32)
    return _Penalties(token_ids, factors, amounts.astype(np.float32))


def _places(
    tokens_of_rows: Sequence[tuple[int, npt.NDArray[np.int64]]], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Index of matrix elements: of each row, the columns of its tokens."""
    indices = np.concatenate([np.full(len(tokens), index) for index, tokens in tokens_of_rows])
    columns = np.concatenate([tokens for _, tokens in tokens_of_rows])
    return upload(np.stack((indices, columns)), device).unbind()


def _filter(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Applies temperature, top-k, top-p and min-p to rows that are sampled."""
    names = ("temperature", "top_p", "min_p")
    settings = upload(np.array([[getattr(p, name) for p in params] for name in names]), logits.device).to(logits.dtype)
    column = dict(zip(names, settings.unsqueeze(-1), strict=True))
    # A temperature too small for a float32 division means the likeliest token, not infinity.
    logits = logits / column["temperature"].clamp_min(_MIN_TEMPERATURE)
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
    """Keeps the k likeliest tokens, and ties with the k-th one, so that the result does not depend on their order."""
    largest = max(limit for limit in limits if limit < logits.shape[-1])
    top = torch.topk(logits, largest, dim=-1).values
    ranks = upload(np.array([[min(limit, largest) - 1] for limit in limits]), logits.device)
    threshold = top.gather(-1, ranks)
    unlimited = upload(np.array([[limit == logits.shape[-1]] for limit in limits]), logits.device)
    return logits.masked_fill((logits < threshold) & ~unlimited, _NEG_INF)


def _keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the smallest set of likeliest tokens whose probability reaches ``top_p``; of equals, the first ones.

    Sorting a whole vocabulary costs more than everything else in sampling, and few rows need it; on a device it costs
    less than waiting to find out.
    """
    may_look = is_on_host(logits)
    vocab_size = logits.shape[-1]
    total = logits.logsumexp(dim=-1, keepdim=True)
    counts = [count for count in _LIKELY_TOKENS if count < vocab_size] if may_look else []
    for count in (*counts, vocab_size):
        top = torch.topk(logits, count, dim=-1).values
        reached = torch.exp(top - total).cumsum(dim=-1)
        if count == vocab_size or bool(((reached[:, -1:] >= top_p) | (top_p >= 1)).all()):
            break
    num_kept = 1 + (reached[:, :-1] < top_p).sum(dim=-1, keepdim=True)
    threshold = top.gather(-1, num_kept - 1)
    kept, equal = logits > threshold, logits == threshold
    num_equal_kept = num_kept - kept.sum(dim=-1, keepdim=True)
    if not may_look or bool((equal.sum(dim=-1, keepdim=True) > num_equal_kept).any()):
        equal &= equal.cumsum(dim=-1) <= num_equal_kept
    return logits.masked_fill(~(kept | equal | (top_p >= 1)), _NEG_INF)

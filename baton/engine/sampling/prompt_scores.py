"""Log probabilities of prompts, from the rows of logits that a step computed for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton.core.drafts import ScheduledSequence
from baton.core.prompt_logprobs import PromptLogprobs
from baton.engine.batch.batch import ForwardBatch
from baton.engine.device.downloads import Download
from baton.engine.device.uploads import upload_ints

_ROWS_AT_ONCE = 32  # bounds the temporary tensors, which are as large as the rows of logits


class QueuedScores:
    """Log probabilities of a step's prompts, in flight to the host.

    Args:
        parts: requests' next entries, with where they begin.
    """

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    def read(self) -> None:
        """Waits for the numbers and writes them into :attr:`Request.prompt_logprobs`."""
        for part in self._parts:
            part.read()


class _Part:
    """The next log probabilities of one request.

    Args:
        logits: float32 ``[num_rows, vocab_size]``; row i predicts the token after the i-th one of the sequence.
    """

    def __init__(self, sequence: ScheduledSequence, logits: torch.Tensor) -> None:
        self._request = request = sequence.request
        self._start = start = request.num_computed_tokens
        num_top = 0 if request.prompt_logprobs is None else request.prompt_logprobs.num_top
        targets = upload_ints(request.tokens_between(start + 1, start + 1 + len(logits)), logits.device)
        pieces = [
            _score(rows, own, num_top)
            for rows, own in zip(torch.split(logits, _ROWS_AT_ONCE), torch.split(targets, _ROWS_AT_ONCE), strict=True)
        ]
        values, tokens = zip(*pieces, strict=True)
        self._values, self._tokens = Download(torch.cat(values)), Download(torch.cat(tokens))

    def read(self) -> None:
        values, tokens = self._values.read().numpy(), self._tokens.read().numpy().astype(np.int32)
        if self._request.prompt_logprobs is not None:
            part = PromptLogprobs(values[:, 0], tokens[:, 0], tokens[:, 1:], values[:, 1:])
            self._request.prompt_logprobs.put(self._start, part)


def queue_scores(batch: ForwardBatch, logits: torch.Tensor) -> QueuedScores:
    """Queues the log probabilities on the device. Work that is queued afterwards may overwrite the logits.

    Call before the scheduler advances the batch's requests.

    Args:
        logits: float32 ``[batch.num_prompt_rows, vocab_size]``.
    """
    if not batch.prompt_rows:
        return QueuedScores(())
    parts = torch.split(logits, [count for _, count in batch.prompt_rows])
    return QueuedScores([_Part(sequence, rows) for (sequence, _), rows in zip(batch.prompt_rows, parts, strict=True)])


def _score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities of each row's token and of the likeliest ones, and the token's rank beside their ids.

    Returns:
        Float32 and int64, both ``[num_rows, 1 + num_top]``.
    """
    own = logits.gather(-1, token_ids[:, None])
    ranks = 1 + (logits > own).sum(dim=-1, keepdim=True)
    top, top_ids = torch.topk(logits, num_top, dim=-1)
    values = torch.cat((own, top), dim=-1) - logits.logsumexp(dim=-1, keepdim=True)
    return values, torch.cat((ranks, top_ids), dim=-1)

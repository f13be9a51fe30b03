"""Samples each sequence's new tokens from a step's logits, without drafts. The decode role injects the verifier for
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.core.drafts import ScheduledSequence
from baton.core.request import Request, TokenLogprobs
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.sampling.logits import SamplingRow
from baton.engine.sampling.sampler import QueuedSample, SampledToken, queue_sample


def sampling_row(request: Request, drafts: Sequence[int] = ()) -> SamplingRow:
    """The sampling row after the request's known tokens and then the drafted tokens ``drafts``."""
    return SamplingRow(
        params=request.params,
        position=request.num_tokens + len(drafts),
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=[*request.output_token_ids, *drafts] if drafts else request.output_token_ids,
        edits=request.edits,
        allowed=request.grammar.allowed(request.output_token_ids, drafts) if request.grammar else None,
    )


class ChosenTokens:
    """A step's tokens without drafts, chosen on the device and in flight to the host.

    Attributes:
        sequences: the sequences that get one token each.
        token_ids: int64 ``[num_sequences]``, on the device.
    """

    def __init__(self, sequences: Sequence[ScheduledSequence], queued: QueuedSample) -> None:
        self.sequences = sequences
        self.token_ids = queued.token_ids
        self._queued = queued

    def read(self) -> list[VerifyResult]:
        """Waits for the step, even without any tokens, but not for work queued after it; returns the results."""
        return [
            VerifyResult(sequence, (), token.token_id, logprobs=logprobs_of([token]))
            for sequence, token in zip(self.sequences, self._queued.read(), strict=True)
        ]


def choose_tokens(batch: ForwardBatch, logits: torch.Tensor) -> ChosenTokens:
    """Samples a step without drafts, as all verifiers do, once its logits are queued."""
    ready = [sequence for sequence, rows in zip(batch.sequences, batch.rows_of, strict=True) if len(rows)]
    return ChosenTokens(ready, queue_sample(logits, [sampling_row(sequence.request) for sequence in ready]))


class PlainSampling:
    """Verification without drafts: every row is sampled and yields the next token."""

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        return choose_tokens(batch, logits).read()


def logprobs_of(tokens: Sequence[SampledToken]) -> tuple[TokenLogprobs, ...] | None:
    """The tokens' log probabilities, or ``None`` when the request did not ask for any."""
    found = tuple(token.logprobs for token in tokens if token.logprobs is not None)
    return found or None

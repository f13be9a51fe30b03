"""Which drafts the target accepts. The target's own token is what comes out, always.

Sample-and-match: at every position of a chain the target draws its token with the noise that plain decoding would use
there, keyed by (seed, position). While the draws equal the drafts, the next row is valid as well; the first draw that
differs is the recovered token, and after a full match the last draw is the bonus token. With equal logits a
request therefore gets the same tokens with and without speculation. (In float32 they are equal but for some 1e-6; in
half precision the logits of a row depend a little on how many rows there are, so that near ties can fall otherwise.)
With zero drafts this is plain decoding.
"""

from __future__ import annotations

import torch

from engine.batch import ForwardBatch
from engine.sampler import SampledToken, sample
from engine.scheduler import ScheduledSequence
from engine.verification import VerifyResult, logprobs_of, sampling_row


class SampleAndMatch:
    """Implements :class:`engine.verification.Verifier` for chains of drafts."""

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        """Draws a token on every row in one call, then compares chain by chain."""
        verified = [(s, rows) for s, rows in zip(batch.sequences, batch.rows_of, strict=True) if len(rows)]
        rows = [
            sampling_row(sequence.request, sequence.draft_token_ids[:depth])
            for sequence, logit_rows in verified
            for depth in range(len(logit_rows))
        ]
        drawn = sample(logits, rows)
        return [_match(sequence, drawn[rows.start : rows.stop]) for sequence, rows in verified]


def _match(sequence: ScheduledSequence, drawn: list[SampledToken]) -> VerifyResult:
    drafts = sequence.draft_token_ids
    num_accepted = 0
    while num_accepted < len(drafts) and drawn[num_accepted].token_id == drafts[num_accepted]:
        num_accepted += 1
    return VerifyResult(
        sequence=sequence,
        accepted=drafts[:num_accepted],
        next_token=drawn[num_accepted].token_id,
        num_drafted=len(drafts),
        logprobs=logprobs_of(drawn[: num_accepted + 1]),
    )

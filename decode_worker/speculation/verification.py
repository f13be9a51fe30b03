"""Which drafts the target accepts. The target's own token is what comes out, always.

Sample-and-match: at every node of a draft the target draws its token with the noise that plain decoding would use
there, keyed by (seed, position). While a draw equals a child of the node, that child's row is valid as well; the first
draw that differs is the recovered token, and at a leaf the draw is the bonus token. With equal logits a
request therefore gets the same tokens with and without speculation. (In float32 they are equal but for some 1e-6; in
half precision the logits of a row depend a little on how many rows there are, so that near ties can fall otherwise.)
With zero drafts this is plain decoding.
"""

from __future__ import annotations

import torch

from engine.batch import ForwardBatch
from engine.drafts import ROOT
from engine.logits import SamplingRow
from engine.sampler import SampledToken, sample
from engine.scheduler import ScheduledSequence
from engine.verification import VerifyResult, logprobs_of, sampling_row


class SampleAndMatch:
    """Implements :class:`engine.verification.Verifier`."""

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        """Draws a token on every row in one call, then follows the draws through each draft."""
        verified = [(s, rows) for s, rows in zip(batch.sequences, batch.rows_of, strict=True) if len(rows)]
        drawn = sample(logits, [row for sequence, _ in verified for row in sampling_rows(sequence)])
        return [_match(sequence, drawn[rows.start : rows.stop]) for sequence, rows in verified]


def sampling_rows(sequence: ScheduledSequence) -> list[SamplingRow]:
    """What is behind each of a sequence's rows of logits: its last known token, then every node's own ancestors."""
    draft = sequence.draft
    paths = [[draft.token_ids[index] for index in draft.path(node)] for node in range(len(draft))]
    return [sampling_row(sequence.request, path) for path in [[], *paths]]


def _match(sequence: ScheduledSequence, drawn: list[SampledToken]) -> VerifyResult:
    """Goes from the root to the child that was drawn, as long as there is one."""
    draft = sequence.draft
    children: dict[tuple[int, int | None], int] = {
        (draft.parent(node), token): node for node, token in enumerate(draft.token_ids)
    }
    path: list[int] = []
    node = ROOT
    while (child := children.get((node, drawn[node + 1].token_id))) is not None:
        path.append(child)
        node = child
    return VerifyResult(
        sequence=sequence,
        accepted=tuple(draft.token_ids[index] for index in path),
        next_token=drawn[node + 1].token_id,
        nodes=tuple(path),
        logprobs=logprobs_of([drawn[index + 1] for index in (ROOT, *path)]),
    )

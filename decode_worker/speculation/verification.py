"""Which drafts the target accepts.

Sample-and-match is the default. At every node of a draft the target draws its token with the noise that plain decoding
would use there, keyed by (seed, position). While a draw equals a child of the node, that child's row is valid as well;
the first draw that differs is the recovered token, and at a leaf the draw is the bonus token. The output is always the
target's own token: with equal logits a request gets the same tokens with and without speculation. (In float32 logits
differ by about 1e-6; in half precision the logits of a row depend a little on the number of rows, so that near ties can
fall otherwise.) With zero drafts this is plain decoding.

For sampled requests the rules of ``acceptance_rules.py`` accept more, of drawn drafts or of plausible tokens.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence

import torch

from baton.core.drafts import ROOT, ScheduledSequence
from baton.core.errors import ConfigError
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import Verifier, VerifyResult
from baton.engine.device.uploads import take_rows
from baton.engine.sampling.logits import SamplingRow
from baton.engine.sampling.sampler import SampledToken, logprobs_at, probabilities, sample
from baton.engine.sampling.verification import logprobs_of, sampling_row
from decode_worker.speculation.acceptance_rules import AcceptanceRule, ResidualRule, TypicalRule

logger = logging.getLogger(__name__)

MATCH = "match"
RESIDUAL = "residual"
TYPICAL = "typical"
ACCEPTANCES = (MATCH, RESIDUAL, TYPICAL)


class SampleAndMatch:
    """Implements :class:`baton.engine.contracts.Verifier`."""

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        """Draws a token on every row in one call, then follows the draws through each draft."""
        return _match(_with_rows(batch), logits)


class RuleVerifier:
    """Implements ``Verifier``: a rule where it applies, sample-and-match everywhere else.

    Greedy requests always match, and so do drafts that the rule cannot judge. A rule decides on the host, which waits
    for the device at each decision.

    Args:
        rule: for the drafts of sampled requests.
    """

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule = rule

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        """All rows of either kind are processed in one call; results come in the batch's order."""
        judged: list[tuple[ScheduledSequence, range]] = []
        matched: list[tuple[ScheduledSequence, range]] = []
        for sequence, rows in _with_rows(batch):
            (judged if self._judges(sequence) else matched).append((sequence, rows))
        if not judged:
            return _match(matched, logits)
        results = [*_match(matched, logits), *self._judge(judged, logits)]
        place = {sequence.request.request_id: index for index, sequence in enumerate(batch.sequences)}
        return sorted(results, key=lambda result: place[result.sequence.request.request_id])

    def _judges(self, sequence: ScheduledSequence) -> bool:
        return not sequence.request.params.is_greedy and self.rule.applies_to(sequence.draft)

    def _judge(self, judged: Sequence[tuple[ScheduledSequence, range]], logits: torch.Tensor) -> list[VerifyResult]:
        behind = [sampling_rows(sequence) for sequence, _ in judged]
        target = probabilities(_take(logits, judged), [row for rows in behind for row in rows])
        results: list[VerifyResult] = []
        start = 0
        for (sequence, places), rows in zip(judged, behind, strict=True):
            end = start + len(rows)
            results.append(self._result(sequence, target[start:end], logits[places.start : places.stop], rows))
            start = end
        return results

    def _result(
        self, sequence: ScheduledSequence, target: torch.Tensor, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> VerifyResult:
        verdict = self.rule.judge(sequence.draft, target, rows)
        accepted = tuple(sequence.draft.token_ids[node] for node in verdict.nodes)
        tokens = accepted if verdict.next_token is None else (*accepted, verdict.next_token)
        along = [node + 1 for node in (ROOT, *verdict.nodes)][: len(tokens)]
        found = logprobs_at(take_rows(logits, along), [rows[index] for index in along], tokens)
        return VerifyResult(sequence, accepted, verdict.next_token, verdict.nodes, tuple(found.values()) or None)


def create_verifier(acceptance: str = MATCH, epsilon: float = 0.09, alpha: float = 0.3) -> Verifier:
    """A verifier by the name of how it accepts.

    Args:
        acceptance: ``match`` (seeded requests get the tokens of plain decoding), ``residual`` (the target's
            distribution, more accepted from drafts that were drawn) or ``typical`` (lossy).
        epsilon, alpha: of :class:`TypicalRule`; the others ignore them.

    Raises:
        ConfigError: the name is not known, or a number is out of its range.
    """
    if acceptance == MATCH:
        return SampleAndMatch()
    if acceptance == RESIDUAL:
        return RuleVerifier(ResidualRule())
    if acceptance == TYPICAL:
        if not 0 < epsilon <= 1:
            raise ConfigError(f"epsilon of typical acceptance must be in (0, 1], got {epsilon!r}.")
        if not 0 < alpha < float("inf"):
            raise ConfigError(f"alpha of typical acceptance must be a positive number, got {alpha!r}.")
        logger.warning("typical acceptance is on: sampled tokens are not distributed as the model's own")
        return RuleVerifier(TypicalRule(epsilon, alpha))
    nearest = difflib.get_close_matches(acceptance, ACCEPTANCES, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ConfigError(f"{acceptance!r} is not an acceptance rule; expected one of: {', '.join(ACCEPTANCES)}.{hint}")


def sampling_rows(sequence: ScheduledSequence) -> list[SamplingRow]:
    """The sampling state of each of a sequence's rows of logits: after its last known token, then after each node."""
    draft = sequence.draft
    if not len(draft):  # most sequences of most steps
        return [sampling_row(sequence.request)]
    paths = [[draft.token_ids[index] for index in draft.path(node)] for node in range(len(draft))]
    return [sampling_row(sequence.request, path) for path in [[], *paths]]


def _with_rows(batch: ForwardBatch) -> list[tuple[ScheduledSequence, range]]:
    return [(s, rows) for s, rows in zip(batch.sequences, batch.rows_of, strict=True) if len(rows)]


def _take(logits: torch.Tensor, wanted: Sequence[tuple[ScheduledSequence, range]]) -> torch.Tensor:
    """The rows of some of the sequences, one after the other."""
    places = [place for _, rows in wanted for place in rows]
    return take_rows(logits, places)


def _match(matched: Sequence[tuple[ScheduledSequence, range]], logits: torch.Tensor) -> list[VerifyResult]:
    """Follows the drawn tokens from the root, as long as a child equals the drawn token."""
    drawn = iter(sample(_take(logits, matched), [row for sequence, _ in matched for row in sampling_rows(sequence)]))
    return [_follow(sequence, [next(drawn) for _ in rows]) for sequence, rows in matched]


def _follow(sequence: ScheduledSequence, drawn: Sequence[SampledToken]) -> VerifyResult:
    draft = sequence.draft
    if not len(draft):
        return VerifyResult(sequence, (), drawn[0].token_id, logprobs=logprobs_of(drawn))
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

"""Watches a speculation method at work: what it drafts, what of that is accepted, and where the time goes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from baton.core.drafts import Draft, ScheduledSequence, depths_of
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import Proposer, VerifyResult

NO_METHOD = "none"


@dataclass(slots=True)
class RoundTally:
    """Sums over rounds. A round is one sequence in one step of decoding, whether anything was drafted for it or not.

    Attributes:
        num_tokens: that came out.
        num_drafted: tokens that methods drafted, verified or not; those of a tree all count.
        num_verified: drafted tokens that the target looked at; ``num_accepted`` of them were right.
        by_method: rounds by whose draft was verified in them, ``none`` for those without.
        offered: rounds by position, in which a draft was verified that reached that far; ``offered[0]`` is the first.
        reached: those of them in which everything in front of the position was accepted.
        accepted: those of them in which the position was accepted as well.
        draft_ms, verify_ms: of each step.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    by_method: Counter[str] = field(default_factory=Counter)
    offered: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_ms: list[float] = field(default_factory=list)
    verify_ms: list[float] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Mean accepted length: tokens per round, the target's own token included; 1 without speculation."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """By position, the chance that a draft which reaches so far is accepted up to there."""
        return [taken / count for taken, count in zip(self.accepted, self.offered, strict=True)]

    @property
    def conditional_acceptance(self) -> list[float | None]:
        """The same, given that everything in front was accepted; None where that never happened."""
        return [taken / count if count else None for taken, count in zip(self.accepted, self.reached, strict=True)]

    def add(self, draft: Draft, num_accepted: int, method: str | None) -> None:
        """Books a round.

        Args:
            draft: what was verified; empty for nothing.
            num_accepted: tokens of it, along one path.
            method: that it came from.
        """
        self.num_rounds += 1
        self.num_tokens += num_accepted + 1
        self.num_verified += len(draft)
        self.num_accepted += num_accepted
        self.by_method[(method or NO_METHOD) if len(draft) else NO_METHOD] += 1
        depth = _depth(draft)
        for counts in (self.offered, self.reached, self.accepted):
            counts.extend([0] * (depth - len(counts)))
        for position in range(depth):
            self.offered[position] += 1
            self.reached[position] += num_accepted >= position
            self.accepted[position] += num_accepted > position


class RoundMeter:
    """Implements ``Proposer`` around another one, which drafts while rounds are counted.

    Prompts are computed before that, without drafts, as they are where prefill has workers of its own.

    Args:
        proposer: the one to watch.
        drafted_by: the method that a request's latest draft is from, for proposers that choose among several.
        num_drafted: tokens drafted since the start, for proposers that do not offer all of them for verification.

    Attributes:
        tally: of the rounds since :meth:`start`; None while nothing is counted and drafted.
    """

    def __init__(
        self,
        proposer: Proposer,
        drafted_by: Callable[[str], str | None] = lambda request_id: None,
        num_drafted: Callable[[], int] | None = None,
    ) -> None:
        self._proposer = proposer
        self._drafted_by = drafted_by
        self._num_offered = 0
        self._num_drafted = num_drafted or (lambda: self._num_offered)
        self._num_drafted_before = 0
        self._draft_ms = 0.0
        self.tally: RoundTally | None = None

    def start(self) -> None:
        """Drafts and counts from the next step on."""
        self.tally = RoundTally()
        self._num_drafted_before = self._num_drafted()
        self._draft_ms = 0.0

    def stop(self) -> RoundTally:
        """Ends that, and gives what was counted."""
        tally = self.tally or RoundTally()
        tally.num_drafted = self._num_drafted() - self._num_drafted_before
        self.tally = None
        return tally

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        if self.tally is None:
            return {}
        started_s = time.perf_counter()
        drafts = self._proposer.propose(plan, room)
        self._draft_ms = (time.perf_counter() - started_s) * 1e3
        self._num_offered += sum(map(len, drafts.values()))
        return drafts

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """The step's last call of a method that may take its time, so that the step is booked here."""
        started_s = time.perf_counter()
        self._proposer.computed(batch, logits, results)
        self._draft_ms += (time.perf_counter() - started_s) * 1e3
        if self.tally is not None:
            self.tally.draft_ms.append(self._draft_ms)

    def observe(self, result: VerifyResult) -> None:
        if self.tally is not None:
            method = self._drafted_by(result.sequence.request.request_id)
            self.tally.add(result.sequence.draft, len(result.accepted), method)
        self._proposer.observe(result)

    def observe_step(self, num_sequences: int, num_tokens: int, ms: float) -> None:
        if self.tally is not None:
            self.tally.verify_ms.append(ms)
        self._proposer.observe_step(num_sequences, num_tokens, ms)

    def release(self, request_id: str) -> None:
        self._proposer.release(request_id)


def merged(tallies: Sequence[RoundTally]) -> RoundTally:
    """One tally over all."""
    total = RoundTally()
    for tally in tallies:
        total.num_rounds += tally.num_rounds
        total.num_tokens += tally.num_tokens
        total.num_drafted += tally.num_drafted
        total.num_verified += tally.num_verified
        total.num_accepted += tally.num_accepted
        total.by_method += tally.by_method
        total.offered = _added(total.offered, tally.offered)
        total.reached = _added(total.reached, tally.reached)
        total.accepted = _added(total.accepted, tally.accepted)
        total.draft_ms += tally.draft_ms
        total.verify_ms += tally.verify_ms
    return total


def _added(left: list[int], right: list[int]) -> list[int]:
    length = max(len(left), len(right))
    padded = [counts + [0] * (length - len(counts)) for counts in (left, right)]
    return [sum(pair) for pair in zip(*padded, strict=True)]


def _depth(draft: Draft) -> int:
    if draft.is_chain:
        return len(draft)
    return max(depths_of(draft.parents)) + 1

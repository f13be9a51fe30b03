"""Observes a speculation method: what it drafts, how much is accepted, and how long it takes."""

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
    """Sums over rounds. A round is one sequence in one decode step, with or without a draft.

    Attributes:
        num_tokens: number of output tokens.
        num_drafted: number of drafted tokens, verified or not, including all nodes of trees.
        num_verified: number of verified drafted tokens; ``num_accepted`` of them were accepted.
        by_method: number of rounds by the method whose draft was verified; ``none`` for rounds without a draft.
        offered: by position from 0, the number of rounds whose verified draft reached the position.
        reached: the number of those rounds in which everything before the position was accepted.
        accepted: the number of those rounds in which the position was accepted too.
        draft_ms, verify_ms: durations of each step's drafting and verification.
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
        """The mean accepted length: tokens per round, including the target's own token; 1 without speculation."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """By position, the probability that a draft that reaches the position is accepted up to it."""
        return [taken / count for taken, count in zip(self.accepted, self.offered, strict=True)]

    @property
    def conditional_acceptance(self) -> list[float | None]:
        """The same, given that everything before was accepted; ``None`` if that never happened."""
        return [taken / count if count else None for taken, count in zip(self.accepted, self.reached, strict=True)]

    def add(self, draft: Draft, num_accepted: int, method: str | None) -> None:
        """Adds a round.

        Args:
            draft: the verified draft, which may be empty.
            num_accepted: number of accepted tokens, along one path.
            method: the method that made the draft.
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
    """Implements ``Proposer`` around another proposer, which drafts only while rounds are counted.

    Prompts are computed before that, without drafts, as on separate prefill workers.

    Args:
        proposer: the observed proposer.
        drafted_by: returns the method of a request's latest draft, for proposers that choose among several.
        num_drafted: returns the tokens drafted since the start, for proposers that do not offer all of them.

    Attributes:
        tally: the rounds since :meth:`start`; ``None`` while counting and drafting are off.
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
        self._proposed_s = 0.0
        self.tally: RoundTally | None = None

    def start(self) -> None:
        """Begins to draft and count with the next step."""
        self.tally = RoundTally()
        self._num_drafted_before = self._num_drafted()
        self._draft_ms = 0.0

    def stop(self) -> RoundTally:
        """Stops drafting and counting, and returns the tally."""
        tally = self.tally or RoundTally()
        tally.num_drafted = self._num_drafted() - self._num_drafted_before
        self.tally = None
        return tally

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        if self.tally is None:
            return {}
        started_s = time.perf_counter()
        drafts = self._proposer.propose(plan, room)
        self._proposed_s = time.perf_counter()
        self._draft_ms = (self._proposed_s - started_s) * 1e3
        self._num_offered += sum(map(len, drafts.values()))
        return drafts

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """Forwards the call and records the step, because this is the step's last call that may take long."""
        started_s = time.perf_counter()
        self._proposer.computed(batch, logits, results)
        self._draft_ms += (time.perf_counter() - started_s) * 1e3
        if self.tally is not None:
            self.tally.verify_ms.append((started_s - self._proposed_s) * 1e3)
            self.tally.draft_ms.append(self._draft_ms)

    def observe(self, result: VerifyResult) -> None:
        if self.tally is not None:
            method = self._drafted_by(result.sequence.request.request_id)
            self.tally.add(result.sequence.draft, len(result.accepted), method)
        self._proposer.observe(result)

    def release(self, request_id: str) -> None:
        self._proposer.release(request_id)


def merged(tallies: Sequence[RoundTally]) -> RoundTally:
    """The sum of several tallies."""
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

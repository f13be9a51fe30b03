"""What a worker measures of its drafts: acceptance by position, cost relative to a step, and chosen lengths.

Counts are kept since the start, for metrics, and means of recent steps, for `baton status` and `baton advise`. A step
takes a few microseconds for each sequence that drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.drafts import ROOT, Draft
from baton.core.request import Request
from baton.core.speculation_rates import size_class
from baton.core.workloads import Workload, workload_of
from decode_worker.speculation.acceptance import kind_of

_RECENT_DRAFTS = 512
"""Outcomes that a recent mean remembers: some answers."""
_COST_MEMORY = 0.5 ** (1 / 256)
"""Decay of the sums of costs at each step in which the method was asked."""


TrafficKind = tuple[int, Workload]
"""A class of temperatures (:func:`decode_worker.speculation.acceptance.kind_of`), and a workload."""


def traffic_kind(request: Request) -> TrafficKind:
    return kind_of(request), workload_of(request)


@dataclass(slots=True)
class KindCounts:
    """Drafts for one kind of requests, and how many of their tokens were judged after all before them had been
    accepted, and accepted too."""

    num_drafts: int = 0
    num_reached: int = 0
    num_accepted: int = 0


class RecentMean:
    """Mean of the last few hundred values; of all values while there are fewer."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def observe(self, value: float) -> None:
        self._count = min(self._count + 1, _RECENT_DRAFTS)
        self.value += (value - self.value) / self._count


@dataclass(slots=True)
class DraftCostSums:
    """Decaying sums over the steps of one size class.

    Attributes:
        drafting: time of drafting, times the size of the batch, relative to a step without drafts.
        verifying: the same for the verification of the drafted tokens.
        tokens: number of drafted tokens.
    """

    drafting: float = 0.0
    verifying: float = 0.0
    tokens: float = 0.0

    def observe(self, drafting: float, verifying: float, num_tokens: int) -> None:
        self.drafting = _COST_MEMORY * self.drafting + drafting
        self.verifying = _COST_MEMORY * self.verifying + verifying
        self.tokens = _COST_MEMORY * self.tokens + num_tokens

    def per_token(self) -> tuple[float, float]:
        """(drafting, verifying) of a token for each sequence of the batch, relative to a step without drafts."""
        return self.drafting / self.tokens, self.verifying / self.tokens


@dataclass(slots=True)
class DraftFigures:
    """Figures of one method.

    Attributes:
        num_drafts, num_drafted, num_accepted: drafts with a known outcome, the tokens in them, and the accepted tokens.
        reached, accepted: by position, how often a token there was judged after all before it had been accepted, and
            how often it was accepted too.
        recent_acceptance: by position, the share of that in recent steps.
        recent_length: tokens of a draft in recent steps.
        chosen: drafts of 1, 2, … tokens that ``auto`` chose.
        costs: by size class of the batch.
        kinds: by kind of request.
    """

    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    recent_acceptance: list[RecentMean] = field(default_factory=list)
    recent_length: RecentMean = field(default_factory=RecentMean)
    chosen: list[int] = field(default_factory=list)
    costs: dict[int, DraftCostSums] = field(default_factory=dict)
    kinds: dict[TrafficKind, KindCounts] = field(default_factory=dict)

    def judged(self, kind: TrafficKind, num_drafted: int, num_accepted: int, num_reached: int) -> None:
        """Learns the outcome of a draft.

        Args:
            kind: of its request.
            num_drafted: its tokens.
            num_accepted: accepted ones, from the first position on.
            num_reached: positions of which the outcome is known: one more, unless the draft ended there.
        """
        self.num_drafts += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.recent_length.observe(num_drafted)
        counts = self.kinds.setdefault(kind, KindCounts())
        counts.num_drafts += 1
        counts.num_reached += num_reached
        counts.num_accepted += num_accepted
        while len(self.reached) < num_reached:
            self.reached.append(0)
            self.accepted.append(0)
            self.recent_acceptance.append(RecentMean())
        for position in range(num_reached):
            is_accepted = position < num_accepted
            self.reached[position] += 1
            self.accepted[position] += is_accepted
            self.recent_acceptance[position].observe(is_accepted)

    def chose(self, num_tokens: int) -> None:
        """Counts a draft that ``auto`` chose."""
        if num_tokens > len(self.chosen):
            self.chosen.extend([0] * (num_tokens - len(self.chosen)))
        self.chosen[num_tokens - 1] += 1

    def cost(
        self, num_sequences: int, drafting_ms: float, verifying_ms: float, plain_ms: float, num_tokens: int
    ) -> None:
        """Learns what the drafts of a step cost.

        Args:
            num_sequences: sequences of the step that yield a token.
            drafting_ms: time of drafting, for all of them.
            verifying_ms: time of verifying one token.
            plain_ms: time of the step without drafts.
            num_tokens: drafted tokens of all sequences; 0 if nothing was found.
        """
        if num_sequences < 1 or plain_ms <= 0:
            return
        relative = num_sequences / plain_ms
        sums = self.costs.setdefault(size_class(num_sequences), DraftCostSums())
        sums.observe(drafting_ms * relative, verifying_ms * relative * num_tokens, num_tokens)


class FigureBook:
    """The figures of all methods of a worker.

    Attributes:
        by_method: of the methods that were asked for drafts.
        num_without_draft: how often ``auto`` chose no draft for a sequence of a step.
        recent_choice: tokens that ``auto`` drafts per sequence and step, in recent steps.
    """

    def __init__(self) -> None:
        self.by_method: dict[str, DraftFigures] = {}
        self.num_without_draft = 0
        self.recent_choice = RecentMean()

    def of(self, method: str) -> DraftFigures:
        """The figures of a method, new ones for the first time."""
        return self.by_method.setdefault(method, DraftFigures())

    def chose(self, drafts: Sequence[Draft]) -> None:
        """Counts what ``auto`` chose for each sequence of a step; an empty draft stands for none."""
        for draft in drafts:
            if len(draft):
                self.of(draft.method).chose(len(draft))
            else:
                self.num_without_draft += 1
        if drafts:
            self.recent_choice.observe(sum(map(len, drafts)) / len(drafts))


def num_reached(draft: Draft, path: Sequence[int]) -> int:
    """Positions of a draft whose outcome is known when the nodes of ``path`` were accepted: one more than these if the
    last of them has a child."""
    last = path[-1] if path else ROOT
    has_child = len(draft) > len(path) if draft.is_chain else last in draft.parents
    return len(path) + has_child

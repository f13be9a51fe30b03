"""How many drafts to make and to verify: as many as raise the expected tokens per millisecond of the whole batch.

The choice is made in three places, each with what is known there:

* before a method with a network drafts at all: from what its drafts have been worth lately (:class:`DraftingPolicy`);
* between two passes of the network: whether one more pass promises more than it costs (:class:`DraftPasses`);
* when the drafts are there and their making is paid for: which of them are worth verifying
  (:class:`VerificationPolicy`).

vLLM's adaptive verification has the form of the last one. All costs are measured while serving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decode_worker.speculation.step_cost import StepCost
from decode_worker.speculation.tree import reach_probabilities
from engine.drafts import Draft

# Speculation must promise this much more than plain decoding before it begins, and half of it to go on.
_MIN_GAIN = 0.03
# The share of decisions against drafting that are tried all the same, to notice when drafts have become better.
_DECISIONS_PER_PROBE = 64
# The same where nothing is to be gained as far as is known, which may be wrong.
_DECISIONS_PER_HOPELESS_PROBE = 1024
# Accepted in a step where drafts are good, as they may be again with the next text.
_GOOD_DRAFTS = 1.2
_HOPELESS_DECISIONS = 16


class DraftPasses:
    """What a pass of the draft network costs, and whether one more of them pays.

    Attributes:
        rate: expected tokens per millisecond that a further pass must beat; None lets every pass through.
        num_passes: since the worker started.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._pass_cost = StepCost()
        self.rate: float | None = None
        self.num_passes = 0

    def record(self, num_sequences: int, ms: float) -> None:
        """Books a pass."""
        self._pass_cost.record(num_sequences, num_sequences, ms)
        self.num_passes += 1

    def ms(self, num_sequences: int) -> float:
        """Of one pass; 0 while nothing was measured."""
        return self._pass_cost.ms(num_sequences, num_sequences) if self.num_passes else 0.0

    def another(self, chances: Sequence[float]) -> bool:
        """Whether a pass that adds a draft to each of some sequences pays.

        Args:
            chances: for each of them, that the new draft will be accepted.
        """
        if self.rate is None:
            return True
        count = len(chances)
        verifying = self._cost.ms(count, 2 * count) - self._cost.ms(count, count)
        return sum(chances) > self.rate * (self.ms(count) + max(0.0, verifying))


class DraftingPolicy:
    """Which sequences a method with a network should draft for.

    Args:
        cost: of the target's steps.
        passes: of the network.
    """

    def __init__(self, cost: StepCost, passes: DraftPasses) -> None:
        self._cost = cost
        self._passes = passes
        self._is_drafting = False
        self._num_refusals = 0
        self._num_hopeless = 0

    @property
    def is_hopeless(self) -> bool:
        """True when drafting has not paid for long, and would not with good drafts either: the batch is too large."""
        return self._num_hopeless >= _HOPELESS_DECISIONS

    def choose(
        self, accepted: Mapping[str, float], num_drafted: float, num_passes: float, num_sequences: int, num_tokens: int
    ) -> set[str]:
        """The requests to draft for.

        Args:
            accepted: of each request that may be drafted for, how many drafts are accepted in a step, as things went
                lately.
            num_drafted: tokens drafted for a request in a step.
            num_passes: of the network in a step.
            num_sequences: sequences of the step that yield a token anyway.
            num_tokens: tokens of the step without any draft.
        """
        plain = num_sequences / self._cost.ms(num_sequences, num_tokens)
        ranked = sorted(accepted, key=lambda request_id: -accepted[request_id])

        def best(least: float) -> tuple[float, int]:
            expected, found = float(num_sequences), (plain, 0)
            for count, request_id in enumerate(ranked, start=1):
                expected += max(least, accepted[request_id])
                ms = self._cost.ms(num_sequences, round(num_tokens + count * num_drafted))
                found = max(found, (expected / (ms + num_passes * self._passes.ms(count)), count))
            return found

        rate, count = best(0.0)
        self._is_drafting = rate / plain - 1 > (_MIN_GAIN / 2 if self._is_drafting else _MIN_GAIN)
        if self._is_drafting:
            self._num_hopeless = 0
            self._passes.rate = rate
            return set(ranked[:count])
        self._num_refusals += 1
        has_hope = best(_GOOD_DRAFTS)[0] > plain
        self._num_hopeless = 0 if has_hope else self._num_hopeless + 1
        is_due = self._num_refusals % (_DECISIONS_PER_PROBE if has_hope else _DECISIONS_PER_HOPELESS_PROBE) == 0
        if is_due:
            self._passes.rate = plain
            return set(ranked[:1])
        return set()


class VerificationPolicy:
    """How much of each draft to verify.

    Args:
        cost: of the target's steps.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._is_drafting = False
        self._num_refusals = 0

    def choose(self, drafts: Mapping[str, Draft], num_sequences: int, num_tokens: int) -> dict[str, int]:
        """Number of nodes by request id; requests that get none are left out.

        Args:
            num_sequences: sequences of the step that yield a token anyway.
            num_tokens: tokens of the step without any draft.
        """
        if not drafts:
            return {}
        # Slots in the order of survival over the whole batch. A child never survives more often than its parent, so
        # what is taken of a draft is a tree as well, if its nodes are in the same order.
        slots = sorted(
            ((chance, -node, request_id) for request_id, draft in drafts.items()
             for node, chance in enumerate(reach_probabilities(draft))),
            reverse=True,
        )  # fmt: skip
        plain = num_sequences / self._cost.ms(num_sequences, num_tokens)
        best_rate, best_count, expected = plain, 0, float(num_sequences)
        for count, (chance, _, _) in enumerate(slots, start=1):
            expected += chance
            rate = expected / self._cost.ms(num_sequences, num_tokens + count)
            if rate > best_rate:
                best_rate, best_count = rate, count
        gain = best_rate / plain - 1
        self._is_drafting = gain > (_MIN_GAIN / 2 if self._is_drafting else _MIN_GAIN)
        if not self._is_drafting:
            self._num_refusals += 1
            if self._num_refusals % _DECISIONS_PER_HOPELESS_PROBE:
                return {}
            best_count = len(slots)  # costs are known of those sizes only that were tried lately
        lengths: dict[str, int] = {}
        for _, _, request_id in slots[:best_count]:
            lengths[request_id] = lengths.get(request_id, 0) + 1
        return lengths

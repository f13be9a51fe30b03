"""How many drafts to make and to verify: as many as are expected to make the batch faster.

Three decisions, each with what is known at its time:

* before a method with a network drafts: for which requests, and how many passes (:class:`DraftingPolicy`);
* between two passes of the network: whether one more pass promises more than it costs (:class:`DraftPasses`);
* once the drafts are made: which of them are worth verifying (:class:`VerificationPolicy`, as in vLLM's adaptive
  verification).

All costs and chances are measured while serving.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import log, log1p

from baton.core.cost_fit import CostFit
from baton.core.drafts import Draft
from baton.engine.scheduling.step_cost_model import StepCostModel
from decode_worker.speculation.method import Outlook
from decode_worker.speculation.tree import reach_probabilities

# The gain over plain decoding that speculation must promise to begin; half of it suffices to go on. Estimates of costs
# are off by a few percent, and passes of a network add their own error.
_MIN_GAIN = 0.04
_MIN_NETWORK_GAIN = 0.06
# A decision against drafting holds for so many steps, and for more steps when decisions have been the same for long.
_STEPS_PER_DECISION = 4
_STEPS_PER_LATER_DECISION = 16
# Steps without drafting after which some steps draft all the same, to notice when drafts have become better; the first
# of them finds the network cold and far behind. The next probe comes after twice as many steps, and so on.
_STEPS_PER_PROBE = 64
_STEPS_OF_PROBE = 2
# The same where even good drafts would not pay, according to estimates that may be wrong.
_STEPS_PER_HOPELESS_PROBE = 1024
# Accepted drafts by pass where drafts are good, as they may be again with the next text.
_GOOD_GAINS = (0.7, 0.5, 0.35)
_HOPELESS_DECISIONS = 4
# A hopeless decision is reconsidered when the batch has become smaller by this factor.
_SMALLER = 0.75
# Steps without drafting after which the network no longer keeps up with every token, and the latest tokens of each
# sequence that it must still have seen when it drafts again.
_STEPS_TO_IDLE = 16
_ROWS_WHILE_IDLE = 32
# The first passes of a network are cold, and too slow to learn from.
_COLD_PASSES = 3
# Milliseconds of a pass, and for each sequence in it. Only their ratio counts: a pass reads the network's weights once.
_PASS_PRIOR = (1.0, 0.025)
# Decisions against drafts in a row after which drafts are looked for only now and then, and the longest pause: large
# batches take longer to look through and gain less.
_PATIENCE = 16
_SEQUENCES_PER_UNASKED = 4
_LONGEST_UNASKED = 7


class DraftPasses:
    """The cost of a pass of the draft network, and whether one more pays.

    Attributes:
        rate: expected tokens per millisecond that a further pass must beat; ``None`` lets every pass through.
        num_passes: since the worker started.
    """

    def __init__(self, costs: StepCostModel) -> None:
        self._costs = costs
        self._fit = CostFit(_PASS_PRIOR)
        self.rate: float | None = None
        self.num_passes = 0

    def record(self, num_sequences: int, ms: float) -> None:
        """Learns from a pass."""
        self.num_passes += 1
        if self.num_passes > _COLD_PASSES:
            self._fit.observe((1.0, num_sequences), ms, time.monotonic())

    def ms(self, num_sequences: int) -> float:
        """Milliseconds of one pass; 0 before a warm one was measured."""
        return self._fit.ms((1.0, num_sequences)) if self._fit.num_samples else 0.0

    def another(self, chances: Sequence[float]) -> bool:
        """Whether a pass that adds a draft to each of some sequences pays.

        Args:
            chances: for each of them, that the new draft will be accepted.
        """
        if self.rate is None:
            return True
        count = len(chances)
        verifying = self._costs.ms(count, 2 * count) - self._costs.ms(count, count)
        return sum(chances) > self.rate * (self.ms(count) + verifying)


class DraftingPolicy:
    """Which sequences a method with a network should draft for.

    Args:
        costs: of the target's steps.
        passes: cost of the network's passes.
    """

    def __init__(self, costs: StepCostModel, passes: DraftPasses) -> None:
        self._costs = costs
        self._passes = passes
        self._is_drafting = False
        self._num_refusals = 0  # steps without drafts since the last step with drafts
        self._next_decision = 0  # this and the next are values of _num_refusals
        self._last_probe = 0
        self._num_probed = 0
        self._probe_period = _STEPS_PER_PROBE
        self._num_hopeless = 0
        self._hopeless_size = 0
        self._pause = 0
        self._num_paused = 0

    @property
    def num_kept_rows(self) -> int | None:
        """The latest tokens of each sequence that the network must be able to draft from; ``None`` for all of them.

        Keeping up takes several percent of a step. One token is enough where even good drafts would not pay, since the
        batch is too large.
        """
        if self._num_hopeless >= _HOPELESS_DECISIONS:
            return 1
        is_idle = not self._is_drafting and self._num_refusals >= _STEPS_TO_IDLE
        return _ROWS_WHILE_IDLE if is_idle else None

    def is_settled(self, num_sequences: int) -> bool:
        """True when the step gets no drafts, like the last one. Call once per step if no request names the method."""
        if self._num_paused:
            self._num_paused -= 1
            return True
        is_smaller = num_sequences < _SMALLER * self._hopeless_size
        if self._is_drafting or self._num_refusals >= self._next_decision or is_smaller:
            return False
        self._num_refusals += 1
        return True

    def book(self, *, verified: bool) -> None:
        """Learns whether any of the drafts that were made was worth its verification.

        If none is, time after time, the outlook is too good, and the method pauses longer and longer.
        """
        self._pause = 0 if verified else min(_STEPS_PER_PROBE, max(1, 2 * self._pause))
        self._num_paused = self._pause

    def choose(
        self,
        outlook: Outlook,
        named: Collection[str],
        num_sequences: int,
        num_tokens: int,
        context_tokens: int = 0,
    ) -> set[str]:
        """The requests to draft for. Sets the rate that further passes must beat (:class:`DraftPasses`).

        Args:
            outlook: for the requests that may be drafted for.
            named: requests of the outlook that asked for the method; they are always chosen.
            num_sequences: sequences of the step that yield a token anyway.
            num_tokens: tokens of the step without any draft.
            context_tokens: tokens in the contexts of all its sequences together.
        """
        plain = num_sequences / self._costs.ms(num_sequences, num_tokens, context_tokens)
        named = [request_id for request_id in outlook.gains if request_id in named]
        others = [request_id for request_id in outlook.gains if request_id not in named]
        others.sort(key=lambda request_id: -sum(outlook.gains[request_id]))
        ranked = [*named, *others]
        gains = [outlook.gains[request_id] for request_id in ranked]
        step = num_sequences, num_tokens, context_tokens
        rate, count = self._best(gains, len(named), outlook.nodes_per_pass, *step)
        self._passes.rate = max(rate, plain)
        if named:
            return set(ranked[: max(count, len(named))])
        self._is_drafting = rate / plain - 1 > (_MIN_NETWORK_GAIN / 2 if self._is_drafting else _MIN_NETWORK_GAIN)
        if self._is_drafting:
            self._num_hopeless = self._num_refusals = self._next_decision = self._last_probe = self._num_probed = 0
            self._hopeless_size = 0
            self._probe_period = _STEPS_PER_PROBE
            return set(ranked[:count])
        good = [tuple(map(max, own, _GOOD_GAINS)) for own in gains]
        has_hope = self._best(good, 0, outlook.nodes_per_pass, *step)[0] > plain
        self._num_hopeless = 0 if has_hope else self._num_hopeless + 1
        is_hopeless = self._num_hopeless >= _HOPELESS_DECISIONS
        self._hopeless_size = num_sequences if is_hopeless else 0
        period = self._probe_period if has_hope else _STEPS_PER_HOPELESS_PROBE
        is_late = self._num_refusals >= _STEPS_PER_PROBE
        self._num_refusals += 1
        steps = _STEPS_PER_LATER_DECISION if is_late else _STEPS_PER_DECISION
        self._next_decision = self._num_refusals + (_STEPS_PER_PROBE if is_hopeless else steps) - 1
        if self._num_refusals - self._last_probe < period - _STEPS_PER_DECISION:
            return set()
        self._num_probed += 1
        if self._num_probed < _STEPS_OF_PROBE:
            self._next_decision = self._num_refusals
        else:
            self._num_probed, self._last_probe = 0, self._num_refusals
            self._probe_period = min(2 * self._probe_period, _STEPS_PER_HOPELESS_PROBE)
        return set(ranked[:1])

    def _best(
        self,
        gains: Sequence[Sequence[float]],
        least: int,
        nodes_per_pass: float,
        num_sequences: int,
        num_tokens: int,
        context_tokens: int,
    ) -> tuple[float, int]:
        """The best rate in tokens per millisecond, and for how many of the requests it drafts.

        Args:
            gains: gains of each request, the most promising requests first.
            least: requests that are drafted for in any case.
        """
        sums = [list(accumulate(own)) for own in gains]
        found = (0.0, least)
        for num_passes in range(1, max(map(len, sums), default=0) + 1):
            accepted = list(accumulate((own[min(num_passes, len(own)) - 1] if own else 0.0) for own in sums))
            for count in _counts(max(1, least), len(gains)):
                num_rows = num_tokens + count * num_passes * nodes_per_pass
                ms = self._costs.ms(num_sequences, num_rows, context_tokens)
                rate = (num_sequences + accepted[count - 1]) / (ms + num_passes * self._passes.ms(count))
                found = max(found, (rate, count))
        return found


class VerificationPolicy:
    """How much of each draft to verify: as much as makes the mean of the sequences' speed-ups largest.

    The mean is geometric; for one sequence it is tokens per millisecond. In a batch every sequence waits for the drafts
    of each other one: tokens per millisecond alone would let the drafts of a few slow down all others.

    Args:
        costs: of the target's steps.
    """

    def __init__(self, costs: StepCostModel) -> None:
        self._costs = costs
        self._is_drafting = False
        self._num_idle = 0  # decisions against drafts, or without any, since the last one for them
        self._num_unasked = 0  # steps since drafts were looked for
        self._num_refusals = 0

    def is_settled(self, num_sequences: int) -> bool:
        """True when no drafts are looked for. Call once per step in which no request names a method.

        Looking costs each sequence of a large batch a little of every step, and drafts found a few steps later are
        about as good.
        """
        period = min(_LONGEST_UNASKED, num_sequences // _SEQUENCES_PER_UNASKED)
        if self._num_idle < _PATIENCE or self._num_unasked >= period:
            self._num_unasked = 0
            return False
        self._num_unasked += 1
        return True

    def choose(
        self,
        drafts: Mapping[str, Draft],
        named: Collection[str],
        num_sequences: int,
        num_tokens: int,
        context_tokens: int = 0,
        *,
        is_drafting: bool = False,
    ) -> dict[str, int]:
        """Number of nodes by request id; requests that get none are left out.

        Args:
            drafts: non-empty drafts by request id.
            named: requests that asked for the method of their draft: they get one node at least.
            num_sequences: sequences of the step that yield a token anyway.
            num_tokens: tokens of the step without any of these drafts.
            context_tokens: tokens in the contexts of all its sequences together.
            is_drafting: other drafts are verified in this step anyway.
        """
        if not drafts:
            self._num_idle = 0 if is_drafting else self._num_idle + 1
            return {}
        lengths = {request_id: 1 for request_id in drafts if request_id in named}
        # Slots in the order of what they add over the whole batch. A child never survives more often than its parent,
        # so the part that is taken is a tree as well, if its nodes are in the same order.
        slots: list[tuple[float, int, str]] = []
        for request_id, draft in drafts.items():
            expected = 1.0
            for node, chance in enumerate(reach_probabilities(draft)):
                if node >= lengths.get(request_id, 0):
                    slots.append((log1p(chance / expected), -node, request_id))
                expected += chance
        slots.sort(reverse=True)
        num_tokens += len(lengths)
        base_ms = self._costs.ms(num_sequences, num_tokens, context_tokens)
        gained = best_gain = 0.0
        best_count = 0
        for count, (added, _, _) in enumerate(slots, start=1):
            gained += added
            ms = self._costs.ms(num_sequences, num_tokens + count, context_tokens)
            gain = gained / num_sequences - log(ms / base_ms)
            if gain > best_gain:
                best_gain, best_count = gain, count
        if not lengths:
            self._is_drafting = best_gain > log1p(_MIN_GAIN / 2 if self._is_drafting else _MIN_GAIN)
            self._num_idle = 0 if self._is_drafting else self._num_idle + 1
            if not self._is_drafting:
                self._num_refusals += 1
                if self._num_refusals % _STEPS_PER_HOPELESS_PROBE:
                    return {}
                best_count = len(slots)  # costs are known of those sizes only that were tried lately
        for _, _, request_id in slots[:best_count]:
            lengths[request_id] = lengths.get(request_id, 0) + 1
        return lengths


def _counts(least: int, most: int) -> list[int]:
    """Numbers of requests to try; not every number, since each costs time in every step."""
    counts = {least, most}
    count = least
    while (count := max(count + 1, count * 3 // 2)) < most:
        counts.add(count)
    return sorted(counts)

"""Predicts how long a request waits for room. Pure.

Little's law gives the rate at which work leaves a pool. Prefill pool: prompts without a first token, divided by the
wait of the next one. Decode pool: sequences in progress, divided by their stay. The stay is that of sequences that have
ended, but no longer than the most tokens that a request may have take: a burst of short answers may follow long ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.admission import tuning
from cluster.admission.room import RoomCheck, Shortage
from cluster.latency.estimates import USUAL_OUTPUT_TOKENS
from cluster.routing.routing_contracts import RouteDecision


@dataclass(frozen=True, slots=True)
class Blockage:
    """The shortage that kept a request from being dispatched.

    Attributes:
        over_ms: the predicted TTFT beyond its limit.
        wait_ms, tpot_ms: predictions of its route.
        num_prompts, num_sequences: the work that was in progress then; see :class:`WorkInProgress`.
    """

    shortage: Shortage
    over_ms: float = 0.0
    wait_ms: float = 0.0
    tpot_ms: float = 0.0
    num_prompts: int = 0
    num_sequences: int = 0


@dataclass(slots=True)
class WorkInProgress:
    """The admitted sequences that have not ended.

    Attributes:
        num_prompts: sequences without a first token.
        num_sequences: all of them.
        max_tokens: the most tokens that all of them may have together.
    """

    num_prompts: int = 0
    num_sequences: int = 0
    max_tokens: int = 0
    _mean_stay_s: float | None = None

    def observe_stay(self, seconds: float) -> None:
        """Counts the time from dispatch to end of a finished sequence."""
        before = seconds if self._mean_stay_s is None else self._mean_stay_s
        self._mean_stay_s = before + tuning.STAY_WEIGHT * (seconds - before)

    def blockage(self, decision: RouteDecision, check: RoomCheck) -> Blockage | None:
        """The shortage on a route, or ``None`` if there was room."""
        if check.shortage is None:
            return None
        predictions = (check.over_ms, decision.wait_ms, decision.tpot_ms)
        return Blockage(check.shortage, *predictions, self.num_prompts, self.num_sequences)

    def wait_s(self, blockage: Blockage, num_ahead: int, mean_max_tokens: float) -> float:
        """Predicted seconds until a request is dispatched.

        Args:
            blockage: of the first request in the queue, or of this one if none is ahead.
            num_ahead: requests that wait before it.
            mean_max_tokens: the most tokens that one of them may have, on average.
        """
        if blockage.shortage is Shortage.PREFILL:
            each_s = max(tuning.SHORTEST_STAY_S, blockage.wait_ms / 1e3) / max(1, blockage.num_prompts)
            return blockage.over_ms / 1e3 + num_ahead * each_s
        own_max_tokens = self.max_tokens / self.num_sequences if self.num_sequences else mean_max_tokens
        stays_s = self._stay_s(blockage, own_max_tokens) + num_ahead * self._stay_s(blockage, mean_max_tokens)
        return stays_s / max(1, blockage.num_sequences)

    def _stay_s(self, blockage: Blockage, max_tokens: float) -> float:
        longest_s = (blockage.wait_ms + blockage.tpot_ms * max_tokens) / 1e3
        usual_s = self._mean_stay_s
        if usual_s is None:
            usual_s = blockage.tpot_ms / 1e3 * USUAL_OUTPUT_TOKENS
        return max(tuning.SHORTEST_STAY_S, min(usual_s, longest_s))

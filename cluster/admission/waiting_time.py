"""Predicts how long a request waits for room. Pure.

Little's law gives the rate at which work leaves a pool. Prefill pool: prompts without a first token, divided by the
wait of the next one. Decode pool: sequences in progress, divided by their mean stay.
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
    """

    shortage: Shortage
    over_ms: float
    wait_ms: float
    tpot_ms: float

    @classmethod
    def of(cls, decision: RouteDecision, check: RoomCheck) -> Blockage | None:
        """``None`` if there was room."""
        if check.shortage is None:
            return None
        return cls(check.shortage, check.over_ms, decision.wait_ms, decision.tpot_ms)


@dataclass(slots=True)
class WorkInProgress:
    """The admitted sequences that have not ended.

    Attributes:
        num_prompts: sequences without a first token.
        num_sequences: all of them.
    """

    num_prompts: int = 0
    num_sequences: int = 0
    _mean_stay_s: float | None = None

    def observe_stay(self, seconds: float) -> None:
        """Counts the time from dispatch to end of a finished sequence."""
        before = seconds if self._mean_stay_s is None else self._mean_stay_s
        self._mean_stay_s = before + tuning.STAY_WEIGHT * (seconds - before)

    def wait_s(self, blockage: Blockage, num_ahead: int, max_tokens: int) -> float:
        """Predicted seconds until a request is dispatched, after ``num_ahead`` others and a blockage."""
        rate = self.leave_per_s(blockage.shortage, blockage.wait_ms, blockage.tpot_ms, max_tokens)
        return predicted_wait_s(blockage.shortage, blockage.over_ms, num_ahead, rate)

    def leave_per_s(self, shortage: Shortage, wait_ms: float, tpot_ms: float, max_tokens: int) -> float:
        """Requests per second that leave the pool.

        Args:
            wait_ms: wait of a prompt that is sent now for other prompts.
        """
        if shortage is Shortage.DECODE:
            guess_s = tpot_ms / 1e3 * min(max_tokens, USUAL_OUTPUT_TOKENS)
            stay_s = guess_s if self._mean_stay_s is None else self._mean_stay_s
            return max(1, self.num_sequences) / max(tuning.SHORTEST_STAY_S, stay_s)
        return max(1, self.num_prompts) / max(tuning.SHORTEST_STAY_S, wait_ms / 1e3)


def predicted_wait_s(shortage: Shortage, over_ms: float, num_ahead: int, leave_per_s: float) -> float:
    """Predicted seconds until a request gets room.

    Args:
        over_ms: by how much the predicted TTFT would exceed its limit if the request were dispatched at once.
        num_ahead: requests that wait before it.
    """
    own_s = over_ms / 1e3 if shortage is Shortage.PREFILL else 1 / leave_per_s
    return own_s + num_ahead / leave_per_s

"""How long a request will wait for room. Pure.

Little's law, on the work in progress: prompts that wait for their first token, divided by how long the next one waits,
leave the prefill pool every second; sequences that decode, divided by how long they stay, leave the decode pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.admission.room import RoomCheck, Shortage
from cluster.routing.routing_contracts import RouteDecision

_SHORTEST_S = 1e-3
_USUAL_TOKENS = 64
_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class Blockage:
    """What kept a request from being dispatched.

    Attributes:
        over_ms: how much too late its first token would have come.
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
        """A finished sequence took so long from its dispatch."""
        before = seconds if self._mean_stay_s is None else self._mean_stay_s
        self._mean_stay_s = before + _WEIGHT * (seconds - before)

    def wait_s(self, blockage: Blockage, num_ahead: int, max_tokens: int) -> float:
        """Seconds until a request is dispatched, behind ``num_ahead`` others and a blockage."""
        rate = self.leave_per_s(blockage.shortage, blockage.wait_ms, blockage.tpot_ms, max_tokens)
        return predicted_wait_s(blockage.shortage, blockage.over_ms, num_ahead, rate)

    def leave_per_s(self, shortage: Shortage, wait_ms: float, tpot_ms: float, max_tokens: int) -> float:
        """Requests per second that make room for others.

        Args:
            wait_ms: behind other prompts, of one that is sent now.
        """
        if shortage is Shortage.DECODE:
            guess_s = tpot_ms / 1e3 * min(max_tokens, _USUAL_TOKENS)
            stay_s = guess_s if self._mean_stay_s is None else self._mean_stay_s
            return max(1, self.num_sequences) / max(_SHORTEST_S, stay_s)
        return max(1, self.num_prompts) / max(_SHORTEST_S, wait_ms / 1e3)


def predicted_wait_s(shortage: Shortage, over_ms: float, num_ahead: int, leave_per_s: float) -> float:
    """Seconds until a request gets room.

    Args:
        over_ms: how much too late its first token would come if it went at once.
        num_ahead: requests that wait before it.
    """
    own_s = over_ms / 1e3 if shortage is Shortage.PREFILL else 1 / leave_per_s
    return own_s + num_ahead / leave_per_s

"""Room: whether a route meets a request's targets. Pure functions; times are milliseconds.

    feasible = the request's latency if nothing else ran · (1 + slack)
    room     = prediction ≤ max(the class's target with a margin, feasible), but never above a target that can be met

A request that could not meet its TTFT target even on an idle cluster is *lost*: its prompt is too long for its class,
or it has waited too long. It is dispatched where it hardly waits for others, unless requests that can meet their
targets find no room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

import numpy as np

from baton.core.slo import SloClass
from baton.core.timeline import AwaitedRoom
from cluster.admission import tuning
from cluster.routing.routing_contracts import Bools, Candidates, RouteDecision


@dataclass(frozen=True, slots=True)
class Factors:
    """Divisors, at least 1, of the remaining time to a target before predictions are compared with it."""

    ttft: float = 1.0
    tpot: float = 1.0


class Shortage(StrEnum):
    """The resource that is short."""

    PREFILL = "prefill"
    """Too many prompts wait, so the first token would be late."""
    DECODE = "decode"
    """Too many sequences decode: the TPOT of this request or of others would be too high, or the worker has no place in
    its batch or no KV block left."""
    TURN = "turn"
    """There is room, but more urgent requests wait for it."""


@dataclass(frozen=True, slots=True)
class RoomCheck:
    """The result of :func:`check_room`.

    Attributes:
        shortage: ``None`` if there is room.
        over_ms: the predicted TTFT beyond its limit; 0 if it is within.
        ttft_target_ms, tpot_target_ms: the targets of this request. The first counts from its receipt.
        allowed_tpot_ms: the TPOT target with its margin, which later requests must respect.
        has_capacity: the decode worker has a place and KV blocks for it.
        limit_tpot_ms: the limit for the prediction: ``allowed_tpot_ms``, or less if others on the worker are stricter.
        is_near_ttft, is_near_tpot: the prediction is near its limit, so that a hit says something about the margin.
        is_lost: the TTFT target of its class cannot be met even on an idle cluster.
        shows_crowd: load causes the shortage. False if the request is lost, or has so little time left that it is late
            although it would wait for others no longer than the slack allows.
    """

    shortage: Shortage | None
    over_ms: float
    ttft_target_ms: float
    tpot_target_ms: float
    allowed_tpot_ms: float
    limit_tpot_ms: float
    has_capacity: bool
    is_near_ttft: bool
    is_near_tpot: bool
    is_lost: bool
    shows_crowd: bool

    @property
    def awaited(self) -> AwaitedRoom:
        """What the request waits for if it is queued."""
        if self.shortage is Shortage.DECODE:
            return AwaitedRoom.DECODE if self.has_capacity else AwaitedRoom.SEAT
        return AwaitedRoom.PREFILL if self.shortage is Shortage.PREFILL else AwaitedRoom.TURN


@dataclass(frozen=True, slots=True)
class _Limits:
    """The limits for the predictions of a request; see :class:`RoomCheck`."""

    ttft_ms: float
    tpot_ms: float
    feasible_ttft_ms: float
    feasible_tpot_ms: float
    is_lost: bool


def _limits(
    slo: SloClass, idle_ttft_ms: float, idle_tpot_ms: float, elapsed_ms: float, slack: float, factors: Factors
) -> _Limits:
    """Computes the limits of a request.

    Args:
        idle_ttft_ms, idle_tpot_ms: the prediction for the best route if nothing else ran.
    """
    target_ms = slo.ttft_s * 1e3
    feasible_ttft_ms = elapsed_ms + idle_ttft_ms * (1 + slack)
    feasible_tpot_ms = idle_tpot_ms * (1 + slack)
    is_lost = elapsed_ms + idle_ttft_ms > target_ms
    if is_lost:
        ttft_ms = feasible_ttft_ms
    else:
        # The elapsed time is certain, so the margin applies to the rest.
        with_margin_ms = elapsed_ms + (target_ms - elapsed_ms) / factors.ttft
        ttft_ms = min(target_ms, max(with_margin_ms, feasible_ttft_ms))
    # A lost request misses its class's targets anyway, so its TPOT needs no margin.
    tpot_ms = max(slo.tpot_s * 1e3 / (1.0 if is_lost else factors.tpot), feasible_tpot_ms)
    return _Limits(ttft_ms, tpot_ms, feasible_ttft_ms, feasible_tpot_ms, is_lost)


def routes_with_room(
    candidates: Candidates,
    slack: float,
    factors: Factors,
    residents_tpot_ms: Callable[[str], float] = lambda _: inf,
) -> dict[str, Bools]:
    """``[num_routes]`` by limit; :func:`check_room` finds no shortage, apart from other requests, where all are kept.

    Args:
        slack, factors: as in :func:`check_room`.
        residents_tpot_ms: as in :func:`check_room`, by decode worker.
    """
    request, forecasts = candidates.request, candidates.forecasts
    idle_ttft_ms, idle_tpot_ms = float(forecasts.idle_ttft_ms.min()), float(forecasts.idle_tpot_ms.min())
    limits = _limits(request.slo, idle_ttft_ms, idle_tpot_ms, request.elapsed_ms, slack, factors)
    in_time = {"TTFT target": forecasts.ttft_ms <= limits.ttft_ms}
    if request.max_tokens == 1:
        return in_time
    workers, num_tokens = candidates.decode_workers, request.num_tokens
    allowed_ms = candidates.by_decode([residents_tpot_ms(one.worker_id) for one in workers])
    return in_time | {
        "TPOT target": forecasts.tpot_ms <= np.minimum(limits.tpot_ms, allowed_ms),
        "seats": candidates.by_decode([one.has_seat for one in workers]) > 0,
        "KV blocks": candidates.by_decode([one.has_kv(num_tokens) for one in workers]) > 0,
    }


def check_room(
    decision: RouteDecision,
    slo: SloClass,
    elapsed_ms: float,
    slack: float,
    factors: Factors,
    *,
    max_tokens: int,
    residents_tpot_ms: float = inf,
    is_idle: bool = False,
    is_crowded: bool = False,
) -> RoomCheck:
    """Checks whether the route meets the request's targets.

    Args:
        elapsed_ms: time since the receipt of the request.
        factors: margins of its class.
        max_tokens: a request for a single token has no TPOT.
        residents_tpot_ms: the strictest allowed TPOT among the sequences on the decode worker.
        is_idle: nothing is in progress, so load cannot cause a shortage.
        is_crowded: other requests that can meet their targets find no room.
    """
    limits = _limits(slo, decision.idle_ttft_ms, decision.idle_tpot_ms, elapsed_ms, slack, factors)
    limit_tpot_ms = min(limits.tpot_ms, residents_tpot_ms)
    shortage = None
    if not is_idle and (decision.ttft_ms > limits.ttft_ms or (limits.is_lost and is_crowded)):
        shortage = Shortage.PREFILL
    elif not is_idle and max_tokens > 1 and (decision.tpot_ms > limit_tpot_ms or not decision.has_capacity):
        shortage = Shortage.DECODE
    return RoomCheck(
        shortage,
        over_ms=max(0.0, decision.ttft_ms - limits.ttft_ms),
        ttft_target_ms=limits.feasible_ttft_ms if limits.is_lost else slo.ttft_s * 1e3,
        tpot_target_ms=max(slo.tpot_s * 1e3, limits.feasible_tpot_ms),
        allowed_tpot_ms=limits.tpot_ms if max_tokens > 1 else inf,
        limit_tpot_ms=limit_tpot_ms,
        has_capacity=decision.has_capacity,
        is_near_ttft=decision.ttft_ms > tuning.NEAR_SHARE * limits.ttft_ms,
        is_near_tpot=decision.tpot_ms > tuning.NEAR_SHARE * limit_tpot_ms,
        is_lost=limits.is_lost,
        shows_crowd=not limits.is_lost
        and (shortage is Shortage.DECODE or (shortage is not None and decision.ttft_ms > limits.feasible_ttft_ms)),
    )


class Shortages:
    """The last time at which a request that could meet its targets found no room, by priority. It reads no clock.

    Lost requests do not count: they find no room because others find none.
    """

    def __init__(self) -> None:
        self._by_priority: dict[int, float] = {}

    def note(self, priority: int, now_s: float) -> None:
        """Records that a request of this priority found no room."""
        self._by_priority[priority] = now_s

    def lasts(self, now_s: float, *, waiting: bool, above: float = -inf) -> bool:
        """Whether a request of a priority higher than ``above`` has recently found no room.

        Args:
            waiting: True if the answer is for a request that waits already.
        """
        return now_s < self._latest_s(above) + (tuning.SHORTAGE_WAITING_S if waiting else tuning.SHORTAGE_S)

    def left_s(self, now_s: float) -> float:
        """Seconds until :meth:`lasts` is False for waiting requests of any priority; 0 if it is False now."""
        return max(0.0, self._latest_s(-inf) + tuning.SHORTAGE_WAITING_S - now_s)

    def _latest_s(self, above: float) -> float:
        return max((at_s for priority, at_s in self._by_priority.items() if priority > above), default=-inf)

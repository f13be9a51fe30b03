"""Errors of refused requests. They name the busy pool, the predicted wait and the time to retry."""

from __future__ import annotations

from enum import StrEnum

from baton.core.errors import OverloadedError
from baton.core.slo import SloClass
from cluster.admission import tuning
from cluster.admission.room import RoomCheck, Shortage
from cluster.routing.routing_contracts import RouteDecision

_SHORTEST_SHOWN_S = 0.1


class Refusal(StrEnum):
    """The reason of a refusal, which is also the value of a metric's label."""

    PREFILL = str(Shortage.PREFILL)
    DECODE = str(Shortage.DECODE)
    TURN = str(Shortage.TURN)
    QUEUE_FULL = "queue_full"
    QUEUE_DEADLINE = "queue_deadline"
    STOPPING = "stopping"


def no_room(
    slo: SloClass, check: RoomCheck, decision: RouteDecision, wait_s: float, allowed_s: float
) -> OverloadedError:
    """Error of a request that would wait longer than its class and its own deadline allow.

    Args:
        wait_s: the predicted wait.
        allowed_s: 0 if the request may not wait.
    """
    reason = Refusal(check.shortage or Shortage.TURN)
    if reason is Refusal.TURN:
        problem = f"More urgent requests are queued ahead of this request of the SLO class {slo.name!r}"
    elif reason is Refusal.DECODE and not check.has_capacity:
        problem = (
            "The decode pool is full: no worker has enough free KV blocks and batch slots for the SLO "
            f"class {slo.name!r}"
        )
    elif reason is Refusal.DECODE:
        problem = (
            f"The decode pool is full: the predicted TPOT is {decision.tpot_ms:.0f} ms, and the limit of the SLO "
            f"class {slo.name!r} or of running requests is {check.limit_tpot_ms:.0f} ms"
        )
    elif check.is_lost and not check.over_ms:
        problem = (
            f"The predicted TTFT is {decision.ttft_ms:.0f} ms, no other route would meet the target of the SLO class "
            f"{slo.name!r}, and requests that can meet their targets leave no capacity"
        )
    elif check.is_lost:
        problem = (
            f"The prefill pool is full: the predicted TTFT is {decision.ttft_ms:.0f} ms. No route would meet the "
            f"target of the SLO class {slo.name!r}, and the limit of such a request is {check.ttft_target_ms:.0f} ms"
        )
    else:
        limit_ms = decision.ttft_ms - check.over_ms
        margin = f" ({limit_ms:.0f} ms with the prediction margin)" if limit_ms < check.ttft_target_ms else ""
        problem = (
            f"The prefill pool is full: the predicted TTFT is {decision.ttft_ms:.0f} ms, and the target of the "
            f"SLO class {slo.name!r} is {check.ttft_target_ms:.0f} ms{margin}"
        )
    allowed = f"may wait for {_seconds(allowed_s)} only" if allowed_s else "does not wait (queue_deadline)"
    advice = (
        f"Capacity is expected in {_seconds(wait_s, 'about ')}, but this request {allowed}. Try again later, or use a "
        "class with wider targets."
    )
    return _overloaded(f"{problem}. {advice}", reason, wait_s, allowed_s)


def queue_full(slo: SloClass, max_queued: int, wait_s: float) -> OverloadedError:
    """Error of the least urgent request when the queue is full."""
    return _overloaded(
        f"{max_queued} requests are queued, which is the limit of admission.max_queued, and this request of the "
        f"SLO class {slo.name!r} is the least urgent. Try again later.",
        Refusal.QUEUE_FULL,
        wait_s,
        slo.queue_deadline_s,
    )


def deadline_exceeded(slo: SloClass, waited_s: float, wait_s: float) -> OverloadedError:
    """Error of a request that has waited as long as its class or its own deadline allows."""
    return _overloaded(
        f"This request waited {_seconds(waited_s)}, its limit, and no capacity became available (queue_deadline of the "
        f"SLO class {slo.name!r}, or router.request_timeout_s). Try again later.",
        Refusal.QUEUE_DEADLINE,
        wait_s,
        slo.queue_deadline_s,
    )


def stopping() -> OverloadedError:
    """Error of requests that arrive, wait, or still run when the router stops."""
    return OverloadedError(
        "The router is stopping, and ends the requests that it has. Send the request again once a router is running.",
        retry_after_s=1.0,
        reason=str(Refusal.STOPPING),
    )


def _seconds(duration_s: float, about: str = "") -> str:
    return (
        f"{about}{round(duration_s, 1):g} s" if duration_s >= _SHORTEST_SHOWN_S else f"less than {_SHORTEST_SHOWN_S} s"
    )


def _overloaded(message: str, reason: Refusal, wait_s: float, allowed_s: float) -> OverloadedError:
    retry_after_s = min(tuning.LONGEST_RETRY_S, max(1.0, wait_s - allowed_s))
    return OverloadedError(message, retry_after_s=retry_after_s, reason=str(reason), predicted_wait_s=wait_s)

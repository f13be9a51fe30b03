"""The events of a request's life, and how the router reports them to everything that follows requests.

arrived ── accepted ─┬─▶ placed ── first_token ── tokens … ─┬─▶ ended
                     └────────── attempt_failed ◀───────────┘
arrived ── ended                            turned away by router.max_inflight
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from baton.core.errors import BatonError
from baton.core.logs import RequestLog
from baton.rpc.wire import worker_pb2
from cluster.requests.request_record import RequestRecord

logger = logging.getLogger(__name__)


class RequestObserver:
    """Base class of observers. Subclasses override the events that they need. Methods are synchronous and fast."""

    def arrived(self, record: RequestRecord) -> None:
        """The router received a request, which it may turn away."""

    def accepted(self, record: RequestRecord) -> None:
        """The request is in flight and waits for workers."""

    def placed(self, record: RequestRecord) -> None:
        """Workers were chosen for an attempt; ``record.booking`` names them."""

    def first_token(self, record: RequestRecord) -> None:
        """The first token arrived. Called at most once per request, before ``tokens``."""

    def tokens(self, record: RequestRecord, num_tokens: int) -> None:
        """Tokens arrived at ``record.last_tokens_s``; ``record.token_ids`` ends with them."""

    def handed_off(self, record: RequestRecord, result: worker_pb2.HandoffResult) -> None:
        """The KV transfer succeeded or failed. May be called after ``ended``."""

    def attempt_failed(self, record: RequestRecord, error: BatonError) -> None:
        """An attempt failed, and another one follows."""

    def ended(self, record: RequestRecord) -> None:
        """The request ended; ``record.outcome`` says how."""


class RequestObservers:
    """Passes every event to several observers, in order.

    An observer that raises never breaks a request: the exception is logged with the request's id, and the other
    observers are called.
    """

    def __init__(self, observers: Iterable[RequestObserver] = ()) -> None:
        all_observers = tuple(observers)
        self._arrived = [one.arrived for one in all_observers if _overrides(one, "arrived")]
        self._accepted = [one.accepted for one in all_observers if _overrides(one, "accepted")]
        self._placed = [one.placed for one in all_observers if _overrides(one, "placed")]
        self._first_token = [one.first_token for one in all_observers if _overrides(one, "first_token")]
        self._tokens = [one.tokens for one in all_observers if _overrides(one, "tokens")]
        self._handed_off = [one.handed_off for one in all_observers if _overrides(one, "handed_off")]
        self._attempt_failed = [one.attempt_failed for one in all_observers if _overrides(one, "attempt_failed")]
        self._ended = [one.ended for one in all_observers if _overrides(one, "ended")]

    def arrived(self, record: RequestRecord) -> None:
        _notify(self._arrived, record)

    def accepted(self, record: RequestRecord) -> None:
        _notify(self._accepted, record)

    def placed(self, record: RequestRecord) -> None:
        _notify(self._placed, record)

    def first_token(self, record: RequestRecord) -> None:
        _notify(self._first_token, record)

    def tokens(self, record: RequestRecord, num_tokens: int) -> None:
        _notify(self._tokens, record, num_tokens)

    def handed_off(self, record: RequestRecord, result: worker_pb2.HandoffResult) -> None:
        _notify(self._handed_off, record, result)

    def attempt_failed(self, record: RequestRecord, error: BatonError) -> None:
        _notify(self._attempt_failed, record, error)

    def ended(self, record: RequestRecord) -> None:
        _notify(self._ended, record)


def _overrides(observer: RequestObserver, event: str) -> bool:
    return getattr(type(observer), event) is not getattr(RequestObserver, event)


def _notify(callbacks: list[Callable[..., None]], record: RequestRecord, *details: Any) -> None:
    for callback in callbacks:
        try:
            callback(record, *details)
        except Exception:
            log = RequestLog(logger, record.request.request_id)
            log.exception("an observer of requests failed")

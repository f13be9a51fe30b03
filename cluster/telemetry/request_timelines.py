"""Completes the timeline of each request with the router's record, and stores the timelines."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.core.errors import BatonError
from baton.core.slo import target_attributes
from baton.core.timeline import FailedAttempt
from baton.explain.timelines import TimelineStore
from cluster.requests.request_observers import RequestObserver
from cluster.requests.request_record import RequestRecord


class RequestTimelines(RequestObserver):
    """Completes and stores timelines. It must be the first observer, since others read finished timelines.

    Args:
        store: keeps the timelines of requests that were accepted.
        clock: monotonic seconds, as in the timelines.
    """

    def __init__(self, store: TimelineStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock

    def accepted(self, record: RequestRecord) -> None:
        request = record.request
        record.timeline.attributes.update(target_attributes(request.slo), prompt_tokens=len(request.prompt_token_ids))
        self._store.add(record.timeline)

    def placed(self, record: RequestRecord) -> None:
        if record.attempt > 1:
            record.timeline.resume(self._clock())

    def attempt_failed(self, record: RequestRecord, error: BatonError) -> None:
        record.timeline.failed_attempts.append(FailedAttempt(self._clock(), error.code))

    def ended(self, record: RequestRecord) -> None:
        timeline, outcome = record.timeline, str(record.outcome)
        if not record.was_accepted:
            timeline.attributes.update(target_attributes(record.request.slo), outcome=outcome)
            return
        timeline.attributes.update(
            output_tokens=len(record.token_ids),
            cached_tokens=record.num_cached_tokens,
            drafted_tokens=record.num_drafted,
            accepted_tokens=record.num_accepted,
            attempts=record.attempt,
            outcome=outcome,
        )
        timeline.drafts = record.drafts
        _add_outcome(record)


def _add_outcome(record: RequestRecord) -> None:
    """Adds the outcome of the decision to the routing record of the timeline; JSON-ready."""
    timeline = record.timeline
    if not timeline.routing:
        return
    ttft_ms, tpot_ms = timeline.ttft_ms, timeline.tpot_ms(len(record.token_ids))
    timeline.routing = {
        **timeline.routing,
        "actual": {
            "prefill": timeline.attributes.get("prefill_worker"),
            "decode": timeline.attributes.get("decode_worker"),
            "cached_tokens": timeline.attributes.get("cached_tokens"),
            "ttft_ms": None if ttft_ms is None else round(ttft_ms, 2),
            "tpot_ms": None if tpot_ms is None else round(tpot_ms, 3),
        },
    }

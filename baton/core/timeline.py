"""A request's lifecycle as named events on one monotonic clock, and the durations between them. No torch here.

Every process records its own events with ``time.monotonic()``. The router shifts a worker's events onto its own clock
with an offset that it measures (see ``cluster/registry/worker_client.py``), so that one waterfall shows them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from baton.core.rounds import RoundLog
from baton.core.step_log import StepLog


class Event(StrEnum):
    """Every lifecycle event, in the order of a request that goes well."""

    RECEIVED = "received"
    """The request's first bytes reached this machine."""
    ACCEPTED = "accepted"
    """The HTTP server started to handle it."""
    PARSED = "parsed"
    """The request's body was read and is JSON."""
    TOKENIZED = "tokenized"
    ADMITTED = "admitted"
    """The router accepted the sequence."""
    DISPATCHED = "dispatched"
    """The request left the router's queue. Requests that did not wait there lack this event."""
    ROUTED = "routed"
    PREFILL_QUEUED = "prefill_queued"
    PREFILL_STARTED = "prefill_started"
    FIRST_TOKEN_SAMPLED = "first_token_sampled"
    FIRST_TOKEN = "first_token"
    """The first token reached the router."""
    FIRST_TOKEN_SENT = "first_token_sent"
    """The first token was sent to a streaming client."""
    TRANSFER_STARTED = "transfer_started"
    """The prefill worker asked the decode worker for blocks."""
    TRANSFER_RESERVED = "transfer_reserved"
    KV_COMMITTED = "kv_committed"
    """The decode worker has all KV."""
    TRANSFER_ACKNOWLEDGED = "transfer_acknowledged"
    """The prefill worker received the acknowledgement and frees its blocks."""
    DECODE_RECEIVED = "decode_received"
    """The decode worker received the request; it may still wait for the KV."""
    DECODE_QUEUED = "decode_queued"
    DECODE_STARTED = "decode_started"
    SECOND_TOKEN = "second_token"
    FINISHED = "finished"
    """The router received the last token."""
    DETOKENIZED = "detokenized"
    """The last text was decoded."""
    RESPONDED = "responded"
    """The other sequences of the request finished too; only where there are any."""
    SENT = "sent"
    """The last byte was written to the connection."""


# (span, from, to): the rows of the waterfall. Spans overlap where the work does.
SPANS: tuple[tuple[str, Event, Event], ...] = (
    ("tokenize", Event.RECEIVED, Event.TOKENIZED),
    ("route", Event.TOKENIZED, Event.ROUTED),
    ("queue", Event.PREFILL_QUEUED, Event.PREFILL_STARTED),
    ("prefill", Event.PREFILL_STARTED, Event.FIRST_TOKEN_SAMPLED),
    ("first_token", Event.RECEIVED, Event.FIRST_TOKEN),
    ("reserve", Event.TRANSFER_STARTED, Event.TRANSFER_RESERVED),
    ("transfer", Event.TRANSFER_STARTED, Event.KV_COMMITTED),
    ("decode_queue", Event.DECODE_QUEUED, Event.DECODE_STARTED),
    ("decode", Event.FIRST_TOKEN, Event.FINISHED),
    ("total", Event.RECEIVED, Event.FINISHED),
)


class AwaitedRoom(StrEnum):
    """What a request in the admission queue waited for: the attribute ``admission_waited_for`` of its timeline."""

    PREFILL = "prefill"
    """Fewer prompts ahead of its first token."""
    DECODE = "decode"
    """Fewer sequences on the decode workers, for its TPOT or theirs."""
    SEAT = "seat"
    """A place in the batch of a decode worker, and free KV blocks."""
    TURN = "turn"
    """Requests that came before it or are more urgent."""
    GATHERING = "gathering"
    """Other prompts, to share the step that computes it."""


@dataclass(frozen=True, slots=True)
class TransferPart:
    """A part of a hand-off's KV, or several parts merged.

    Attributes:
        started_s: when it was read from the cache.
        sent_s: when the transport took it.
        acknowledged_s: when the sender learned that the receiver had written it; 0 before that.
    """

    num_bytes: int
    num_parts: int
    started_s: float
    sent_s: float
    acknowledged_s: float

    def to_dict(self, origin_s: float) -> dict[str, int | float | None]:
        """Returns a JSON-ready dict; times are milliseconds since ``origin_s``."""
        acknowledged = round((self.acknowledged_s - origin_s) * 1e3, 3) if self.acknowledged_s else None
        return {
            "bytes": self.num_bytes,
            "parts": self.num_parts,
            "start_ms": round((self.started_s - origin_s) * 1e3, 3),
            "sent_ms": round((self.sent_s - origin_s) * 1e3, 3),
            "acknowledged_ms": acknowledged,
        }


@dataclass(slots=True)
class DraftCounts:
    """Counts of the tokens that a speculation method guessed for a request and that were verified."""

    num_drafted: int = 0
    num_accepted: int = 0

    def to_dict(self) -> dict[str, int]:
        return {"drafted_tokens": self.num_drafted, "accepted_tokens": self.num_accepted}


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt of the router that failed and was retried.

    Attributes:
        resumed_s: when the next attempt had its workers; ``None`` before that, or if it never got them.
    """

    failed_s: float
    error: str
    resumed_s: float | None = None


@dataclass(slots=True)
class Timeline:
    """Events of one request, in seconds of the local monotonic clock, with related facts.

    Attributes:
        prefill_steps, decode_steps: the engine steps that the sequence took part in.
        parts: parts of the hand-off; the sender bounds their number.
        drafts: counts of guessed tokens by speculation method; set when the request ends.
        routing: how the workers were chosen, JSON-ready; see ``docs/routing.md``.
        rounds: what was drafted and accepted; ``None`` unless the request is traced.
        group: id of the HTTP request, if that has several sequences.
        clock: returns monotonic seconds; a simulation brings its own.
    """

    request_id: str
    events: dict[Event, float] = field(default_factory=dict)
    attributes: dict[str, str | int | float | bool] = field(default_factory=dict)
    prefill_steps: StepLog = field(default_factory=StepLog)
    decode_steps: StepLog = field(default_factory=StepLog)
    parts: list[TransferPart] = field(default_factory=list)
    failed_attempts: list[FailedAttempt] = field(default_factory=list)
    drafts: Mapping[str, DraftCounts] = field(default_factory=dict)
    routing: Mapping[str, object] = field(default_factory=dict)
    rounds: RoundLog | None = None
    group: str | None = None
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)

    def record(self, event: Event, at_s: float | None = None) -> None:
        """Keeps the first time of each event, so that a retry does not hide what came before it."""
        self.events.setdefault(event, self.clock() if at_s is None else at_s)

    def replace(self, event: Event, at_s: float | None = None) -> None:
        """Overwrites an event that a retry repeated."""
        self.events[event] = self.clock() if at_s is None else at_s

    def resume(self, at_s: float) -> None:
        """Records that the attempt after the last failed one has its workers."""
        last = self.failed_attempts[-1]
        self.failed_attempts[-1] = FailedAttempt(last.failed_s, last.error, at_s)

    def between_ms(self, start: Event, end: Event) -> float | None:
        """Milliseconds from ``start`` to ``end``, or ``None`` while either is missing."""
        if start not in self.events or end not in self.events:
            return None
        return (self.events[end] - self.events[start]) * 1e3

    @property
    def origin_s(self) -> float:
        """When the request was received, or its first event; 0 without events."""
        return self.events.get(Event.RECEIVED, min(self.events.values(), default=0.0))

    @property
    def queue_ms(self) -> float | None:
        return self.between_ms(Event.PREFILL_QUEUED, Event.PREFILL_STARTED)

    @property
    def prefill_ms(self) -> float | None:
        return self.between_ms(Event.PREFILL_STARTED, Event.FIRST_TOKEN_SAMPLED)

    @property
    def transfer_ms(self) -> float | None:
        return self.between_ms(Event.TRANSFER_STARTED, Event.KV_COMMITTED)

    @property
    def ttft_ms(self) -> float | None:
        return self.between_ms(Event.RECEIVED, Event.FIRST_TOKEN)

    @property
    def total_ms(self) -> float | None:
        return self.between_ms(Event.RECEIVED, Event.FINISHED)

    def tpot_ms(self, num_output_tokens: int) -> float | None:
        """Mean milliseconds per output token after the first."""
        decode_ms = self.between_ms(Event.FIRST_TOKEN, Event.FINISHED)
        if decode_ms is None or num_output_tokens < 2:
            return None
        return decode_ms / (num_output_tokens - 1)

    def to_dict(self) -> dict[str, object]:
        """Returns events, spans, steps and parts, JSON-ready; times are milliseconds since the request was received.

        :mod:`baton.explain.blame` derives the stages from them.
        """
        origin = self.origin_s
        return {
            "request_id": self.request_id,
            "events": [
                {"name": str(event), "at_ms": round((at_s - origin) * 1e3, 3)}
                for event, at_s in sorted(self.events.items(), key=lambda item: item[1])
            ],
            "spans": [
                {
                    "name": name,
                    "start_ms": round((self.events[start] - origin) * 1e3, 3),
                    "duration_ms": round((self.events[end] - self.events[start]) * 1e3, 3),
                }
                for name, start, end in SPANS
                if start in self.events and end in self.events
            ],
            "prefill_steps": self.prefill_steps.to_dict(origin),
            "decode_steps": self.decode_steps.to_dict(origin),
            "transfer_parts": [part.to_dict(origin) for part in self.parts],
            "failed_attempts": [
                {
                    "at_ms": round((attempt.failed_s - origin) * 1e3, 3),
                    "error": attempt.error,
                    "resumed_ms": None if attempt.resumed_s is None else round((attempt.resumed_s - origin) * 1e3, 3),
                }
                for attempt in self.failed_attempts
            ],
            "drafts": {method: counts.to_dict() for method, counts in self.drafts.items()},
            "attributes": dict(self.attributes),
            "routing": dict(self.routing),
            **({} if self.rounds is None else {"speculation": self.rounds.to_dict()}),
        }

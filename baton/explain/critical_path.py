"""Splits a request's time into consecutive stages that add up to it exactly. No torch.

Work for a request overlaps: its KV is sent while its prompt is computed, and text is sent while the next token is
computed. A stage is what the request waited for at a moment, from its first byte to the last byte of its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from baton.core.step_log import StepLog, StepRow
from baton.core.timeline import Event, Timeline


class Stage(StrEnum):
    """The stages of a request, in the order without failures."""

    ACCEPT = "accept"
    """Waiting in the connection's buffer and the HTTP server, until the application begins."""
    PARSE = "parse"
    """Reading and parsing the body, including the wait for the client to send it."""
    TOKENIZE = "tokenize"
    ADMIT = "admit"
    """Waiting for the router to accept the sequence. Further choices of a prompt wait here for the first one."""
    ADMISSION_QUEUE = "admission_queue"
    """Waiting in the router's queue, until a route has room or the request is refused."""
    ROUTE = "route"
    """Choosing workers, at first or after a failure. It is short unless a pool has no worker."""
    TO_PREFILL = "to_prefill"
    """Delivery of the request to the prefill worker."""
    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    """Steps that compute the prompt."""
    PREFILL_WAIT = "prefill_wait"
    """Waiting between these steps."""
    FIRST_TOKEN_DELIVERY = "first_token_delivery"
    """Delivery of the first token from the prefill worker's engine to the router."""
    FIRST_TOKEN_SEND = "first_token_send"
    """Sending of the first token from the router to the client."""
    TO_DECODE = "to_decode"
    """Delivery of the request to the decode worker."""
    KV_WAIT = "kv_wait"
    """Waiting for the KV on the decode worker."""
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"
    """Steps that produce tokens."""
    DECODE_WAIT = "decode_wait"
    """Waiting between these steps."""
    RECOMPUTE = "recompute"
    """Steps of the decode worker that recompute known tokens after a preemption or a failure."""
    RETRY = "retry"
    """Time lost with a failed attempt."""
    TOKEN_DELIVERY = "token_delivery"
    """Delivery of the last tokens from the decode worker's engine to the router."""
    DETOKENIZE = "detokenize"
    """Detokenizing the last tokens. Detokenizing earlier tokens overlaps with later work."""
    OTHER_SEQUENCES = "other_sequences"
    """Waiting for the other sequences of the request."""
    SEND = "send"
    """Sending, until the last byte is handed to the connection."""


@dataclass(frozen=True, slots=True)
class Segment:
    """An interval in one stage, in seconds of the timeline's clock."""

    stage: Stage
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class StageTime:
    """The total of a stage's segments."""

    stage: Stage
    start_s: float
    seconds: float
    num_segments: int


def critical_path(timeline: Timeline) -> list[Segment]:
    """Segments without gaps or overlaps, from the request's receipt to its last event. Empty ones are left out.

    Events of other processes are placed by the measured offset of their clocks. An error of the offset shifts time
    between neighbouring stages, but does not change the sum.
    """
    if not timeline.events:
        return []
    end_s = timeline.events.get(Event.SENT, max(timeline.events.values()))
    return _Cutter(timeline, timeline.origin_s, end_s).cut()


def between_steps(timeline: Timeline, start_s: float, end_s: float) -> list[Segment]:
    """The stages of a sequence between two of its decode steps."""
    return _Cutter(timeline, start_s, end_s).between_steps()


def stage_times(segments: Sequence[Segment]) -> list[StageTime]:
    """Totals by stage, in the order in which stages first appear."""
    totals: dict[Stage, StageTime] = {}
    for segment in segments:
        before = totals.get(segment.stage, StageTime(segment.stage, segment.start_s, 0.0, 0))
        totals[segment.stage] = StageTime(
            segment.stage, before.start_s, before.seconds + segment.seconds, before.num_segments + 1
        )
    return list(totals.values())


def within(segments: Sequence[Segment], start_s: float, end_s: float) -> Iterator[Segment]:
    """The parts of the segments that lie between two moments."""
    for segment in segments:
        clipped = Segment(segment.stage, max(segment.start_s, start_s), min(segment.end_s, end_s))
        if clipped.seconds > 0:
            yield clipped


class _Cutter:
    """Walks through a request's events in order, and assigns each interval to a stage."""

    def __init__(self, timeline: Timeline, start_s: float, end_s: float) -> None:
        self._timeline = timeline
        self._events = timeline.events
        self._failures = sorted(timeline.failed_attempts, key=lambda attempt: attempt.failed_s)
        self._now_s = start_s
        self._end_s = end_s
        self._segments: list[Segment] = []

    def cut(self) -> list[Segment]:
        self._arrival()
        self._prefill()
        self._decode()
        self._answer()
        return self._segments

    def between_steps(self) -> list[Segment]:
        was_lost = self._take_over(self._end_s)
        self._until(Stage.DECODE_QUEUE if was_lost else Stage.DECODE_WAIT, self._end_s)
        return self._segments

    def _arrival(self) -> None:
        for stage, event in (
            (Stage.ACCEPT, Event.ACCEPTED),
            (Stage.PARSE, Event.PARSED),
            (Stage.TOKENIZE, Event.TOKENIZED),
            (Stage.ADMIT, Event.ADMITTED),
            (Stage.ADMISSION_QUEUE, Event.DISPATCHED),
        ):
            self._until(stage, self._events.get(event))
        self._lose_attempts(self._events.get(Event.FIRST_TOKEN, self._end_s))
        self._until(Stage.ROUTE, self._events.get(Event.ROUTED))

    def _prefill(self) -> None:
        queued_s = self._events.get(Event.PREFILL_QUEUED)
        self._until(Stage.TO_PREFILL, queued_s)
        self._until(Stage.PREFILL_QUEUE, self._events.get(Event.PREFILL_STARTED))
        # Steps of a failed attempt precede this one's arrival and count as lost time already.
        self._steps(self._timeline.prefill_steps, Stage.PREFILL_QUEUE, Stage.PREFILL, Stage.PREFILL_WAIT, Stage.PREFILL)
        if not self._timeline.prefill_steps:
            self._until(Stage.PREFILL, self._events.get(Event.FIRST_TOKEN_SAMPLED))
        self._until(Stage.FIRST_TOKEN_DELIVERY, self._events.get(Event.FIRST_TOKEN))

    def _decode(self) -> None:
        events, log = self._events, self._timeline.decode_steps
        first = next(iter(log), None)
        begins_s = self._end_s if first is None else first.started_s
        received_s = events.get(Event.DECODE_RECEIVED)
        sent_s = events.get(Event.FIRST_TOKEN_SENT)
        if sent_s is not None and (received_s is None or sent_s <= received_s):
            self._until(Stage.FIRST_TOKEN_SEND, sent_s)
        self._lose_attempts(begins_s)
        for stage, at_s in (
            (Stage.TO_DECODE, received_s),
            (Stage.KV_WAIT, events.get(Event.KV_COMMITTED)),
            (Stage.KV_WAIT, events.get(Event.DECODE_QUEUED)),
        ):
            # Events after the first step belong to a later attempt.
            if at_s is not None and at_s <= begins_s:
                self._until(stage, at_s)
        self._steps(log, Stage.DECODE_QUEUE, Stage.DECODE, Stage.DECODE_WAIT, Stage.RECOMPUTE)

    def _answer(self) -> None:
        finished_s = self._events.get(Event.FINISHED)
        delivery = Stage.TOKEN_DELIVERY if self._timeline.decode_steps else Stage.FIRST_TOKEN_DELIVERY
        if self._take_over(self._end_s if finished_s is None else finished_s):
            delivery = Stage.DECODE_QUEUE
        if self._failures and self._failures[-1].resumed_s is None and self._now_s <= self._failures[-1].failed_s:
            delivery = Stage.ROUTE  # no other worker took over
        self._until(delivery, finished_s)
        self._until(Stage.DETOKENIZE, self._events.get(Event.DETOKENIZED))
        self._until(Stage.OTHER_SEQUENCES, self._events.get(Event.RESPONDED))
        self._until(Stage.SEND, self._end_s)

    def _steps(self, log: StepLog, queue: Stage, busy: Stage, wait: Stage, again: Stage) -> None:
        before: Stage = queue
        for row in log:
            if self._take_over(row.started_s):
                before = queue
            self._until(before, row.started_s)
            self._busy(row, again if row.recomputes else busy, wait)
            before = wait

    def _busy(self, row: StepRow, busy: Stage, wait: Stage) -> None:
        """Adds a step. Merged steps count as their busy time first and the time between them after it."""
        if row.num_steps <= 1:
            self._until(busy, row.ended_s)
            return
        self._until(busy, min(self._now_s + row.busy_s, row.ended_s))
        self._until(wait, row.ended_s)

    def _take_over(self, before_s: float) -> bool:
        """Adds attempts lost before a moment in decode, and the way to the next worker. Returns True if any."""
        was_lost, received_s = self._lose_attempts(before_s), self._events.get(Event.DECODE_RECEIVED)
        # Only the arrival of the last attempt is known.
        if was_lost and received_s is not None and received_s <= before_s:
            self._until(Stage.TO_DECODE, received_s)
        return was_lost

    def _lose_attempts(self, before_s: float) -> bool:
        """Adds the lost time up to each failure before a moment, and the wait for another worker after it."""
        began_s = self._now_s
        for failure in self._failures:
            if failure.failed_s > before_s:
                break
            self._until(Stage.RETRY, failure.failed_s)
            self._until(Stage.ROUTE, failure.resumed_s)
        return self._now_s > began_s

    def _until(self, stage: Stage, at_s: float | None) -> None:
        if at_s is None:
            return
        at_s = min(at_s, self._end_s)
        if at_s > self._now_s:
            self._segments.append(Segment(stage, self._now_s, at_s))
            self._now_s = at_s

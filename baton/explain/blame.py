"""Finds the stage to blame for a request's time to first token and for its slowest gap between tokens. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.step_log import StepRow
from baton.core.timeline import Event, FailedAttempt, Timeline
from baton.explain.blame_texts import Reason, reason_for, slow_step_reason, wait_reason
from baton.explain.critical_path import Segment, Stage, StageTime, between_steps, critical_path, stage_times, within


@dataclass(frozen=True, slots=True)
class Blame:
    """An interval of a request's time, and the stage that took most of it.

    Attributes:
        stages: the stages in the interval.
        token: number of the output token that ended it, from 1.
    """

    start_s: float
    seconds: float
    stages: Sequence[StageTime]
    token: int
    worst: StageTime
    reason: Reason

    def to_dict(self, origin_s: float, sentence: str) -> dict[str, object]:
        """JSON-ready; times in milliseconds since ``origin_s``."""
        return {
            "start_ms": round((self.start_s - origin_s) * 1e3, 3),
            "duration_ms": round(self.seconds * 1e3, 3),
            "token": self.token,
            "stage": str(self.worst.stage),
            "stage_ms": round(self.worst.seconds * 1e3, 3),
            "sentence": sentence,
            "hint": self.reason.hint,
            "stages": _stages_to_dict(self.stages, origin_s),
        }


def explain(timeline: Timeline) -> dict[str, object]:
    """The stages that add up to the request's time, and the stages to blame; JSON-ready. Missing parts are ``None``.

    ``stages`` and ``total_ms`` end with the last byte of the answer, or else with the last event.
    """
    segments, origin_s = critical_path(timeline), timeline.origin_s
    first, gap = blame_first_token(timeline, segments), blame_slowest_gap(timeline, segments)
    return {
        "total_ms": round(sum(segment.seconds for segment in segments) * 1e3, 3),
        "stages": _stages_to_dict(stage_times(segments), origin_s),
        "time_to_first_token": None if first is None else first.to_dict(origin_s, _first_sentence(first)),
        "slowest_gap": None if gap is None else gap.to_dict(origin_s, _gap_sentence(gap)),
    }


def blame_first_token(timeline: Timeline, segments: Sequence[Segment]) -> Blame | None:
    """Blame from the receipt of a request until its first token was sent, or reached the router if not streamed."""
    end_s = timeline.events.get(Event.FIRST_TOKEN_SENT, timeline.events.get(Event.FIRST_TOKEN))
    if end_s is None:
        return None
    stages = stage_times(list(within(segments, timeline.origin_s, end_s)))
    if not stages:
        return None
    worst = max(stages, key=lambda stage: stage.seconds)
    reason = reason_for(worst.stage, timeline, _failures(timeline, timeline.origin_s, end_s))
    return Blame(timeline.origin_s, end_s - timeline.origin_s, stages, 1, worst, reason)


def blame_slowest_gap(timeline: Timeline, segments: Sequence[Segment]) -> Blame | None:
    """Blame for the longest time without a new token at the router; ``None`` with fewer than two tokens."""
    found = timeline.decode_steps.slowest_gap()
    if found is None or found[0].gap_s <= 0:
        return None
    row, before = found
    start_s = row.received_s - row.gap_s
    stages = _gap_stages(timeline, segments, row, start_s)
    worst = max(stages, key=lambda stage: stage.seconds)
    if worst.stage is Stage.DECODE:
        reason = slow_step_reason(timeline, row)
    elif worst.stage is Stage.DECODE_WAIT and before is not None:
        reason = wait_reason(timeline, row, before)
    else:
        reason = reason_for(worst.stage, timeline, _failures(timeline, start_s, row.received_s))
    return Blame(start_s, row.gap_s, stages, int(row.first_token) + 1, worst, reason)


def _gap_stages(timeline: Timeline, segments: Sequence[Segment], row: StepRow, start_s: float) -> list[StageTime]:
    rest = timeline.decode_steps.rest
    delivery_s = min(row.gap_s, max(0.0, row.received_s - row.ended_s))
    delivery = StageTime(Stage.TOKEN_DELIVERY, row.received_s - delivery_s, delivery_s, 1)
    if not rest or row.started_s < rest[0].started_s:
        return [*stage_times(list(within(segments, start_s, row.ended_s))), delivery]
    # Segments of merged steps have no exact times, but the step itself does.
    step_s = min(row.busy_s, row.gap_s - delivery_s)
    wait_s = row.gap_s - delivery_s - step_s
    busy = Stage.RECOMPUTE if row.recomputes else Stage.DECODE
    return [
        *stage_times(between_steps(timeline, start_s, start_s + wait_s)),
        StageTime(busy, start_s + wait_s, step_s, 1),
        delivery,
    ]


def _failures(timeline: Timeline, start_s: float, end_s: float) -> list[FailedAttempt]:
    return [attempt for attempt in timeline.failed_attempts if start_s <= attempt.failed_s <= end_s]


def _first_sentence(blame: Blame) -> str:
    return (
        f"The first token took {_ms(blame.seconds)}, of which {_ms(blame.worst.seconds)} were spent in one stage: "
        f"{blame.reason.clause}."
    )


def _gap_sentence(blame: Blame) -> str:
    return (
        f"The slowest gap was {_ms(blame.seconds)} before token {blame.token}, of which "
        f"{_ms(blame.worst.seconds)} were "
        f"spent in one stage: {blame.reason.clause}."
    )


def _ms(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _stages_to_dict(stages: Sequence[StageTime], origin_s: float) -> list[dict[str, object]]:
    return [
        {
            "name": str(stage.stage),
            "start_ms": round((stage.start_s - origin_s) * 1e3, 3),
            "duration_ms": round(stage.seconds * 1e3, 3),
            "count": stage.num_segments,
        }
        for stage in stages
    ]

"""Stages follow one another without gap or overlap, whatever the events are, and each moment has the right name."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.critical_path import Stage, critical_path, stage_times, within
from engine.step_log import StepLog
from engine.timeline import Event, FailedAttempt, Timeline


def add_step(log: StepLog, started_s: float, ended_s: float, *, index: int = 1, **changes: float) -> None:
    values: dict[str, float] = {
        "step_index": index, "started_s": started_s, "ended_s": ended_s, "busy_s": ended_s - started_s, "draft_s": 0.0,
        "num_steps": 1, "num_computed": 1, "num_emitted": 1, "num_drafted": 0, "num_accepted": 0, "num_sequences": 1,
        "num_batch_tokens": 1, "num_prompt_tokens": 0, "received_s": ended_s, "first_token": 1,
    }  # fmt: skip
    log.add(**{**values, **changes})  # type: ignore[arg-type]


def served() -> Timeline:
    """A request that goes well: every stage takes a time of its own, in whole seconds."""
    timeline = Timeline("r")
    for event, at_s in {
        Event.RECEIVED: 0, Event.ACCEPTED: 1, Event.PARSED: 3, Event.TOKENIZED: 6, Event.ADMITTED: 10, Event.ROUTED: 15,
        Event.PREFILL_QUEUED: 21, Event.PREFILL_STARTED: 28, Event.FIRST_TOKEN_SAMPLED: 46, Event.FIRST_TOKEN: 50,
        Event.FIRST_TOKEN_SENT: 52, Event.TRANSFER_STARTED: 30, Event.TRANSFER_RESERVED: 31, Event.KV_COMMITTED: 60,
        Event.DECODE_RECEIVED: 55, Event.DECODE_QUEUED: 60, Event.DECODE_STARTED: 61, Event.FINISHED: 80,
        Event.DETOKENIZED: 82, Event.RESPONDED: 85, Event.SENT: 89,
    }.items():  # fmt: skip
        timeline.record(event, float(at_s))
    add_step(timeline.prefill_steps, 28, 36, num_emitted=0, num_computed=8)
    add_step(timeline.prefill_steps, 39, 45, num_computed=4)
    add_step(timeline.decode_steps, 61, 66)
    add_step(timeline.decode_steps, 69, 76, first_token=2)
    return timeline


def seconds_by_stage(timeline: Timeline) -> dict[Stage, float]:
    return {stage.stage: stage.seconds for stage in stage_times(critical_path(timeline))}


def test_every_stage_of_a_request_that_goes_well() -> None:
    assert seconds_by_stage(served()) == {
        Stage.ACCEPT: 1, Stage.PARSE: 2, Stage.TOKENIZE: 3, Stage.ADMIT: 4, Stage.ROUTE: 5, Stage.TO_PREFILL: 6,
        Stage.PREFILL_QUEUE: 7, Stage.PREFILL: 14, Stage.PREFILL_WAIT: 3, Stage.FIRST_TOKEN_DELIVERY: 5,
        Stage.FIRST_TOKEN_SEND: 2, Stage.TO_DECODE: 3, Stage.KV_WAIT: 5, Stage.DECODE_QUEUE: 1, Stage.DECODE: 12,
        Stage.DECODE_WAIT: 3, Stage.TOKEN_DELIVERY: 4, Stage.DETOKENIZE: 2, Stage.OTHER_SEQUENCES: 3, Stage.SEND: 4,
    }  # fmt: skip


def test_one_token_has_no_decode() -> None:
    timeline = Timeline("r")
    for event, at_s in ((Event.RECEIVED, 0), (Event.FIRST_TOKEN, 5), (Event.FINISHED, 6), (Event.SENT, 7)):
        timeline.record(event, float(at_s))
    assert seconds_by_stage(timeline) == {Stage.FIRST_TOKEN_DELIVERY: 6, Stage.SEND: 1}


def test_an_attempt_that_fails_before_the_first_token_is_lost_time() -> None:
    timeline = served()
    timeline.failed_attempts.append(FailedAttempt(14.0, "worker_lost"))
    times = seconds_by_stage(timeline)
    assert times[Stage.RETRY] == 4
    assert times[Stage.ROUTE] == 1


def test_an_attempt_that_fails_between_tokens_is_lost_time_and_what_is_known_is_computed_again() -> None:
    timeline = served()
    timeline.failed_attempts.append(FailedAttempt(68.0, "worker_lost"))
    timeline.replace(Event.DECODE_RECEIVED, 68.5)
    timeline.replace(Event.DECODE_QUEUED, 68.5)
    timeline.decode_steps = StepLog()
    add_step(timeline.decode_steps, 61, 66)
    add_step(timeline.decode_steps, 69, 76, first_token=2, num_computed=20)
    times = seconds_by_stage(timeline)
    assert (times[Stage.RETRY], times[Stage.DECODE_WAIT], times[Stage.RECOMPUTE]) == (2, 1, 7)
    assert times[Stage.DECODE] == 5


def test_merged_steps_count_their_busy_time_and_the_rest_as_waiting() -> None:
    timeline = served()
    timeline.decode_steps = StepLog(limit=1)
    add_step(timeline.decode_steps, 61, 66)
    add_step(timeline.decode_steps, 67, 69, first_token=2)
    add_step(timeline.decode_steps, 72, 76, first_token=3)
    times = seconds_by_stage(timeline)
    assert (times[Stage.DECODE], times[Stage.DECODE_WAIT]) == (5 + 2 + 4, 1 + 3)


def test_a_choice_that_is_sent_late_does_not_hide_its_decoding() -> None:
    """With several sequences, the first token of one may be sent while its decoding runs already."""
    timeline = served()
    timeline.replace(Event.FIRST_TOKEN_SENT, 70.0)
    times = seconds_by_stage(timeline)
    assert Stage.FIRST_TOKEN_SEND not in times
    assert times[Stage.DECODE] == 12


def test_a_request_without_events_has_no_stages() -> None:
    assert critical_path(Timeline("r")) == []


def test_within_cuts_at_both_ends() -> None:
    cut = list(within(critical_path(served()), 5.0, 11.0))
    assert [(entry.stage, entry.start_s, entry.end_s) for entry in cut] == [
        (Stage.TOKENIZE, 5.0, 6.0),
        (Stage.ADMIT, 6.0, 10.0),
        (Stage.ROUTE, 10.0, 11.0),
    ]


TIMES = st.floats(0.0, 100.0)


@given(
    st.dictionaries(st.sampled_from(Event), TIMES, min_size=1),
    st.lists(st.tuples(TIMES, TIMES), max_size=6),
    st.lists(st.tuples(TIMES, TIMES), max_size=6),
    st.lists(TIMES, max_size=3),
    st.integers(1, 6),
)
def test_the_sum_is_exact_whatever_is_missing_or_out_of_order(
    events: dict[Event, float],
    prefill: list[tuple[float, float]],
    decode: list[tuple[float, float]],
    failures: list[float],
    limit: int,
) -> None:
    timeline = Timeline("r", events, prefill_steps=StepLog(limit), decode_steps=StepLog(limit))
    for log, steps in ((timeline.prefill_steps, prefill), (timeline.decode_steps, decode)):
        for start_s, end_s in steps:
            add_step(log, start_s, end_s)
    timeline.failed_attempts = [FailedAttempt(at_s, "worker_lost") for at_s in failures]
    segments = critical_path(timeline)
    assert all(segment.seconds > 0 for segment in segments)
    assert all(before.end_s == after.start_s for before, after in pairwise(segments))
    start_s = timeline.origin_s
    end_s = events.get(Event.SENT, max(events.values()))
    assert sum(segment.seconds for segment in segments) == pytest.approx(max(0.0, end_s - start_s))

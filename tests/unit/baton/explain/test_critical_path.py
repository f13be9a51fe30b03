"""The stages of any timeline follow one another without gap or overlap, and each has the right name."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_log import StepLog
from baton.core.timeline import Event, FailedAttempt, Timeline
from baton.explain.critical_path import Stage, critical_path, stage_times, within


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


def test_a_successful_request_has_every_stage() -> None:
    assert seconds_by_stage(served()) == {
        Stage.ACCEPT: 1, Stage.PARSE: 2, Stage.TOKENIZE: 3, Stage.ADMIT: 4, Stage.ROUTE: 5, Stage.TO_PREFILL: 6,
        Stage.PREFILL_QUEUE: 7, Stage.PREFILL: 14, Stage.PREFILL_WAIT: 3, Stage.FIRST_TOKEN_DELIVERY: 5,
        Stage.FIRST_TOKEN_SEND: 2, Stage.TO_DECODE: 3, Stage.KV_WAIT: 5, Stage.DECODE_QUEUE: 1, Stage.DECODE: 12,
        Stage.DECODE_WAIT: 3, Stage.TOKEN_DELIVERY: 4, Stage.DETOKENIZE: 2, Stage.OTHER_SEQUENCES: 3, Stage.SEND: 4,
    }  # fmt: skip


def test_a_single_token_has_no_decode_stage() -> None:
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


def test_an_attempt_that_fails_between_tokens_is_lost_time_and_recomputed() -> None:
    timeline = served()
    timeline.failed_attempts.append(FailedAttempt(68.0, "worker_lost"))
    timeline.replace(Event.DECODE_RECEIVED, 68.5)
    timeline.replace(Event.DECODE_QUEUED, 68.5)
    timeline.decode_steps = StepLog()
    add_step(timeline.decode_steps, 61, 66)
    add_step(timeline.decode_steps, 69, 76, first_token=2, num_computed=20)
    times = seconds_by_stage(timeline)
    assert (times[Stage.RETRY], times[Stage.TO_DECODE], times[Stage.DECODE_QUEUE]) == (2, 0.5, 1 + 0.5)
    assert (times[Stage.DECODE], times[Stage.RECOMPUTE]) == (5, 7)
    assert Stage.DECODE_WAIT not in times


def lost_between_tokens(failed: list[FailedAttempt], limit: int = 256) -> Timeline:
    """Steps at 61 to 66 on a worker that is lost, and from 79 on another one that gets it at 77."""
    timeline = served()
    timeline.failed_attempts = failed
    for event, at_s in ((Event.DECODE_RECEIVED, 77), (Event.DECODE_QUEUED, 78), (Event.DECODE_STARTED, 79)):
        timeline.replace(event, float(at_s))
    for event in (Event.FINISHED, Event.DETOKENIZED, Event.RESPONDED, Event.SENT):
        timeline.replace(event, 100.0)
    timeline.decode_steps = StepLog(limit)
    add_step(timeline.decode_steps, 61, 66, index=500)
    add_step(timeline.decode_steps, 79, 85, index=1, first_token=2, num_computed=20)
    add_step(timeline.decode_steps, 88, 100, index=2, first_token=3)
    return timeline


def test_a_retry_waiting_for_a_worker_counts_as_routing() -> None:
    segments = critical_path(lost_between_tokens([FailedAttempt(68.0, "worker_lost", 75.0)]))
    assert [(entry.stage, entry.start_s, entry.end_s) for entry in segments if entry.start_s >= 66] == [
        (Stage.RETRY, 66, 68),
        (Stage.ROUTE, 68, 75),
        (Stage.TO_DECODE, 75, 77),
        (Stage.DECODE_QUEUE, 77, 79),
        (Stage.RECOMPUTE, 79, 85),
        (Stage.DECODE_WAIT, 85, 88),
        (Stage.DECODE, 88, 100),
    ]


def test_each_retry_waits_for_its_own_worker() -> None:
    failed = [FailedAttempt(67.0, "worker_lost", 70.0), FailedAttempt(71.0, "worker_lost", 75.0)]
    times = seconds_by_stage(lost_between_tokens(failed))
    assert (times[Stage.RETRY], times[Stage.ROUTE]) == (1 + 1, 5 + 3 + 4)


def test_a_retry_before_the_first_decode_step_counts_as_routing() -> None:
    timeline = served()
    timeline.failed_attempts.append(FailedAttempt(53.0, "worker_lost", 54.0))
    times = seconds_by_stage(timeline)
    assert (times[Stage.RETRY], times[Stage.ROUTE], times[Stage.TO_DECODE]) == (1, 5 + 1, 1)


def test_a_retry_before_the_first_token_counts_as_routing() -> None:
    timeline = served()
    timeline.failed_attempts += [FailedAttempt(11.0, "worker_lost", 13.0), FailedAttempt(14.0, "worker_lost", 15.0)]
    times = seconds_by_stage(timeline)
    assert (times[Stage.RETRY], times[Stage.ROUTE]) == (1 + 1, 2 + 1)


@pytest.mark.parametrize("failed_s", [40.0, 78.0])
def test_a_retry_without_a_worker_waits_until_the_end(failed_s: float) -> None:
    timeline = served()
    timeline.failed_attempts.append(FailedAttempt(failed_s, "worker_lost"))
    if failed_s < 50:
        for event in (Event.FIRST_TOKEN, Event.FIRST_TOKEN_SAMPLED, Event.FIRST_TOKEN_SENT, Event.DECODE_RECEIVED):
            del timeline.events[event]
        del timeline.events[Event.DECODE_QUEUED], timeline.events[Event.KV_COMMITTED]
        timeline.prefill_steps, timeline.decode_steps = StepLog(), StepLog()
    last = [(entry.stage, entry.start_s, entry.end_s) for entry in critical_path(timeline) if entry.end_s <= 80][-2:]
    assert last[0][0] is Stage.RETRY
    assert last[1] == (Stage.ROUTE, failed_s, 80.0)


def test_a_retry_without_a_token_queues_until_the_end() -> None:
    timeline = served()
    timeline.failed_attempts.append(FailedAttempt(77.0, "worker_lost", 78.0))
    timeline.replace(Event.DECODE_RECEIVED, 79.0)
    last = [(entry.stage, entry.start_s, entry.end_s) for entry in critical_path(timeline) if 76 <= entry.start_s < 80]
    assert last == [
        (Stage.RETRY, 76, 77), (Stage.ROUTE, 77, 78), (Stage.TO_DECODE, 78, 79), (Stage.DECODE_QUEUE, 79, 80)
    ]  # fmt: skip


def test_a_retry_among_merged_steps_is_not_waiting_between_steps() -> None:
    failed = [FailedAttempt(68.0, "worker_lost", 75.0)]
    assert seconds_by_stage(lost_between_tokens(failed, limit=0)) == seconds_by_stage(lost_between_tokens(failed))


def test_merged_steps_count_their_busy_time_and_the_rest_as_waiting() -> None:
    timeline = served()
    timeline.decode_steps = StepLog(limit=1)
    add_step(timeline.decode_steps, 61, 66)
    add_step(timeline.decode_steps, 67, 69, first_token=2)
    add_step(timeline.decode_steps, 72, 76, first_token=3)
    times = seconds_by_stage(timeline)
    assert (times[Stage.DECODE], times[Stage.DECODE_WAIT]) == (5 + 2 + 4, 1 + 3)


def test_a_choice_sent_late_does_not_hide_its_decoding() -> None:
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
    st.lists(st.tuples(TIMES, st.none() | TIMES), max_size=3),
    st.integers(0, 6),
)
def test_the_sum_is_exact_with_missing_or_unordered_events(
    events: dict[Event, float],
    prefill: list[tuple[float, float]],
    decode: list[tuple[float, float]],
    failures: list[tuple[float, float | None]],
    limit: int,
) -> None:
    timeline = Timeline("r", events, prefill_steps=StepLog(limit), decode_steps=StepLog(limit))
    for log, steps in ((timeline.prefill_steps, prefill), (timeline.decode_steps, decode)):
        for start_s, end_s in steps:
            add_step(log, start_s, end_s)
    timeline.failed_attempts = [FailedAttempt(at_s, "worker_lost", resumed_s) for at_s, resumed_s in failures]
    segments = critical_path(timeline)
    assert all(segment.seconds > 0 for segment in segments)
    assert all(before.end_s == after.start_s for before, after in pairwise(segments))
    start_s = timeline.origin_s
    end_s = events.get(Event.SENT, max(events.values()))
    assert sum(segment.seconds for segment in segments) == pytest.approx(max(0.0, end_s - start_s))

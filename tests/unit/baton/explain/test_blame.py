"""The blamed stage is the largest one, and the sentence gives the known reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.core.step_log import StepLog
from baton.core.timeline import AwaitedRoom, Event, FailedAttempt, Timeline, TransferPart
from baton.explain.blame import explain
from baton.explain.blame_texts import reason_for, wait_reason
from baton.explain.critical_path import Stage
from tests.unit.baton.explain.test_critical_path import add_step, served


def slow_decode(**slow: float) -> Timeline:
    """Ten quick rounds and one slow one."""
    timeline = Timeline("r", attributes={"decode_worker": "decode-1", "prompt_tokens": 12})
    timeline.record(Event.RECEIVED, 0.0)
    timeline.record(Event.FIRST_TOKEN, 1.0)
    timeline.decode_steps.follow(1.0)
    now_s = 1.0
    for index in range(11):
        values: dict[str, float] = {"started_s": now_s, "ended_s": now_s + 0.02, **(slow if index == 6 else {})}
        values["started_s"] += values.pop("late_s", 0.0)
        values["ended_s"] = values["started_s"] + values.pop("took_s", 0.02)
        received_s = values["ended_s"] + values.pop("delivered_s", 0.0)
        now_s = received_s
        add_step(
            timeline.decode_steps,
            **{"index": index + 1, "received_s": received_s, "first_token": index + 1, **values},  # type: ignore[arg-type]
        )
    timeline.record(Event.FINISHED, now_s)
    timeline.record(Event.SENT, now_s)
    return timeline


def gap_of(timeline: Timeline) -> Any:
    return json.loads(json.dumps(explain(timeline)))["slowest_gap"]


def test_the_explanation_serializes_and_its_stages_add_up() -> None:
    shown = json.loads(json.dumps(explain(served())))
    assert shown["total_ms"] == 89_000
    assert sum(stage["duration_ms"] for stage in shown["stages"]) == shown["total_ms"]
    assert sum(stage["duration_ms"] for stage in shown["time_to_first_token"]["stages"]) == 52_000


def test_time_to_first_token_ends_when_a_stream_sent_it() -> None:
    shown: Any = explain(served())["time_to_first_token"]
    assert (shown["duration_ms"], shown["stage"], shown["stage_ms"]) == (52_000, "prefill", 14_000)
    assert "12 tokens in 2 steps" in shown["sentence"]


def test_a_blamed_queue_comes_with_advice() -> None:
    timeline = served()
    timeline.attributes["prefill_worker"] = "prefill-3"
    timeline.events[Event.RECEIVED] = 0.0
    for event in (Event.PREFILL_QUEUED, Event.ROUTED, Event.ADMITTED, Event.TOKENIZED, Event.PARSED, Event.ACCEPTED):
        timeline.replace(event, 1.0)
    shown: Any = explain(timeline)["time_to_first_token"]
    assert shown["stage"] == "prefill_queue"
    assert "queue of prefill-3" in shown["sentence"]
    assert "baton scale prefill=" in shown["hint"]


@pytest.mark.parametrize(
    ("slow", "stage", "words"),
    [
        ({"took_s": 0.3, "num_prompt_tokens": 400}, "decode", "computed 400 prompt tokens of other requests"),
        ({"took_s": 0.3, "draft_s": 0.25}, "decode", "250 ms on drafting tokens"),
        ({"took_s": 0.3, "num_sequences": 60, "num_batch_tokens": 90}, "decode", "over 60 sequences and 90 tokens"),
        ({"took_s": 0.3, "num_computed": 50}, "recompute", "decode-1 computed 50 of its tokens again"),
        ({"late_s": 0.3, "index": 9}, "decode_wait", "ran 2 steps without it"),
        ({"late_s": 0.3}, "decode_wait", "ran no step"),
        ({"delivered_s": 0.3}, "token_delivery", "on its way from decode-1 to the router"),
    ],
)
def test_the_slowest_gap_is_explained(slow: dict[str, float], stage: str, words: str) -> None:
    gap = gap_of(slow_decode(**slow))
    assert (gap["stage"], gap["token"]) == (stage, 8)
    assert words in gap["sentence"]
    assert "before token 8" in gap["sentence"]
    assert 280 <= gap["duration_ms"] <= 320.1
    assert sum(entry["duration_ms"] for entry in gap["stages"]) == pytest.approx(gap["duration_ms"])


def test_prompts_of_other_requests_are_not_certainly_preemptions() -> None:
    gap = gap_of(slow_decode(took_s=0.3, num_prompt_tokens=400))
    assert "for local prefill or after a preemption" in gap["sentence"]
    assert "routing.local_prefill" in gap["hint"]
    assert "decode.kv_blocks" in gap["hint"]


def test_a_gap_beyond_the_limit_is_explained_by_its_own_step() -> None:
    timeline = slow_decode()
    now_s = timeline.events[Event.SENT]
    for index in range(300):
        took_s = 0.5 if index == 290 else 0.02
        add_step(timeline.decode_steps, now_s, now_s + took_s, index=12 + index, first_token=12 + index)
        now_s += took_s
    timeline.replace(Event.SENT, now_s)
    gap = gap_of(timeline)
    assert (gap["stage"], gap["token"], round(gap["duration_ms"])) == ("decode", 303, 500)


@pytest.mark.parametrize(
    ("awaited", "words", "advice"),
    [
        (AwaitedRoom.PREFILL, "until fewer prompts were ahead", "baton scale prefill=N"),
        (AwaitedRoom.DECODE, "until decode workers had fewer sequences", "a wider TPOT target"),
        (AwaitedRoom.SEAT, "until a decode worker had a free place", "decode.max_num_seqs"),
        (AwaitedRoom.TURN, "behind requests that came before it", "a higher priority"),
        (AwaitedRoom.GATHERING, "for other prompts, to be computed in one step", "Lower admission.gather_ms"),
    ],
)
def test_a_wait_for_admission_names_what_was_short(awaited: AwaitedRoom, words: str, advice: str) -> None:
    timeline = Timeline("r", attributes={"admission_waited_for": str(awaited)})
    for event, at_s in (
        (Event.RECEIVED, 0.0),
        (Event.ADMITTED, 0.01),
        (Event.DISPATCHED, 2.0),
        (Event.FIRST_TOKEN, 2.1),
    ):
        timeline.record(event, at_s)
    shown: Any = explain(timeline)["time_to_first_token"]
    assert shown["stage"] == "admission_queue"
    assert words in shown["sentence"]
    assert advice in shown["hint"]


def test_lost_attempts_are_named() -> None:
    timeline = served()
    timeline.failed_attempts = [FailedAttempt(30.0, "worker_lost"), FailedAttempt(44.0, "kv_transfer_failed")]
    shown: Any = explain(timeline)["time_to_first_token"]
    assert shown["stage"] == "retry"
    assert "2 attempts failed (worker_lost, kv_transfer_failed)" in shown["sentence"]


def retried(num_before: int, *, resumed_s: float | None, first_index: int) -> Timeline:
    """Loses its decode worker 0.1 s behind a step; the next one has it at ``resumed_s``, and steps at 9 s."""
    timeline = Timeline("r", attributes={"decode_worker": "decode-2", "prompt_tokens": 12})
    timeline.record(Event.RECEIVED, 0.0)
    timeline.record(Event.FIRST_TOKEN, 0.25)
    timeline.decode_steps.follow(0.25)
    step_s = 1.75 / num_before
    for index in range(num_before):
        start_s = 0.25 + index * step_s
        add_step(timeline.decode_steps, start_s, start_s + step_s, index=index + 1, first_token=index + 1)
    timeline.failed_attempts.append(FailedAttempt(2.1, "worker_lost", resumed_s))
    timeline.record(Event.DECODE_RECEIVED, 8.8)
    timeline.record(Event.DECODE_QUEUED, 8.8)
    for index in range(3):
        start_s = 9.0 + index * 0.1
        changes = {"index": first_index + index, "first_token": num_before + 1 + index}
        add_step(timeline.decode_steps, start_s, start_s + 0.1, num_computed=1 if index else 70, **changes)
    for event in (Event.FINISHED, Event.SENT):
        timeline.record(event, 9.3)
    return timeline


@pytest.mark.parametrize("first_index", [1, 900])
@pytest.mark.parametrize("num_before", [50, 400])
def test_a_gap_that_waited_for_another_worker_says_so(num_before: int, first_index: int) -> None:
    """The names of the new worker's steps, and whether each step is kept, do not matter."""
    gap = gap_of(retried(num_before, resumed_s=8.7, first_index=first_index))
    assert (gap["stage"], gap["stage_ms"], gap["token"]) == ("route", 6_600, num_before + 2)
    assert "worker_lost" in gap["sentence"]
    assert "waited for a worker until decode-2 took over" in gap["sentence"]
    assert "baton scale" in gap["hint"]
    names = {stage["name"]: stage["duration_ms"] for stage in gap["stages"] if stage["duration_ms"]}
    expected = {"retry": 100, "route": 6_600, "to_decode": 100, "decode_queue": 200, "recompute": 100}
    assert names == pytest.approx(expected)
    assert sum(names.values()) == pytest.approx(gap["duration_ms"])


@pytest.mark.parametrize("first_index", [1, 900])
@pytest.mark.parametrize("num_before", [50, 400])
def test_steps_of_two_workers_are_counted_separately(num_before: int, first_index: int) -> None:
    timeline = retried(num_before, resumed_s=8.7, first_index=first_index)
    found = timeline.decode_steps.slowest_gap()
    assert found is not None
    row, before = found
    assert before is not None
    clause = wait_reason(timeline, row, before).clause
    assert "without it" not in clause
    assert "ran no step" not in clause
    assert "worker_lost" in clause


def test_a_failure_elsewhere_is_not_blamed_for_the_wait_for_a_first_worker() -> None:
    timeline = retried(50, resumed_s=8.7, first_index=1)
    timeline.record(Event.ROUTED, 0.25)
    shown: Any = explain(timeline)["time_to_first_token"]
    assert shown["stage"] == "route"
    assert "no worker was available" in shown["sentence"]
    assert "worker_lost" not in shown["sentence"]


def test_a_request_without_a_replacement_worker_says_so() -> None:
    timeline = retried(50, resumed_s=None, first_index=1)
    assert "none took over" in reason_for(Stage.ROUTE, timeline, timeline.failed_attempts).clause


def test_waiting_for_kv_distinguishes_room_from_bandwidth() -> None:
    timeline = served()
    timeline.parts = [TransferPart(2**20, 1, 31.0, 31.5, 32.0), TransferPart(2**20, 1, 40.0, 40.5, 41.0)]
    assert "2.0 MiB" in reason_for(Stage.KV_WAIT, timeline).clause
    timeline.replace(Event.TRANSFER_RESERVED, 59.0)
    assert "reserved KV blocks late" in reason_for(Stage.KV_WAIT, timeline).clause


@pytest.mark.parametrize("stage", list(Stage))
def test_every_stage_has_a_description_and_a_hint(stage: Stage) -> None:
    for timeline in (Timeline("r"), served()):
        reason = reason_for(stage, timeline, timeline.failed_attempts)
        assert reason.clause
        assert reason.hint.endswith(".")
        assert "{" not in reason.clause


def test_missing_stages_are_not_blamed() -> None:
    timeline = Timeline("r")
    timeline.record(Event.RECEIVED, 1.0)
    shown = explain(timeline)
    assert shown["time_to_first_token"] is None
    assert shown["slowest_gap"] is None


def test_a_locally_computed_prompt_is_attributed_to_the_decode_worker() -> None:
    timeline = served()
    timeline.attributes.pop("prefill_worker", None)
    timeline.attributes["decode_worker"] = "decode-2"
    for stage in (Stage.PREFILL, Stage.PREFILL_QUEUE, Stage.PREFILL_WAIT):
        reason = reason_for(stage, timeline)
        assert "decode-2" in reason.clause
        assert "prefill pool" not in reason.hint
        assert "scale prefill" not in reason.hint


def test_a_prompt_is_attributed_to_its_worker_after_another_one_took_over() -> None:
    timeline = served()
    timeline.attributes.pop("prefill_worker", None)
    timeline.attributes |= {"local_worker": "decode-1", "decode_worker": "decode-2"}
    assert "decode-1" in reason_for(Stage.PREFILL, timeline).clause
    assert "decode-2" in reason_for(Stage.DECODE, timeline).clause
    timeline.attributes["prefill_worker"] = "prefill-1"  # of a later attempt
    assert "prefill-1" in reason_for(Stage.PREFILL, timeline).clause


@pytest.mark.parametrize(
    ("tokens_per_step", "num_steps", "decoding", "words"),
    [
        (60, 10, 0, "Raise prefill.chunk_tokens"),
        (60, 10, 3, "TPOT target"),
        (512, 10, 0, "a shorter prompt"),  # large chunks are no fault
        (60, 2, 0, "a shorter prompt"),
        (20, 1, 0, "as long as the device reads the weights"),
    ],
)
def test_a_prompt_in_many_small_chunks_is_told_to_take_larger_ones(
    tokens_per_step: int, num_steps: int, decoding: int, words: str
) -> None:
    timeline = served()
    timeline.prefill_steps = StepLog()
    timeline.attributes["prefill_worker"] = "prefill-1"
    for index in range(num_steps):
        figures = {"num_computed": tokens_per_step, "num_prompt_tokens": tokens_per_step}
        batch = {"num_batch_tokens": tokens_per_step + decoding, "num_sequences": 1 + decoding}
        add_step(timeline.prefill_steps, 28 + index, 29 + index, index=index, **figures, **batch)
    reason = reason_for(Stage.PREFILL, timeline)
    assert words in reason.hint
    assert ("chunk_tokens" in reason.hint) == (num_steps == 10 and tokens_per_step < 512)
    assert ("TPOT" in reason.hint) == (decoding > 0)


@pytest.mark.parametrize(("num_sequences", "is_smaller_batch"), [(1, False), (2, True)])
def test_a_step_of_one_sequence_is_not_told_to_use_smaller_batches(num_sequences: int, is_smaller_batch: bool) -> None:
    gap = gap_of(slow_decode(took_s=0.3, num_sequences=num_sequences, num_batch_tokens=2))
    assert ("Smaller batches" in gap["hint"]) == is_smaller_batch
    assert "short of CPU time" in gap["hint"]

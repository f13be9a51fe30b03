"""The stage that is blamed is the largest one, and the sentence says what is known about it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.blame import explain
from engine.blame_texts import reason_for
from engine.critical_path import Stage
from engine.timeline import Event, FailedAttempt, Timeline, TransferPart
from tests.unit.engine.test_critical_path import add_step, served


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


def test_the_explanation_is_json_and_its_stages_add_up() -> None:
    shown = json.loads(json.dumps(explain(served())))
    assert shown["total_ms"] == 89_000
    assert sum(stage["duration_ms"] for stage in shown["stages"]) == shown["total_ms"]
    assert sum(stage["duration_ms"] for stage in shown["time_to_first_token"]["stages"]) == 52_000


def test_time_to_first_token_ends_when_a_stream_sent_it() -> None:
    shown: Any = explain(served())["time_to_first_token"]
    assert (shown["duration_ms"], shown["stage"], shown["stage_ms"]) == (52_000, "prefill", 14_000)
    assert "12 tokens in 2 steps" in shown["sentence"]


def test_a_queue_is_blamed_with_a_way_out() -> None:
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
        ({"took_s": 0.3, "num_prompt_tokens": 400}, "decode", "computed 400 tokens of other requests again"),
        ({"took_s": 0.3, "draft_s": 0.25}, "decode", "250 ms on guessing tokens"),
        ({"took_s": 0.3, "num_sequences": 60, "num_batch_tokens": 90}, "decode", "over 60 sequences and 90 tokens"),
        ({"took_s": 0.3, "num_computed": 50}, "recompute", "decode-1 computed 50 of its tokens again"),
        ({"late_s": 0.3, "index": 9}, "decode_wait", "ran 2 steps without it"),
        ({"late_s": 0.3}, "decode_wait", "ran no step at all"),
        ({"delivered_s": 0.3}, "token_delivery", "on its way from decode-1 to the router"),
    ],
)
def test_the_slowest_gap(slow: dict[str, float], stage: str, words: str) -> None:
    gap = gap_of(slow_decode(**slow))
    assert (gap["stage"], gap["token"]) == (stage, 8)
    assert words in gap["sentence"]
    assert "before token 8" in gap["sentence"]
    assert 280 <= gap["duration_ms"] <= 320.1
    assert sum(entry["duration_ms"] for entry in gap["stages"]) == pytest.approx(gap["duration_ms"])


def test_a_gap_behind_the_limit_is_explained_by_its_own_step() -> None:
    timeline = slow_decode()
    now_s = timeline.events[Event.SENT]
    for index in range(300):
        took_s = 0.5 if index == 290 else 0.02
        add_step(timeline.decode_steps, now_s, now_s + took_s, index=12 + index, first_token=12 + index)
        now_s += took_s
    timeline.replace(Event.SENT, now_s)
    gap = gap_of(timeline)
    assert (gap["stage"], gap["token"], round(gap["duration_ms"])) == ("decode", 303, 500)


def test_lost_attempts_are_named() -> None:
    timeline = served()
    timeline.failed_attempts = [FailedAttempt(30.0, "worker_lost"), FailedAttempt(44.0, "kv_transfer_failed")]
    shown: Any = explain(timeline)["time_to_first_token"]
    assert shown["stage"] == "retry"
    assert "2 attempts failed (worker_lost, kv_transfer_failed)" in shown["sentence"]


def test_waiting_for_kv_tells_room_from_bandwidth() -> None:
    timeline = served()
    timeline.parts = [TransferPart(2**20, 1, 31.0, 31.5, 32.0), TransferPart(2**20, 1, 40.0, 40.5, 41.0)]
    assert "2.0 MiB" in reason_for(Stage.KV_WAIT, 1.0, timeline).clause
    timeline.replace(Event.TRANSFER_RESERVED, 59.0)
    assert "no room" in reason_for(Stage.KV_WAIT, 1.0, timeline).clause


@pytest.mark.parametrize("stage", list(Stage))
def test_every_stage_has_words_and_a_hint(stage: Stage) -> None:
    for timeline in (Timeline("r"), served()):
        reason = reason_for(stage, 1.0, timeline)
        assert reason.clause
        assert reason.hint.endswith(".")
        assert "{" not in reason.clause


def test_nothing_is_blamed_for_what_did_not_happen() -> None:
    timeline = Timeline("r")
    timeline.record(Event.RECEIVED, 1.0)
    shown = explain(timeline)
    assert shown["time_to_first_token"] is None
    assert shown["slowest_gap"] is None

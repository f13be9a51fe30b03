"""The log of steps is bounded, its sums are those of all steps, and the slowest are never lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_log import MAX_RUNS, StepLog


def log_of(gaps_s: list[float], limit: int = 256, num_slowest: int = 8) -> StepLog:
    """One token a step, each received after a gap."""
    log, now_s = StepLog(limit, num_slowest), 100.0
    log.follow(now_s)
    for index, gap_s in enumerate(gaps_s):
        started_s, now_s = now_s + gap_s / 2, now_s + gap_s
        log.add(
            step_index=index, started_s=started_s, ended_s=now_s, busy_s=now_s - started_s, draft_s=0.0, num_steps=1,
            num_computed=1, num_emitted=1, num_drafted=2, num_accepted=1, num_sequences=3, num_batch_tokens=9,
            num_prompt_tokens=0, received_s=now_s, first_token=index + 1,
        )  # fmt: skip
    return log


GAPS = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=60)


@given(GAPS, st.integers(1, 20), st.integers(1, 4))
def test_sums_and_slowest_gaps_do_not_depend_on_the_limit(gaps_s: list[float], limit: int, num_slowest: int) -> None:
    log, whole = log_of(gaps_s, limit, num_slowest), log_of(gaps_s)
    assert len(list(log.kept())) == min(limit, len(gaps_s))
    assert len(log.slowest_behind_limit()) == max(0, min(num_slowest, len(gaps_s) - limit))
    assert len(log) == len(gaps_s)
    for name in ("busy_s", "num_emitted", "num_drafted", "num_accepted"):
        total = sum(getattr(row, name) for row in log)
        assert abs(total - sum(getattr(row, name) for row in whole)) < 1e-6
    found, expected = log.slowest_gap(), whole.slowest_gap()
    assert found is not None
    assert expected is not None
    assert found[0].gap_s == expected[0].gap_s


def test_the_slowest_gap_includes_the_step_before_it() -> None:
    found = log_of([0.1, 0.1, 0.7, 0.1]).slowest_gap()
    assert found is not None
    row, before = found
    assert (row.first_token, before.step_index if before else None) == (3, 1)
    assert abs(row.gap_s - 0.7) < 1e-9


def test_a_gap_spans_steps_without_a_token() -> None:
    log = log_of([0.1])
    common = {"busy_s": 0.1, "draft_s": 0.0, "num_steps": 1, "num_drafted": 0, "num_accepted": 0, "num_sequences": 1}
    common |= {"num_batch_tokens": 8, "num_prompt_tokens": 8, "num_computed": 8, "first_token": 2}
    log.add(step_index=7, started_s=101.0, ended_s=101.1, num_emitted=0, received_s=103.0, **common)
    log.add(step_index=8, started_s=102.0, ended_s=102.1, num_emitted=1, received_s=103.0, **common)
    rows = list(log)
    assert [row.gap_s for row in rows[1:]] == [0.0, 103.0 - rows[0].received_s]
    assert [row.recomputes for row in rows] == [False, True, True]


def test_an_empty_log_is_false_and_serializes() -> None:
    log = StepLog()
    assert not log
    assert log.slowest_gap() is None
    assert json.loads(json.dumps(log.to_dict(0.0))) == {"kept": [], "rest": [], "slowest_of_rest": []}


@pytest.mark.parametrize("limit", [1, 3, 256])
def test_steps_that_recompute_are_told_apart_behind_the_limit(limit: int) -> None:
    """Two workers are lost; the next ones compute 40 and 60 tokens again."""
    log, now_s = StepLog(limit), 0.0
    for index, num_computed in enumerate([1, 1, 1, 30, 10, 1, 1, 60, 1, 1, 1, 1]):
        log.add(
            step_index=index, started_s=now_s, ended_s=now_s + 0.5, busy_s=0.5, draft_s=0.0, num_steps=1,
            num_computed=num_computed, num_emitted=int(num_computed != 30), num_drafted=0, num_accepted=0,
            num_sequences=1, num_batch_tokens=num_computed, num_prompt_tokens=num_computed - 1, received_s=now_s,
            first_token=index,
        )  # fmt: skip
        now_s += 1
    again = [row for row in log if row.recomputes]
    assert sum(row.busy_s for row in again) == 1.5
    assert sum(row.num_computed for row in again) == 100
    assert len(log) == 12
    assert [row.started_s for row in log] == sorted(row.started_s for row in log)


def test_runs_of_recomputing_steps_are_bounded() -> None:
    log = StepLog(0)
    for index in range(100):
        log.add(
            step_index=index, started_s=index, ended_s=index + 0.5, busy_s=0.5, draft_s=0.0, num_steps=1,
            num_computed=1 + index % 2, num_emitted=1, num_drafted=0, num_accepted=0, num_sequences=1,
            num_batch_tokens=1, num_prompt_tokens=0, received_s=index, first_token=index,
        )  # fmt: skip
    assert (len(log), len(log.rest)) == (100, MAX_RUNS)


def test_times_in_json_are_milliseconds_since_the_origin() -> None:
    (row,) = log_of([0.5]).to_dict(100.0)["kept"]  # type: ignore[misc]
    assert (row["start_ms"], row["duration_ms"], row["received_ms"], row["gap_ms"]) == (250.0, 250.0, 500.0, 500.0)
    assert (row["step"], row["tokens"], row["first_token"], row["batch_tokens"]) == (0, 1, 1, 9)

"""When a job that fails is tried again, and when it is given up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.jobs.job_types import Job
from cluster.jobs.setbacks import MAX_TRIES, Setbacks
from tests.fake_clock import FakeClock
from tests.unit.cluster.jobs.made_jobs import made_job, stored_file


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def job() -> Job:
    return made_job(stored_file(), num_lines=10)


def wait_s(setbacks: Setbacks, clock: FakeClock) -> float:
    """Seconds until no job waits, to the half."""
    began_s = clock.now_s
    while setbacks.waiting():
        clock.now_s += 0.5
    return clock.now_s - began_s


def test_waits_double_up_to_a_limit_until_the_job_is_given_up(clock: FakeClock, job: Job) -> None:
    setbacks, waits, given_up = Setbacks(clock), [], []
    for _ in range(MAX_TRIES):
        given_up.append(setbacks.add(job))
        waits.append(wait_s(setbacks, clock))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert given_up == [False] * (MAX_TRIES - 1) + [True]


def test_progress_begins_anew(clock: FakeClock, job: Job) -> None:
    setbacks = Setbacks(clock)
    for done in range(2 * MAX_TRIES):
        assert not setbacks.add(replace(job, num_completed=done))
        assert wait_s(setbacks, clock) == 1


def test_a_cancelled_job_does_not_wait(clock: FakeClock, job: Job) -> None:
    setbacks = Setbacks(clock)
    setbacks.add(job)
    assert setbacks.waiting() == {job.id}
    setbacks.clear(job.id)
    assert setbacks.waiting() == set()

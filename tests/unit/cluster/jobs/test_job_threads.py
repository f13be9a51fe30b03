"""Calls of a database that may hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from baton.core.errors import JobsUnavailableError, NotFoundError
from cluster.jobs import job_threads
from cluster.jobs.job_threads import JobThreads


@pytest.fixture
def threads() -> Iterator[JobThreads]:
    found = JobThreads(1)
    yield found
    found.close()


def missing() -> None:
    raise NotFoundError("There is none.")


async def test_a_question_is_answered(threads: JobThreads) -> None:
    assert await threads.ask(lambda number: number + 1, 4) == 5
    with pytest.raises(NotFoundError, match=r"There is none\."):
        await threads.ask(missing)


async def test_a_database_that_hangs_is_named_and_no_questions_pile_up(
    threads: JobThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_threads, "_PATIENCE_S", 0.05)
    goes_on, asked = threading.Event(), list[int]()
    try:
        with pytest.raises(JobsUnavailableError, match=r"has not answered for 0\.05 s"):
            await threads.ask(goes_on.wait)
        for number in range(3):  # all threads are in use
            with pytest.raises(JobsUnavailableError):
                await threads.ask(asked.append, number)
    finally:
        goes_on.set()
    assert await threads.run(lambda: 7) == 7
    assert asked == []

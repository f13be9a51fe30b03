"""Jobs that fail for a reason of their own: when each is tried again, and when it is given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.jobs.job_types import Job

MAX_TRIES = 8
"""Failures in a row, without a new result in between, after which a job is given up."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class _Setback:
    num_tries: int
    num_open: int
    until_s: float


class Setbacks:
    """
    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_id: dict[str, _Setback] = {}

    def add(self, job: Job) -> bool:
        """Notes that a run of the job has failed, which waits twice as long as the last time.

        Args:
            job: as it was when the run began.

        Returns:
            Whether the job must be given up.
        """
        last = self._by_id.get(job.id)
        num_tries = 1 if last is None or job.num_open != last.num_open else last.num_tries + 1
        wait_s = min(_FIRST_WAIT_S * 2.0 ** (num_tries - 1), _LONGEST_WAIT_S)
        self._by_id[job.id] = _Setback(num_tries, job.num_open, self._clock() + wait_s)
        return num_tries >= MAX_TRIES

    def clear(self, job_id: str) -> None:
        """The job goes on elsewhere, or has ended."""
        self._by_id.pop(job_id, None)

    def waiting(self) -> set[str]:
        """The jobs that are not tried again yet."""
        now_s = self._clock()
        return {job_id for job_id, setback in self._by_id.items() if setback.until_s > now_s}

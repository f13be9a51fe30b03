"""Counts the attempts of lines that end with the loss of their router, so that no line ends router after router.

An attempt is counted in the database before its line is sent, and taken back when an answer comes or the run ends in
order. What a later run finds counted are the attempts whose router was lost, or hung until it lost its lease.

Up to ``jobs.max_in_flight`` lines share the loss of a router, and one of them may have caused it. So a line that has
lost two routers runs alone: three more losses show that it is this one, and no coincidence.
"""

from __future__ import annotations

import contextlib

from baton.core.errors import BatonError
from cluster.jobs.job_store import JobStore
from cluster.jobs.job_threads import JobThreads
from cluster.jobs.job_types import Job, Line
from cluster.jobs.recorder import Recorder

MAX_LOST = 5
"""Lost attempts of a line, after which its result is an error."""
_SUSPECT = 2
"""Lost attempts, after which a line runs alone."""


class LineAttempts:
    """The attempts of the lines of one run.

    Args:
        lost: lost attempts of earlier runs, by the number of the line.
    """

    def __init__(self, store: JobStore, threads: JobThreads, job: Job, lost: dict[int, int]) -> None:
        self._store = store
        self._threads = threads
        self._job = job
        self._lost = lost
        self._open: set[int] = set()
        self._recorder: Recorder[tuple[int, int]] = Recorder(
            lambda job, counts: store.set_open_attempts(job, dict(counts)), threads, job
        )

    def is_used_up(self, line: Line) -> bool:
        """Whether the line may not be sent again."""
        return self._num_lost(line) >= MAX_LOST

    def runs_alone(self, line: Line) -> bool:
        """Whether no other line may run beside it."""
        return self._num_lost(line) >= _SUSPECT

    async def begin(self, line: Line) -> None:
        """Counts an attempt. Returns when the count is durable.

        Raises:
            LeaseLostError: another router runs the job.
        """
        self._open.add(line.number)
        await self._recorder.record((line.number, self._num_lost(line) + 1))

    async def end(self, line: Line) -> None:
        """Takes the attempt back, since an answer came which is not the line's result. Raises as :meth:`begin`."""
        await self._recorder.record((line.number, self._num_lost(line)))
        self._open.discard(line.number)

    def has_result(self, line: Line) -> None:
        """The line has a result, with which the store has removed its attempts."""
        self._open.discard(line.number)

    async def close(self) -> None:
        """Takes back the attempts that are open, since the run ends in order. If that fails, they stay counted."""
        await self._recorder.close()
        if self._open:
            counts = {number: self._lost.get(number, 0) for number in self._open}
            with contextlib.suppress(BatonError):
                await self._threads.run(self._store.set_open_attempts, self._job, counts)

    def _num_lost(self, line: Line) -> int:
        return self._lost.get(line.number, 0)

"""One job on the router that has its lease: check the input, run the lines, write the files."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.core.errors import InternalError
from baton.process.background import race
from cluster.jobs.file_storage import FileStorage
from cluster.jobs.input_lines import InputFile
from cluster.jobs.job_store import JobStore
from cluster.jobs.job_threads import JobThreads
from cluster.jobs.job_types import Job, Line, LineProblem, Result, Status
from cluster.jobs.line_attempts import MAX_LOST, LineAttempts
from cluster.jobs.output_files import OutputFiles
from cluster.jobs.pace import Pace
from cluster.jobs.recorder import Recorder
from cluster.jobs.result_lines import LineSender, lost_line, result_of

LEASE_S = 15.0
"""How long after its last sign of life the job of a lost router is taken over, unless that router comes back before."""
_RENEWALS = 5
"""Renewals in the time of a lease."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all runs share.

    Attributes:
        open_input: the input file of a job.
        send: runs a line as a request.
        clock: seconds since 1970.
    """

    store: JobStore
    storage: FileStorage
    threads: JobThreads
    pace: Pace
    open_input: Callable[[Job], InputFile]
    send: LineSender
    max_lines: int
    max_in_flight: int
    clock: Callable[[], float] = time.time

    @property
    def now_s(self) -> int:
        return int(self.clock())


class JobRun:
    """Works on a job until it has ended, or its lease is lost.

    Attributes:
        job: the job as it was known last.
    """

    def __init__(self, job: Job, shop: Workshop, lease_s: float = LEASE_S) -> None:
        self.job = job
        self._shop = shop
        self._lease_s = lease_s
        self._input = shop.open_input(job)
        self._ends_early = asyncio.Event()

    async def run(self) -> None:
        """Does all work that is left.

        Raises:
            LeaseLostError: another router runs the job.
            BatonError: a fault of baton; another run may go on where this one ended.
        """
        await race(self._work(), self._watch())

    async def give_up(self, reason: str) -> None:
        """Ends the job as failed, with the results that it has.

        Args:
            reason: a sentence.

        Raises:
            LeaseLostError: another router runs the job.
        """
        shop = self._shop
        job = await shop.threads.insist(shop.store.renew, self.job, shop.clock(), self._lease_s)
        files = await shop.threads.insist(OutputFiles(shop.store, shop.storage).write, job, None, shop.now_s)
        problem = LineProblem(InternalError.code, f"The batch could not be continued. {reason}")
        self.job = await shop.threads.insist(
            shop.store.finish, job, Status.FAILED, *files, shop.now_s, problems=[problem]
        )

    def end_early(self) -> None:
        """Ends the lines that run, since the job was cancelled."""
        self._ends_early.set()

    async def _watch(self) -> None:
        """Keeps the lease, and notices the end of the job's time and its cancellation by another router."""
        shop = self._shop
        while True:
            await asyncio.sleep(self._lease_s / _RENEWALS)
            job = await shop.threads.insist(shop.store.renew, self.job, shop.clock(), self._lease_s)
            if job.status is Status.CANCELLING or shop.clock() >= job.expires_at:
                self._ends_early.set()

    async def _work(self) -> None:
        shop = self._shop
        is_in_time = shop.clock() < self.job.expires_at
        if self.job.status is Status.VALIDATING and is_in_time:
            await self._check()
        if self.job.status in (Status.VALIDATING, Status.IN_PROGRESS):
            if is_in_time:
                await self._run_lines()
            self.job = await shop.threads.insist(shop.store.begin_finalizing, self.job, shop.now_s)
        if self.job.status in (Status.FINALIZING, Status.CANCELLING):
            await self._finish()

    async def _check(self) -> None:
        shop = self._shop
        num_lines, problems = await shop.threads.insist(self._input.check, shop.max_lines)
        if problems:
            self.job = await shop.threads.insist(shop.store.fail, self.job, problems, shop.now_s)
        else:
            self.job = await shop.threads.insist(shop.store.begin, self.job, num_lines, shop.now_s)

    async def _run_lines(self) -> None:
        """Runs all lines without a result. Returns early when the job's time is over, or when it is cancelled."""
        shop = self._shop
        done = await shop.threads.insist(shop.store.numbers_done, self.job.id)
        lost = await shop.threads.insist(shop.store.open_attempts, self.job.id)
        attempts = LineAttempts(shop.store, shop.threads, self.job, lost)
        recorder = Recorder(shop.store.record, shop.threads, self.job)
        lines = self._input.lines(done)
        try:
            await race(self._run_all(lines, recorder, attempts), self._wait_for_early_end())
        finally:
            await recorder.close()
            await attempts.close()

    async def _wait_for_early_end(self) -> None:
        while (left_s := self.job.expires_at - self._shop.clock()) > 0 and not self._ends_early.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._ends_early.wait()

    async def _run_all(self, lines: Iterator[Line], recorder: Recorder[Result], attempts: LineAttempts) -> None:
        shop = self._shop
        slots = asyncio.Semaphore(shop.max_in_flight)  # also of lines that wait for another try
        try:
            async with asyncio.TaskGroup() as group:
                while (await slots.acquire()) and (line := await shop.threads.run(next, lines, None)) is not None:
                    task = group.create_task(self._run_line(line, recorder, attempts))
                    task.add_done_callback(lambda _: slots.release())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _run_line(self, line: Line, recorder: Recorder[Result], attempts: LineAttempts) -> None:
        shop, num_tries = self._shop, 0
        if attempts.is_used_up(line):
            await recorder.record(lost_line(self.job, line, MAX_LOST))
            return
        while True:
            async with shop.pace.permit(alone=attempts.runs_alone(line)):
                num_tries += 1
                await attempts.begin(line)
                answer = await shop.send(self.job, line)
                retry_s = answer.retry_s(num_tries)
                if retry_s is None:
                    await recorder.record(result_of(self.job, line, answer))
                    attempts.has_result(line)
                    return
                await attempts.end(line)
            if answer.lacks_room:
                shop.pace.shrink()
            await asyncio.sleep(retry_s)

    async def _finish(self) -> None:
        shop = self._shop
        job = self.job = await shop.threads.insist(shop.store.renew, self.job, shop.clock(), self._lease_s)
        if job.status is Status.CANCELLING:
            status = Status.CANCELLED
        else:
            status = Status.EXPIRED if job.num_open or not job.num_lines else Status.COMPLETED
        output = OutputFiles(shop.store, shop.storage)
        files = await shop.threads.insist(output.write, job, self._input, shop.now_s)
        self.job = await shop.threads.insist(shop.store.finish, job, status, *files, shop.now_s)

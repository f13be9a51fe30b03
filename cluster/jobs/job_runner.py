"""Runs the jobs of a database on this router: takes those that no router runs, and keeps the folder tidy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection

from baton.core.errors import BatonError
from baton.process.background import BackgroundTasks
from cluster.jobs.file_records import FileRecords
from cluster.jobs.job_run import LEASE_S, JobRun, Workshop
from cluster.jobs.job_store import LeaseLostError
from cluster.jobs.job_types import Job
from cluster.jobs.setbacks import Setbacks
from cluster.telemetry.job_figures import JobFigures

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_MAX_JOBS = 8
"""Jobs that one router runs at the same time. They take turns with their lines."""
_COUNT_S = 5.0
_UPKEEP_S = 600.0


class JobRunner:
    """
    Args:
        holder: name for leases, of this router and its earlier processes alone.
        models: the names of the served model.

    Attributes:
        figures: of all jobs; ``None`` before the first ones.
    """

    def __init__(
        self,
        shop: Workshop,
        files: FileRecords,
        holder: str,
        models: Callable[[], Collection[str]],
        lease_s: float = LEASE_S,
        setbacks: Setbacks | None = None,
    ) -> None:
        self._shop = shop
        self._files = files
        self._holder = holder
        self._models = models
        self._lease_s = lease_s
        self._setbacks = setbacks or Setbacks()
        self._runs: dict[str, JobRun] = {}
        self._tasks = BackgroundTasks()
        self._running: set[asyncio.Task[None]] = set()
        self._is_wanted = asyncio.Event()
        self._upkeep_due_s = self._count_due_s = time.monotonic()
        self.figures: JobFigures | None = None

    async def run(self) -> None:
        """Runs jobs until it is cancelled. Then it gives its leases back, so that others go on at once."""
        try:
            while True:
                await self._take_jobs()
                await self._count()
                await self._keep_tidy()
                self._is_wanted.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._is_wanted.wait()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def wake(self) -> None:
        """Looks for jobs at once."""
        self._is_wanted.set()

    def end_early(self, job_id: str) -> None:
        """Ends a job at once that was cancelled, if this router runs it."""
        if job_id in self._runs:
            self._runs[job_id].end_early()
        self._setbacks.clear(job_id)
        self.wake()

    async def _take_jobs(self) -> None:
        shop = self._shop
        claimed = await shop.threads.insist(
            shop.store.claim,
            self._holder,
            self._models(),
            shop.clock(),
            self._lease_s,
            running=self._runs.keys() | self._setbacks.waiting(),
            limit=_MAX_JOBS - len(self._runs),
        )
        for job in claimed:
            self._runs[job.id] = JobRun(job, shop, self._lease_s)
            task = self._tasks.spawn(self._run(self._runs[job.id]))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, run: JobRun) -> None:
        """Runs a job. If it fails, it is tried again later, and given up after several failures."""
        job: Job = run.job
        try:
            await self._attempt(run, job)
        except LeaseLostError as error:
            self._setbacks.clear(job.id)
            logger.warning("%s", error.message)
        except Exception:
            logger.exception("the batch %s could not be given up", job.id)
        except asyncio.CancelledError:
            with contextlib.suppress(BatonError):
                await self._shop.threads.run(self._shop.store.release, job)
            raise
        finally:
            del self._runs[job.id]

    async def _attempt(self, run: JobRun, job: Job) -> None:
        try:
            await run.run()
        except LeaseLostError:
            raise
        except BatonError as error:
            reason = error.message
            logger.error("the batch %s was interrupted: %s", job.id, reason)
        except Exception as error:
            reason = f"Its runs end with an internal error ({type(error).__name__}); the router's log has more."
            logger.exception("the batch %s was interrupted", job.id)
        else:
            self._setbacks.clear(job.id)
            return
        if self._setbacks.add(job):
            await run.give_up(reason)
            self._setbacks.clear(job.id)

    async def _count(self) -> None:
        if time.monotonic() < self._count_due_s:
            return
        self._count_due_s = time.monotonic() + _COUNT_S
        try:
            self.figures = await self._shop.threads.run(self._shop.store.figures)
        except BatonError as error:
            logger.warning("jobs were not counted: %s", error.message)

    async def _keep_tidy(self) -> None:
        if time.monotonic() < self._upkeep_due_s:
            return
        self._upkeep_due_s = time.monotonic() + _UPKEEP_S
        try:
            await self._shop.threads.run(self._remove_old)
        except BatonError as error:
            logger.warning("expired files were not removed: %s", error.message)

    def _remove_old(self) -> None:
        shop = self._shop
        for file_id in self._files.remove_expired(shop.now_s):
            shop.storage.remove(file_id)
        shop.store.remove_old(shop.now_s)
        shop.storage.remove_strays(self._files.known)

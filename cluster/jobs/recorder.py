"""Records the results of one job. Results that arrive while a transaction runs share the next one."""

from __future__ import annotations

import asyncio

from cluster.jobs.job_store import JobStore
from cluster.jobs.job_threads import JobThreads
from cluster.jobs.job_types import Job, Result


class Recorder:
    """Writes results of ``job`` under its token."""

    def __init__(self, store: JobStore, threads: JobThreads, job: Job) -> None:
        self._store = store
        self._threads = threads
        self._job = job
        self._pending: list[tuple[Result, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def record(self, result: Result) -> None:
        """Returns when the result is durable. While disk or database fail, it waits and tries again.

        Raises:
            LeaseLostError: another router runs the job.
        """
        done = asyncio.get_running_loop().create_future()
        self._pending.append((result, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        await done

    async def close(self) -> None:
        """Drops what no transaction has begun to write, and waits for the end of the one that runs."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self) -> None:
        while self._pending:
            taken, self._pending = self._pending, []
            error: Exception | None = None
            try:
                await self._threads.insist(self._store.record, self._job, [result for result, _ in taken])
            except Exception as problem:  # noqa: BLE001 - a fault of baton must end the wait of the lines, too
                error = problem
            for _, done in taken:
                if done.done():  # its line was cancelled
                    continue
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
        self._writing = None

"""Writes the changes of one job. Changes that arrive while a transaction runs share the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from cluster.jobs.job_threads import JobThreads
from cluster.jobs.job_types import Job

T = TypeVar("T")


class Recorder(Generic[T]):
    """
    Args:
        write: writes changes under the token of the job, in one transaction.
    """

    def __init__(self, write: Callable[[Job, list[T]], None], threads: JobThreads, job: Job) -> None:
        self._write = write
        self._threads = threads
        self._job = job
        self._pending: list[tuple[T, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def record(self, change: T) -> None:
        """Returns when the change is durable. While disk or database fail, it waits and tries again.

        Raises:
            LeaseLostError: another router runs the job.
        """
        done = asyncio.get_running_loop().create_future()
        self._pending.append((change, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await done

    async def close(self) -> None:
        """Drops what no transaction has begun to write, and waits for the end of the one that runs."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write_all(self) -> None:
        while self._pending:
            taken, self._pending = self._pending, []
            error: Exception | None = None
            try:
                await self._threads.insist(self._write, self._job, [change for change, _ in taken])
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

"""Files and jobs, as the gateway sees them. Nothing here blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import InvalidRequestError, NotFoundError
from cluster.jobs.database import Database
from cluster.jobs.file_records import FileRecords
from cluster.jobs.file_storage import FileStorage
from cluster.jobs.input_lines import InputFile, ParseObject
from cluster.jobs.job_run import Workshop
from cluster.jobs.job_runner import JobRunner
from cluster.jobs.job_store import JobStore
from cluster.jobs.job_threads import JobThreads
from cluster.jobs.job_types import FILE_ID, JOB_ID, Job, StoredFile, new_id
from cluster.jobs.jobs_config import JobsConfig
from cluster.jobs.pace import Pace
from cluster.jobs.result_lines import LineSender
from cluster.jobs.uploads import Upload, check_file_size
from cluster.telemetry.job_figures import JobFigures

BATCH_PURPOSE = "batch"
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What jobs need of the router.

    Attributes:
        send: runs a line as a request.
        parse: parses the JSON of a line.
        max_line_bytes: the longest line.
        models: the names of the served model, the main one first.
    """

    send: LineSender
    parse: ParseObject
    max_line_bytes: int
    models: Callable[[], Collection[str]]


class Jobs:
    """All files and jobs of a database.

    Args:
        holder: name of this router for leases, which its next process has, too.

    Raises:
        ConfigError: ``jobs.database`` cannot be used.
    """

    def __init__(self, config: JobsConfig, pace: Pace, holder: str) -> None:
        self._config = config
        self._pace = pace
        self._holder = holder
        self._threads = JobThreads()
        self._database = Database(config.database_url)
        self._storage = FileStorage(config.folder)
        self._files = FileRecords(self._database)
        self._store = JobStore(self._database)
        self._is_open = False
        self._runner: JobRunner | None = None
        self._models: Callable[[], Collection[str]] = tuple

    async def run(self, endpoint: Endpoint) -> None:
        """Runs jobs until it is cancelled."""
        shop = Workshop(
            store=self._store,
            storage=self._storage,
            threads=self._threads,
            pace=self._pace,
            open_input=lambda job: InputFile(
                self._storage.path(job.input_file_id), job.endpoint, endpoint.parse, endpoint.max_line_bytes
            ),
            send=endpoint.send,
            max_lines=self._config.max_lines,
            max_in_flight=self._config.max_in_flight,
        )
        self._models = endpoint.models
        try:
            await self._threads.insist(self._create)
            self._runner = JobRunner(shop, self._files, self._holder, endpoint.models)
            await self._runner.run()
        finally:
            self._runner = None
            with contextlib.suppress(asyncio.CancelledError):
                await self._threads.run(self._database.close)

    @property
    def figures(self) -> JobFigures | None:
        """The figures of all jobs, a few seconds old; ``None`` before the first ones."""
        return None if self._runner is None else self._runner.figures

    def check_size(self, num_bytes: int) -> None:
        """Raises :class:`RequestTooLargeError` if a file may not have so many bytes."""
        check_file_size(num_bytes, self._config.max_file_bytes)

    async def upload(self, owner: str, filename: str) -> Upload:
        """Begins a file; its owner sees it when it is complete.

        Raises:
            JobsUnavailableError, StorageFullError: it cannot be written.
        """
        await self._open()
        await self._threads.ask(self._database.check)  # a database that hangs is known before the client sends bytes
        file_id = new_id(FILE_ID)
        new = await self._threads.run(self._storage.write, file_id)
        file = StoredFile(file_id, owner, BATCH_PURPOSE, filename, num_bytes=0, created_at=0)
        return Upload(self._threads, self._files, new, file, self._config.max_file_bytes)

    async def file(self, owner: str, file_id: str) -> StoredFile:
        """Raises :class:`NotFoundError` unless the owner has this file."""
        await self._open()
        return await self._threads.ask(self._files.get, owner, file_id)

    async def files(
        self, owner: str, *, after: str | None, limit: int, purpose: str | None, oldest_first: bool
    ) -> tuple[list[StoredFile], bool]:
        """The owner's files behind ``after``, and whether there are more."""
        await self._open()
        return await self._threads.ask(
            self._files.listed, owner, after=after, limit=limit, purpose=purpose, oldest_first=oldest_first
        )

    async def content(self, owner: str, file_id: str) -> tuple[StoredFile, Path]:
        """A file and where its content is. Raises :class:`NotFoundError`."""
        file = await self.file(owner, file_id)
        path = self._storage.path(file.id)
        if not await self._threads.run(path.is_file):
            raise NotFoundError(
                f"The content of the file {file_id!r} is not in {path.parent}. Routers on several machines must share "
                "the folder (jobs.dir).",
                param="file_id",
            )
        return file, path

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Raises :class:`NotFoundError`, or :class:`ConflictError` for the input of a job that has not ended."""
        await self.file(owner, file_id)  # which is not waited for without limit
        await self._threads.run(self._files.remove, owner, file_id)
        await self._threads.run(self._storage.remove, file_id)

    async def create(
        self,
        owner: str,
        *,
        endpoint: str,
        input_file_id: str,
        window: tuple[str, int],
        metadata: dict[str, str] | None,
        keep_s: int | None,
    ) -> Job:
        """Creates a job and begins it.

        Args:
            window: the completion window as text and in seconds.
            keep_s: seconds until its output expires; ``None`` means ``jobs.keep_days``.

        Raises:
            NotFoundError: the owner has no such file.
            InvalidRequestError: the file has another purpose.
        """
        try:
            file = await self.file(owner, input_file_id)
        except NotFoundError as error:
            error.param = "input_file_id"
            raise
        if file.purpose != BATCH_PURPOSE:
            raise InvalidRequestError(
                f"The file {file.id!r} has the purpose {file.purpose!r}, and a batch needs one with {BATCH_PURPOSE!r}.",
                param="input_file_id",
            )
        now_s = int(time.time())
        job = Job(
            id=new_id(JOB_ID),
            owner=owner,
            model=next(iter(self._models()), ""),
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window[0],
            created_at=now_s,
            expires_at=now_s + window[1],
            keep_s=keep_s or self._config.keep_days * _DAY_S,
            metadata=metadata,
        )
        await self._threads.run(self._store.add, job)
        if self._runner is not None:
            self._runner.wake()
        return job

    async def job(self, owner: str, job_id: str) -> Job:
        """Raises :class:`NotFoundError` unless the owner has this job."""
        await self._open()
        return await self._threads.ask(self._store.get, owner, job_id)

    async def jobs(self, owner: str, *, after: str | None, limit: int) -> tuple[list[Job], bool]:
        """The owner's jobs behind ``after``, and whether there are more."""
        await self._open()
        return await self._threads.ask(self._store.listed, owner, after=after, limit=limit)

    async def cancel(self, owner: str, job_id: str) -> Job:
        """Raises :class:`NotFoundError`, or :class:`ConflictError` for a job that has ended."""
        await self._open()
        job = await self._threads.ask(self._store.cancel, owner, job_id, int(time.time()))
        if self._runner is not None:
            self._runner.end_early(job_id)
        return job

    async def _open(self) -> None:
        """Creates folder and tables, if this process has not. Raises the errors of :meth:`Database.create_tables`."""
        if not self._is_open:
            await self._threads.ask(self._create)

    def _create(self) -> None:
        self._storage.create()
        self._database.create_tables()
        self._is_open = True

"""A PostgreSQL server that hangs: whatever asks it is told so in time, and everything goes on when it does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from sqlalchemy import text

from baton.core.errors import JobsUnavailableError
from cluster.jobs import job_threads
from cluster.jobs.database import Database
from cluster.jobs.job_types import Job, StoredFile
from cluster.jobs.jobs import Jobs
from cluster.jobs.jobs_config import JobsConfig
from cluster.jobs.pace import Pace
from cluster.jobs.tables import METADATA
from tests.job_services import is_urgent, jsonl, line

OWNER = "owner"

Ask = Callable[[Jobs, StoredFile, Job], Awaitable[object]]

ASKS: dict[str, Ask] = {
    "upload": lambda jobs, file, job: jobs.upload(OWNER, "in.jsonl"),
    "file": lambda jobs, file, job: jobs.file(OWNER, file.id),
    "files": lambda jobs, file, job: jobs.files(OWNER, after=None, limit=9, purpose=None, oldest_first=False),
    "content": lambda jobs, file, job: jobs.content(OWNER, file.id),
    "delete_file": lambda jobs, file, job: jobs.delete_file(OWNER, file.id),
    "create": lambda jobs, file, job: created(jobs, file),
    "job": lambda jobs, file, job: jobs.job(OWNER, job.id),
    "jobs": lambda jobs, file, job: jobs.jobs(OWNER, after=None, limit=9),
    "cancel": lambda jobs, file, job: jobs.cancel(OWNER, job.id),
}


async def uploaded(jobs: Jobs) -> StoredFile:
    upload = await jobs.upload(OWNER, "in.jsonl")
    try:
        await upload.write(jsonl(line("a")))
        return await upload.finish(None)
    finally:
        await upload.close()


async def created(jobs: Jobs, file: StoredFile) -> Job:
    return await jobs.create(
        OWNER,
        endpoint="/v1/chat/completions",
        input_file_id=file.id,
        window=("24h", 86_400),
        metadata=None,
        keep_s=None,
    )


@contextmanager
def frozen(url: str) -> Iterator[None]:
    """Stops the processes of the server."""
    database = Database(url)
    with database.reading() as connection:
        server = psutil.Process(connection.scalar(text("SELECT pg_backend_pid()"))).parent()
        assert server is not None
        processes = [server, *server.children()]
        try:
            for process in processes:
                process.suspend()
            yield
        finally:
            for process in processes:
                process.resume()
    database.close()


@pytest.fixture
async def jobs(postgres_url: str, tmp_path: Path) -> AsyncIterator[Jobs]:
    config = JobsConfig(dir=str(tmp_path / "jobs"), database=postgres_url)
    yield Jobs(config, Pace(config.max_in_flight, is_urgent), "test/0")
    database = Database(postgres_url)
    with database.writing() as connection:
        METADATA.drop_all(connection)
    database.close()


async def test_whoever_asks_is_told_in_time(jobs: Jobs, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = await uploaded(jobs)
    job = await created(jobs, file)
    monkeypatch.setattr(job_threads, "_PATIENCE_S", 0.3)
    with frozen(postgres_url):
        for ask in ASKS.values():
            with pytest.raises(JobsUnavailableError, match="has not answered for"):
                await ask(jobs, file, job)
    monkeypatch.undo()
    found, _ = await jobs.files(OWNER, after=None, limit=9, purpose=None, oldest_first=False)
    assert [one.id for one in found] == [file.id]
    assert (await jobs.job(OWNER, job.id)).status == "validating"
    assert (await uploaded(jobs)).num_bytes == file.num_bytes

"""A job in progress on its own database, and what its runs need."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.gateway.openai.json_body import parse_object
from cluster.jobs.database import Database
from cluster.jobs.file_records import FileRecords
from cluster.jobs.file_storage import FileStorage
from cluster.jobs.input_lines import InputFile
from cluster.jobs.job_run import JobRun, Workshop
from cluster.jobs.job_store import JobStore
from cluster.jobs.job_threads import JobThreads
from cluster.jobs.job_types import Job, Line
from cluster.jobs.pace import Pace
from cluster.jobs.result_lines import Answer
from tests.job_services import is_urgent, jsonl, line
from tests.unit.cluster.jobs.made_jobs import LEASE_S, MODEL, made_job, stored_file

URL = "/v1/completions"
NUM_LINES = 12
ALL = [f"n{number}" for number in range(1, NUM_LINES + 1)]


class Sender:
    """Answers lines, waits while ``is_held``, or raises if ``is_broken``.

    Attributes:
        seen: the numbers of the lines that were sent.
        refuse: the error of a line, or ``None``.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.refuse: Callable[[Line], Answer | None] = lambda _: None
        self.is_held: Callable[[Line], bool] = lambda _: False
        self.is_broken: Callable[[Line], bool] = lambda _: False

    async def __call__(self, job: Job, line: Line) -> Answer:
        self.seen.append(line.number)
        if self.is_held(line):
            await asyncio.Event().wait()
        if self.is_broken(line):
            raise ValueError("broken")
        await asyncio.sleep(0)
        return self.refuse(line) or Answer(200, f"id-{line.number}", b'{"text":"done"}')


class World:
    """A job in progress, and what its runs need."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(f"sqlite:///{folder / 'jobs.sqlite'}")
        self.database.create_tables()
        self.store, self.files = JobStore(self.database), FileRecords(self.database)
        self.storage = FileStorage(folder / "files")
        self.storage.create()
        self.sender, self.threads, self.now_s = Sender(), JobThreads(), 200.0
        self.shop = Workshop(
            store=self.store,
            storage=self.storage,
            threads=self.threads,
            pace=Pace(4, is_urgent),
            open_input=lambda job: InputFile(self.storage.path(job.input_file_id), job.endpoint, parse_object, 10_000),
            send=self.sender,
            max_lines=100,
            max_in_flight=4,
            clock=lambda: self.now_s,
        )
        file = stored_file()
        new = self.storage.write(file.id)
        new.write(jsonl(*(line(f"n{number}", URL, prompt="hello") for number in range(1, NUM_LINES + 1))))
        new.commit()
        self.files.add(file)
        self.job = made_job(file)
        self.store.add(self.job)

    def close(self) -> None:
        self.threads.close()
        self.database.close()

    def claim(self, holder: str = "a", lease_s: float = LEASE_S) -> JobRun:
        (job,) = self.store.claim(holder, [MODEL], self.now_s, lease_s, running=[], limit=1)
        return JobRun(job, replace(self.shop, pace=Pace(4, is_urgent)), lease_s)

    def now(self) -> Job:
        return self.store.get("", self.job.id)

    def contents(self) -> list[str]:
        """The custom ids in the output file."""
        return [one["custom_id"] for one in self._lines(self.now().output_file_id)]

    def errors(self) -> dict[str, str]:
        """The codes in the error file, by custom id."""
        return {one["custom_id"]: one["error"]["code"] for one in self._lines(self.now().error_file_id)}

    def _lines(self, file_id: str | None) -> list[Any]:
        return [json.loads(text) for text in self.storage.path(file_id).read_bytes().splitlines()] if file_id else []

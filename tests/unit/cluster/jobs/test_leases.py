"""Routers that die, hang and come back at any moment: each line has exactly one result in the files of its job."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.errors import BatonError, InternalError
from cluster.jobs.database import Database
from cluster.jobs.file_records import FileRecords
from cluster.jobs.job_store import JobStore, LeaseLostError
from cluster.jobs.job_types import Job, Status, StoredFile
from tests.unit.cluster.jobs.made_jobs import LEASE_S, MODEL, made_job, result, stored_file

LINES = 6
ROUTERS = ("a", "b")


@dataclass
class Process:
    """A router's process. An old one may be hung, and go on later without knowing that it was replaced."""

    holder: str
    job: Job
    written: tuple[StoredFile | None, tuple[Job, list[Any]]] | None = None


class Routers(RuleBasedStateMachine):
    """The steps of :class:`cluster.jobs.job_run.JobRun`, in any order that crashes and hangs allow."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.database = Database(f"sqlite:///{self.folder / 'jobs.sqlite'}")
        self.database.create_tables()
        self.store, files = JobStore(self.database), FileRecords(self.database)
        file = stored_file()
        files.add(file)
        self.job = made_job(file)
        self.store.add(self.job)
        self.now_s = 100.0
        self.processes: list[Process] = []
        self.recorded: dict[int, bytes] = {}
        self.contents: dict[str, list[Any]] = {}
        self.num_texts = 0

    @initialize()
    def begins(self) -> None:
        self.claims("a")
        self.processes[0].job = self.store.begin(self.processes[0].job, LINES, 100)

    @rule(holder=st.sampled_from(ROUTERS))
    def claims(self, holder: str) -> None:
        """A process of this router starts; an earlier one may still hang somewhere."""
        for job in self.store.claim(holder, [MODEL], self.now_s, LEASE_S, running=[], limit=5):
            self.processes.append(Process(holder, job))

    @rule(seconds=st.sampled_from([1.0, LEASE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        self.processes.remove(data.draw(st.sampled_from(self.processes)))

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), numbers=st.sets(st.integers(1, LINES), min_size=1))
    def records(self, data: st.DataObject, numbers: set[int]) -> None:
        process = data.draw(st.sampled_from(self.processes))
        self.num_texts += 1
        text = f"answer {self.num_texts}".encode()
        try:
            self.store.record(process.job, [result(number, text) for number in numbers])
        except LeaseLostError:
            self.processes.remove(process)
        else:
            for number in numbers:
                self.recorded.setdefault(number, text)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def writes_files(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self.processes))
        try:
            process.job = self.store.begin_finalizing(process.job, int(self.now_s))
            begun = self.store.renew(process.job, self.now_s, LEASE_S)
        except (LeaseLostError, InternalError):
            return
        found = self.store.results(begun.id, failed=False, after=0, limit=99)
        output = stored_file(purpose="batch_output") if found else None
        process.written = (output, (begun, [(one.number, one.text) for one in found]))

    @precondition(lambda self: any(process.written for process in self.processes))
    @rule(data=st.data())
    def finishes(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([process for process in self.processes if process.written]))
        assert process.written is not None
        output, (begun, content) = process.written
        is_cancelled = begun.status is Status.CANCELLING
        status = Status.CANCELLED if is_cancelled else Status.EXPIRED if begun.num_open else Status.COMPLETED
        try:
            self.store.finish(begun, status, output, None, int(self.now_s))
        except BatonError:
            return
        if output is not None:
            self.contents[output.id] = content

    @rule()
    def is_cancelled(self) -> None:
        if self.num_texts > 4:
            try:
                self.store.cancel("", self.job.id, int(self.now_s))
            except BatonError:
                return

    @invariant()
    def each_line_is_there_once(self) -> None:
        job = self.store.get("", self.job.id)
        assert job.num_completed == len(self.recorded)
        if job.status in (Status.COMPLETED, Status.EXPIRED, Status.CANCELLED):
            content = self.contents[job.output_file_id] if job.output_file_id else []
            assert content == sorted(self.recorded.items())
            assert job.status is not Status.COMPLETED or len(content) == LINES
        else:
            rows = self.store.results(self.job.id, failed=False, after=0, limit=99)
            assert [(one.number, one.text) for one in rows] == sorted(self.recorded.items())

    def teardown(self) -> None:
        self.database.close()
        shutil.rmtree(self.folder)


TestRouters = Routers.TestCase
TestRouters.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)

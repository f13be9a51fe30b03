"""Writes the output and the error file of a job that has no line left to run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from cluster.jobs.file_storage import FileStorage
from cluster.jobs.input_lines import InputFile
from cluster.jobs.job_store import JobStore
from cluster.jobs.job_types import FILE_ID, Job, Status, StoredFile, new_id
from cluster.jobs.result_lines import expired_line

_PAGE = 200
"""Results that are in memory at the same time."""


class OutputFiles:
    """Its methods block; call them in a thread."""

    def __init__(self, store: JobStore, storage: FileStorage) -> None:
        self._store = store
        self._storage = storage

    def write(self, job: Job, source: InputFile | None, now_s: int) -> tuple[StoredFile | None, StoredFile | None]:
        """Writes both files and returns their records, which :meth:`JobStore.finish` adds. An empty file is not made.

        Each call makes files of its own, so that a router which lost its lease meanwhile does not touch the ones that
        count; files without a record are removed later.

        Args:
            source: for the lines of an expired job that have no result; ``None`` leaves them out.

        Raises:
            StorageFullError, JobsUnavailableError: they cannot be written.
        """
        output = self._write(job, "output", self._results(job, failed=False), now_s)
        rest: Iterable[bytes] = ()
        if source is not None and job.status is Status.FINALIZING and job.num_open:
            done = self._store.numbers_done(job.id)
            rest = (expired_line(job, line) for line in source.lines(done))
        return output, self._write(job, "error", chain(self._results(job, failed=True), rest), now_s)

    def _results(self, job: Job, *, failed: bool) -> Iterator[bytes]:
        after = 0
        while page := self._store.results(job.id, failed=failed, after=after, limit=_PAGE):
            yield from (result.text for result in page)
            after = page[-1].number

    def _write(self, job: Job, kind: str, texts: Iterable[bytes], now_s: int) -> StoredFile | None:
        file_id = new_id(FILE_ID)
        new = self._storage.write(file_id)
        try:
            for text in texts:
                new.write(text + b"\n")
            if new.num_bytes == 0:
                return None
            new.commit()
        finally:
            new.discard()
        name = f"{job.id}_{kind}.jsonl"
        return StoredFile(file_id, job.owner, "batch_output", name, new.num_bytes, now_s, now_s + job.keep_s)

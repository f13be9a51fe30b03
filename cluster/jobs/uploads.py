"""A file while its client sends it."""

from __future__ import annotations

import time
from dataclasses import replace

from baton.core.errors import RequestTooLargeError
from cluster.jobs.file_records import FileRecords
from cluster.jobs.file_storage import NewFile
from cluster.jobs.job_threads import JobThreads
from cluster.jobs.job_types import StoredFile


def check_file_size(num_bytes: int, max_bytes: int) -> None:
    """Raises :class:`RequestTooLargeError` if a file of so many bytes, or more, is too large."""
    if num_bytes > max_bytes:
        raise RequestTooLargeError(
            f"The file is larger than the limit of {max_bytes} bytes (jobs.max_file_bytes). Divide it into several.",
            param="file",
        )


class Upload:
    """The file becomes visible with :meth:`finish`. The caller must call :meth:`close` in any case.

    Args:
        max_bytes: the largest file.
    """

    def __init__(
        self, threads: JobThreads, records: FileRecords, new: NewFile, file: StoredFile, max_bytes: int
    ) -> None:
        self._threads = threads
        self._records = records
        self._new = new
        self._file = file
        self._max_bytes = max_bytes

    async def write(self, data: bytes) -> None:
        """Appends bytes.

        Raises:
            RequestTooLargeError: the file is too large.
            JobsUnavailableError, StorageFullError: it cannot be written.
        """
        check_file_size(self._new.num_bytes + len(data), self._max_bytes)
        await self._threads.run(self._new.write, data)

    async def finish(self, keep_s: int | None) -> StoredFile:
        """Makes the file durable and visible.

        Args:
            keep_s: seconds until it expires; ``None`` keeps it until it is deleted.

        Raises:
            JobsUnavailableError, StorageFullError: it cannot be written.
        """
        await self._threads.run(self._new.commit)
        now_s = int(time.time())
        expires_at = None if keep_s is None else now_s + keep_s
        file = replace(self._file, num_bytes=self._new.num_bytes, created_at=now_s, expires_at=expires_at)
        await self._threads.run(self._records.add, file)
        return file

    async def close(self) -> None:
        """Removes what was written, unless the upload is finished."""
        await self._threads.run(self._new.discard)

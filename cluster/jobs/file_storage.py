"""The content of files. A file under its own name is complete and survives the loss of power.

Interrupted writes leave temporary files, which :meth:`FileStorage.remove_strays` removes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from baton.core.errors import BatonError, JobsUnavailableError, StorageFullError
from baton.core.files import AtomicFile, is_full, refuse_full_disk

_PREFIX = "file-"
_TEMPORARY_PREFIX = f".{_PREFIX}"
_STRAY_S = 86_400.0
"""Age in seconds of files that no process writes any more."""
_RESERVE_BYTES = 64 * 2**20
"""Uploads leave this much of the disk to the database."""
_CHECK_EVERY_BYTES = 16 * 2**20


class FileStorage:
    """A folder of files by id. The methods block; call them in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self) -> None:
        """Creates the folder. Raises :class:`JobsUnavailableError`."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise JobsUnavailableError(f"Cannot create the folder {self._folder} of jobs: {error.strerror}.") from error

    def path(self, file_id: str) -> Path:
        return self._folder / file_id

    def write(self, file_id: str) -> NewFile:
        """Begins a file.

        Raises:
            JobsUnavailableError, StorageFullError: it cannot be created.
        """
        with storage_errors(self._folder):
            return NewFile(self.path(file_id))

    def remove(self, file_id: str) -> None:
        """Removes a file, if it is there."""
        with storage_errors(self._folder):
            self.path(file_id).unlink(missing_ok=True)

    def remove_strays(self, known: Callable[[list[str]], set[str]]) -> None:
        """Removes what interrupted writes have left for a day.

        Args:
            known: those of some ids that have a record.
        """
        with storage_errors(self._folder):
            oldest_s = time.time() - _STRAY_S
            files = (path for path in self._folder.iterdir() if path.name.startswith((_PREFIX, _TEMPORARY_PREFIX)))
            old = [path for path in files if path.stat().st_mtime < oldest_s]
            recorded = known([path.name for path in old]) if old else set()
            for path in old:
                if path.name not in recorded:
                    path.unlink(missing_ok=True)


class NewFile:
    """A file that is being written. It appears with :meth:`commit`; :meth:`discard` removes what was written."""

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        self._file = AtomicFile(path)
        self._checked_bytes = -_CHECK_EVERY_BYTES
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Appends bytes. Raises :class:`StorageFullError`."""
        with storage_errors(self._folder):
            if self.num_bytes - self._checked_bytes >= _CHECK_EVERY_BYTES:
                refuse_full_disk(self._folder, _RESERVE_BYTES)
                self._checked_bytes = self.num_bytes
            self._file.stream.write(data)
            self.num_bytes += len(data)

    def commit(self) -> None:
        """Makes the file appear under its name, durably. Raises :class:`StorageFullError`."""
        with storage_errors(self._folder):
            self._file.commit(is_durable=True)

    def discard(self) -> None:
        """Removes what was written. Does nothing after :meth:`commit`."""
        self._file.discard()


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turns errors of the file system into errors with a name."""
    try:
        yield
    except BatonError:
        raise
    except OSError as error:
        if is_full(error):
            raise StorageFullError(
                f"The disk of {folder} has no room for the files of jobs, which leave {_RESERVE_BYTES // 2**20} MiB "
                "free. Make room on the disk, delete files of jobs (DELETE /v1/files/ID), or name another folder in "
                "jobs.dir."
            ) from error
        raise JobsUnavailableError(f"The folder {folder} of jobs cannot be used: {error.strerror or error}.") from error

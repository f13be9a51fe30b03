"""The content of files: on disk, written under a temporary name and then renamed.

A file under its own name is complete and survives the loss of power. Interrupted writes leave temporary files, which
:meth:`FileStorage.remove_strays` removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from baton.core.errors import BatonError, JobsUnavailableError, StorageFullError

_TEMPORARY = ".part"
_STRAY_S = 86_400.0
"""Age in seconds of files that no process writes any more."""
_RESERVE_BYTES = 64 * 2**20
"""Uploads leave this much of the disk to the database."""
_CHECK_EVERY_BYTES = 16 * 2**20


class FileStorage:
    """A folder of files by id. The methods block; call them in a thread.

    Args:
        free_bytes: free bytes on the disk of a folder.
    """

    def __init__(
        self, folder: Path, free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    ) -> None:
        self._folder = folder
        self._free_bytes = free_bytes

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
            return NewFile(self.path(file_id), self._check_room)

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
            old = [path for path in self._folder.glob("file-*") if path.stat().st_mtime < oldest_s]
            names = [path.name for path in old if path.suffix != _TEMPORARY]
            recorded = known(names) if names else set()
            for path in old:
                if path.name not in recorded:
                    path.unlink(missing_ok=True)

    def _check_room(self) -> None:
        if self._free_bytes(self._folder) < _RESERVE_BYTES:
            raise _full(self._folder)


class NewFile:
    """A file that is being written. It appears with :meth:`commit`; :meth:`discard` removes what was written."""

    def __init__(self, path: Path, check_room: Callable[[], None]) -> None:
        self._path = path
        self._temporary = path.with_suffix(_TEMPORARY)
        self._check_room = check_room
        self._checked_bytes = -_CHECK_EVERY_BYTES
        self._stream: BinaryIO = self._temporary.open("wb")
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Appends bytes. Raises :class:`StorageFullError`."""
        with storage_errors(self._path.parent):
            if self.num_bytes - self._checked_bytes >= _CHECK_EVERY_BYTES:
                self._check_room()
                self._checked_bytes = self.num_bytes
            self._stream.write(data)
            self.num_bytes += len(data)

    def commit(self) -> None:
        """Makes the file appear under its name, durably. Raises :class:`StorageFullError`."""
        with storage_errors(self._path.parent):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._temporary.rename(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def discard(self) -> None:
        """Removes what was written. Does nothing after :meth:`commit`."""
        with contextlib.suppress(OSError):
            self._stream.close()  # which writes the rest of its buffer
        self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turns errors of the file system into errors with a name."""
    try:
        yield
    except BatonError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _full(folder) from error
        raise JobsUnavailableError(f"The folder {folder} of jobs cannot be used: {error.strerror or error}.") from error


def _full(folder: Path) -> StorageFullError:
    return StorageFullError(
        f"The disk of {folder} has no room for the files of jobs. Delete files (DELETE /v1/files/ID), or name another "
        "folder in jobs.dir."
    )

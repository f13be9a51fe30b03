"""Keeps a second training out of a working folder, whose files both would write under the same names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from baton.core.errors import ConfigError
from baton.core.files import writing

_LOCK_NAME = ".lock"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds the folder, which is made if it does not exist.

    Raises:
        ConfigError: another process holds it, on this machine or on another one that shares the folder.
        StorageError: it cannot be written.
    """
    lock = FileLock(folder / _LOCK_NAME)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(
                f"Another `baton train` works in {folder}. Wait for its end, or name another folder with --work."
            ) from error
    try:
        yield
    finally:
        lock.release()

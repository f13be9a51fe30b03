"""Files that are written as a whole or not at all. A full disk is an error that names the file."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.core.errors import StorageError, StorageFullError

_ADVICE = "Choose another folder."


@contextmanager
def writing(
    path: Path, advice: str = _ADVICE, also: tuple[type[Exception], ...] = (), if_full: str | None = None
) -> Iterator[None]:
    """Turns any ``OSError`` into an error that names ``path`` and says what to do.

    Args:
        advice: what to do, as a sentence.
        also: what else a library raises when it cannot write. Its reason may be a full disk.
        if_full: what to do if the disk is full; ``None``: free some space there, or what ``advice`` says.

    Raises:
        StorageFullError: its disk is full.
        StorageError: it cannot be written for another reason.
    """
    failures: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except failures as error:
        reason = getattr(error, "strerror", None) or error
        kind = StorageFullError if is_full(error) else StorageError
        if kind is StorageFullError or not isinstance(error, OSError):
            advice = if_full or f"Free some space there, or {advice[0].lower()}{advice[1:]}"
        raise kind(f"{path} cannot be written: {reason}. {advice}") from error


@contextmanager
def replacing(path: Path, also: tuple[type[Exception], ...] = ()) -> Iterator[Path]:
    """Yields a path to write to, and renames it to ``path`` at the end. A failure leaves an older file as it was.

    Raises:
        StorageError: it cannot be written; see :func:`writing`.
    """
    temporary = path.with_suffix(".partial")
    try:
        with writing(path, also=also):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_full(error: BaseException) -> bool:
    """Whether the error says that a disk, or the user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refuse_full_disk(folder: Path, least_bytes: int) -> None:
    """Raises ``OSError`` (ENOSPC) if the disk of ``folder`` has less free space."""
    if shutil.disk_usage(folder).free < least_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def replace_file(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Writes a file and replaces an older one atomically. A failure leaves the older one as it was.

    Args:
        mode: the file's permissions, from the start.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = AtomicFile(path, mode)
    try:
        new.stream.write(content.encode() if isinstance(content, str) else content)
        new.commit()
    finally:
        new.discard()


class AtomicFile:
    """A file that is written under a temporary name in the same folder, and appears under its own when it is complete.

    All methods raise ``OSError``. The temporary name begins with a dot and the file's own.

    Args:
        mode: the file's permissions, from the start.

    Attributes:
        stream: takes the content.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        self._path = path
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        self._temporary = Path(temporary)
        self.stream = os.fdopen(descriptor, "wb")
        os.fchmod(descriptor, mode)

    def commit(self, *, is_durable: bool = False) -> None:
        """Makes the file appear in place of an older one.

        Args:
            is_durable: first sync it to the disk, so that it survives the loss of power.
        """
        self.stream.flush()
        if is_durable:
            os.fsync(self.stream.fileno())
        self.stream.close()
        self._temporary.replace(self._path)
        if is_durable:
            _sync_folder(self._path.parent)

    def discard(self) -> None:
        """Removes what was written. Does nothing after :meth:`commit`."""
        with suppress(OSError):
            self.stream.close()  # which writes the rest of its buffer
        self._temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

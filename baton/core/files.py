"""Files that are written as a whole or not at all. A full disk is an error that names the file."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.core.errors import StorageError

_ADVICE = "Free some space there, or choose another folder."


@contextmanager
def writing(path: Path, advice: str = _ADVICE, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raises :class:`StorageError`, which names ``path`` and says what to do, in place of any ``OSError``.

    Args:
        also: what else a library raises when it cannot write.
    """
    failures: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except failures as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{path} cannot be written: {reason}. {advice}") from error


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
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

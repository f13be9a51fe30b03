"""A private folder for the files of one Ray node: logs, sockets and packages.

Ray makes its own folders writable for everybody, so they lie in one that only their owner can enter:

    /tmp/baton-1000/         owner only
        0/  0.lock           one node's files; its process holds the lock, in which the head's address may be
        1/  1.lock

A node takes the first folder whose lock is free, and removes what earlier nodes left there except for the last one's
logs. So the files of clusters that have ended do not pile up, however they ended.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.core.errors import ConfigError
from baton.core.files import refuse_full_disk, writing

_MAX_NODES = 100
_LEAST_BYTES = 64 * 2**20
"""Ray's logs at its start take some of it; without any space, Ray ends without saying why."""
_MAX_PATH_BYTES = 42
"""Linux limits the paths of sockets to 107 bytes; Ray adds up to 65, such as
``/session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store``."""
_SHORT_PARENT = Path("/tmp")


class RayFolder:
    """Holds a folder until it is closed or the process ends.

    Args:
        parent: where the user's private folder is made. Default: the system's temporary folder, or ``/tmp`` where that
            has too long a path.

    Raises:
        ConfigError: the folder cannot be made private, or its path is too long.
        StorageError: its disk is full.
    """

    def __init__(self, parent: Path | None = None) -> None:
        root = _private_root(parent)
        needed = f"Ray needs {_LEAST_BYTES // 2**20} MiB there."
        with writing(root, "Set TMPDIR to another folder.", if_full=f"{needed} Free some space, or set TMPDIR."):
            lock, self.path = _take_place(root)
            self._lock: int | None = lock
            _remove_old_sessions(self.path)
            try:
                refuse_full_disk(root, _LEAST_BYTES)
            except OSError:
                self.close()
                raise

    def publish_head(self, address: str) -> None:
        """Lets other processes of this user find the cluster's head with :func:`published_heads`."""
        if self._lock is not None:
            os.pwrite(self._lock, address.encode(), 0)

    def close(self) -> None:
        """Lets another node have the folder, which keeps its files until then."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def published_heads(parent: Path | None = None) -> list[str]:
    """``host:port`` of the heads of this user's nodes on this machine that are running."""
    heads = set()
    for file in _private_root(parent).glob("*.lock"):
        with file.open("rb") as lock:
            if not _acquire(lock.fileno()):
                heads.add(lock.read().decode())
    return sorted(heads - {""})


def _take_place(root: Path) -> tuple[int, Path]:
    """Locks the first folder that is free; returns the lock's descriptor and the folder."""
    for number in range(_MAX_NODES):
        lock = os.open(root / f"{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        if _acquire(lock):
            os.ftruncate(lock, 0)
            return lock, root / str(number)
        os.close(lock)
    raise ConfigError(f"All {_MAX_NODES} folders in {root} are in use. End some of the Ray nodes of this user.")


def _acquire(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _private_root(parent: Path | None) -> Path:
    name = f"baton-{os.geteuid()}"
    if parent is None:
        parent = Path(tempfile.gettempdir())
        parent = parent if _fits(parent / name) else _SHORT_PARENT
    root = parent / name
    if not _fits(root):
        raise ConfigError(f"The path {root} is too long for Ray's sockets; set TMPDIR to a shorter one.")
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(
                f"{root} is not a folder of this user, so Ray's files would not be safe there. Remove it, or set "
                "TMPDIR to a folder of your own."
            )
        root.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"The folder {root} for Ray's files cannot be made: {error}. Set TMPDIR.") from error
    return root


def _fits(root: Path) -> bool:
    return len(os.fsencode(root / str(_MAX_NODES))) <= _MAX_PATH_BYTES


def _remove_old_sessions(folder: Path) -> None:
    """Removes the files of all nodes but the last one, and the last one's sockets and packages."""
    found = [path for path in folder.glob("session_*") if path.is_dir() and not path.is_symlink()]
    sessions = sorted(found, key=lambda path: path.stat().st_mtime)
    for session in sessions[:-1]:
        shutil.rmtree(session, ignore_errors=True)
    for path in (entry for session in sessions[-1:] for entry in session.iterdir()):
        if path.name != "logs" and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)

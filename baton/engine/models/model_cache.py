"""A cache of model folders that baton makes itself; each is written atomically. No torch at import.

A folder is made under a temporary name and then renamed, so that other processes see it complete or not at all, however
often the work was interrupted. A manifest inside says what it was made from.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from baton.core.errors import ModelUnavailableError
from baton.core.files import refuse_full_disk
from baton.engine.models.model_folder import find_problem, write_manifest

CACHE_VARIABLE = "BATON_CACHE"
_POLL_S = 0.5
_LEAST_FREE_BYTES = 2**20
"""With less free space, a command has failed because of that, even if its log had no room to say so."""

Report = Callable[[str], None]


def cache_dir() -> Path:
    """Folder of what baton can make again: ``$BATON_CACHE``, else ``~/.cache/baton``."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "baton"


def ensure_folder(
    folder: Path, source: str, make: Callable[[Path], Path], report: Report | None = None, *, verify: bool = False
) -> Path:
    """Returns the folder; makes it first if it is missing, incomplete, or made from another source.

    Safe to interrupt at any moment, and safe for several processes at once: one works, the others wait for it.

    Args:
        source: what the folder is made from and how, for its manifest.
        make: makes the content inside a working folder, which is removed afterwards, and returns the content's folder.
        report: called with one line of progress at a time.
        verify: compare every file with its recorded SHA-256, not only names and sizes.

    Raises:
        ModelUnavailableError: the cache cannot be written, or ``make`` raises it.
    """
    say: Report = report or (lambda line: None)
    if find_problem(folder, source, hashes=verify) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock", say):
            problem = find_problem(folder, source, hashes=verify)
            if problem is not None:
                if folder.exists():
                    say(f"rebuilding {folder}: {problem}")
                _build(folder, source, make)
                say(f"the model is ready in {folder}")
    except OSError as error:
        raise ModelUnavailableError(
            f"The model could not be written to {folder.parent}: {error}. "
            f"Set {CACHE_VARIABLE} to a writable folder with enough space."
        ) from error
    return folder


def run_logged(
    command: list[str], log: Path, variables: dict[str, str], while_running: Callable[[], None] = lambda: None
) -> int:
    """Runs a command with its output in ``log``, calls ``while_running`` twice a second, returns the exit status.

    Raises:
        OSError: the command has failed because the log's disk is full.
    """
    status = _run(command, log, variables, while_running)
    if status:
        is_named = os.strerror(errno.ENOSPC) in log.read_text(encoding="utf-8", errors="replace")
        refuse_full_disk(log.parent, sys.maxsize if is_named else _LEAST_FREE_BYTES)
    return status


def _run(command: list[str], log: Path, variables: dict[str, str], while_running: Callable[[], None]) -> int:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **variables},
        )
        try:
            while True:
                try:
                    return process.wait(timeout=_POLL_S)
                except subprocess.TimeoutExpired:
                    while_running()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def last_line(log: Path) -> str:
    """The most informative line of a log after a failure: the last error, else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "no module named" in line.lower()]
    return (errors or lines or ["no output"])[-1]


def _build(folder: Path, source: str, make: Callable[[Path], Path]) -> None:
    """Makes the folder. The caller holds the lock."""
    for leftover in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        made = make(work)
        write_manifest(made, source)
        if folder.exists():
            folder.rename(work / "replaced")
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(lock_file: Path, say: Report) -> Iterator[None]:
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("another process is preparing the model; waiting for it")
        started_s = time.monotonic()
        lock.acquire()
        say(f"waited {time.monotonic() - started_s:.0f} s for another process")
    try:
        yield
    finally:
        lock.release()

"""A disk without free space, for tests: a small file system of its own, which needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_SMALL_BYTES = 65536
FILLER = "filler"
"""The file that takes all of the space; remove it to make room."""


def why_no_mounts(folder: Path) -> str:
    """Why no file system can be mounted at ``folder``; empty if it can."""
    if os.geteuid():
        return "mounting a file system needs root"
    done = _mount(folder, _SMALL_BYTES)
    if done.returncode:
        return f"no file system can be mounted here: {done.stderr.strip()}"
    _unmount(folder)
    return ""


@contextlib.contextmanager
def mounted(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Makes ``folder`` a disk of its own with this much space."""
    _mount(folder, num_bytes).check_returncode()
    try:
        yield folder
    finally:
        _unmount(folder)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """Makes ``folder`` a full disk. Files can be created in it, but have no room for content."""
    with mounted(folder, _SMALL_BYTES):
        fill(folder)
        yield folder


def fill(folder: Path) -> None:
    """Takes all free space of the disk of ``folder``."""
    with contextlib.suppress(OSError), (folder / FILLER).open("ab", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))


def _mount(folder: Path, num_bytes: int) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "baton-test", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], timeout=30, check=True)

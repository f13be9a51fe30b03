"""The files of a run's cluster, of which the logs are kept if the run fails."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOGS = "logs"
"""The folder of the logs in each of Ray's sessions."""


@contextmanager
def run_folder(kept: Path, has_failed: Callable[[], bool], report: Callable[[str], None]) -> Iterator[Path]:
    """A folder for all files of a cluster, which is removed at the end.

    Args:
        kept: where the logs are copied to if the run has failed or raises; anything there from an earlier run goes.
        has_failed: called at the end.
        report: is told where the logs are.
    """
    shutil.rmtree(kept, ignore_errors=True)
    # Ray's sockets need a short path, and its last processes may still write while the folder is removed.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as name:
        is_complete = False
        try:
            yield Path(name)
            is_complete = True
        finally:
            if not is_complete or has_failed():
                keep_logs(Path(name), kept)
                report(f"The logs of the cluster's processes are in {kept}")


def keep_logs(folder: Path, kept: Path) -> None:
    """Copies the logs in ``folder``: the files called ``*.log``, and of Ray's sessions the folders of logs."""
    for file in folder.rglob("*"):
        path = file.relative_to(folder)
        if file.is_file() and not file.is_symlink() and (file.suffix == ".log" or _LOGS in path.parts[:-1]):
            target = kept / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # Ray renames logs that have become long
                shutil.copyfile(file, target)

"""Ends a child process with its parent, however the parent ends.

``python -m baton.process.parent PID PROGRAM ARGUMENT...`` becomes a program that ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Makes Linux kill this process as soon as its parent ends, even while this process is stopped.

    Args:
        parent: process id of the parent, which may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        sys.exit(1)


def tied(command: Sequence[str]) -> list[str]:
    """A command that does the same as ``command``, and ends with this process.

    ``preexec_fn`` of :class:`subprocess.Popen` could do so, too, but runs Python between fork and exec, which may crash
    in a process that has threads.
    """
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # the kernel keeps the tie

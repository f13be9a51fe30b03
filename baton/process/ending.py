"""Ends a process of this machine that may hang."""

from __future__ import annotations

import contextlib
import os
import signal


def end_process(pid: int | None) -> None:
    """Ends a process at once, even one that is stopped. Ignores ``None``, and processes that have ended."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

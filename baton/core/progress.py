"""Progress of work that takes long: how lines reach the user from where the work is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Report = Callable[[str], None]

_report: ContextVar[Report | None] = ContextVar("report", default=None)


def report_progress(line: str) -> None:
    """Passes a line to the receiver that :func:`progress_to` has set for this context, if any."""
    receiver = _report.get()
    if receiver is not None:
        receiver(line)


@contextmanager
def progress_to(report: Report) -> Iterator[None]:
    """Sends what :func:`report_progress` gets within the block to ``report``."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


@contextmanager
def progress_on_stderr() -> Iterator[None]:
    """Shows progress on standard error: a line that is updated on a terminal, otherwise line after line."""
    is_terminal, has_line = sys.stderr.isatty(), False

    def show(line: str) -> None:
        nonlocal has_line
        sys.stderr.write(f"\r\x1b[K{line}" if is_terminal else f"{line}\n")
        sys.stderr.flush()
        has_line = True

    try:
        with progress_to(show):
            yield
    finally:
        if is_terminal and has_line:
            sys.stderr.write("\n")

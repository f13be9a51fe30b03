"""Stops work on request, at moments when all of it is on disk."""

from __future__ import annotations

from collections.abc import Callable

from baton.core.errors import BatonError

Stop = Callable[[], bool]
"""Returns True when the work is to end."""


class StoppedError(BatonError):
    """The work was stopped on request. A new start resumes it."""

    code = "stopped"


def never() -> bool:
    """For work that runs to its end."""
    return False


def check(stop: Stop) -> None:
    """Raises :class:`StoppedError` when the work is to end."""
    if stop():
        raise StoppedError("stopped on request.")

"""Stops work on request, at points where all of it is on disk."""

from __future__ import annotations

from collections.abc import Callable

from baton.core.errors import BatonError

Stop = Callable[[], bool]
"""Returns True when the work should stop."""


class StoppedError(BatonError):
    """The work was stopped on request. A new start resumes it."""

    code = "stopped"


def never() -> bool:
    """A :data:`Stop` that never stops."""
    return False


def check(stop: Stop) -> None:
    """Raises :class:`StoppedError` when the work should stop."""
    if stop():
        raise StoppedError("stopped on request.")

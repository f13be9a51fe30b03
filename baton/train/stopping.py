"""How work is ended from outside, at moments when everything that was done is on disk."""

from __future__ import annotations

from collections.abc import Callable

from baton.core.errors import BatonError

Stop = Callable[[], bool]
"""True when somebody wants the work to end."""


class StoppedError(BatonError):
    """The work was ended on request. Begun again, it goes on from here."""

    code = "stopped"


def never() -> bool:
    """For work that nobody ends."""
    return False


def check(stop: Stop) -> None:
    """Raises :class:`StoppedError` when the work is to end."""
    if stop():
        raise StoppedError("stopped on request.")

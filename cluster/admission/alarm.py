"""A timer that is set again and again, and goes off at the earliest of these times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """
    Args:
        ring: what happens when it goes off.
        clock: monotonic seconds.
    """

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def set(self, at_s: float) -> None:
        """It goes off then, or earlier if it was set to that before."""
        if self._timer is not None:
            if self._due_s <= at_s:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - self._clock()), self._go_off)
        self._due_s = at_s

    def cancel(self) -> None:
        """It does not go off, unless it is set again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _go_off(self) -> None:
        self._timer = None
        self._ring()

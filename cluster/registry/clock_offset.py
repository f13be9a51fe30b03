"""The offset between a worker's monotonic clock and this process's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from baton.core.timeline import Event, Timeline

_CAUSES = {
    Event.PREFILL_QUEUED: Event.ROUTED,
    Event.DECODE_RECEIVED: Event.FIRST_TOKEN,
    Event.DECODE_QUEUED: Event.FIRST_TOKEN,
}
"""Events of workers, and the event of this process that each of them follows."""


class ClockOffset:
    """Measured with round trips, and corrected by the order of events.

    A measurement is as wrong as half a round trip, which is long on a busy machine. And it is outdated when a clock
    jumps, as that of a virtual machine does that was stopped for a while. But a worker's event happens before its
    arrival here, and after what caused it.

    Args:
        clock: this process's monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._offset_s: float | None = None

    def measured(self, offset_s: float, error_s: float) -> None:
        """Takes a measurement of the seconds that the worker's clock is behind.

        An offset within the error counts as zero, since processes of one host share the clock.
        """
        self._offset_s = 0.0 if abs(offset_s) <= error_s else offset_s

    def has_arrived(self, last_s: float) -> float | None:
        """The seconds to add to the worker's times in a message that has just arrived; ``None`` while unknown.

        Args:
            last_s: the latest of these times.
        """
        if self._offset_s is not None:
            self._offset_s = min(self._offset_s, self._clock() - last_s)
        return self._offset_s

    def record(self, timeline: Timeline, events: Mapping[Event, float]) -> None:
        """Adds a worker's events to a timeline, on this process's clock. Drops them while the offset is unknown."""
        for event, cause in _CAUSES.items():
            if self._offset_s is not None and event in events and cause in timeline.events:
                self._offset_s = max(self._offset_s, _least_offset(timeline.events[cause], events[event]))
        shift_s = self.has_arrived(max(events.values(), default=-math.inf))
        if shift_s is None:
            return
        for event, at_s in events.items():
            timeline.replace(event, at_s + shift_s)


def _least_offset(cause_s: float, event_s: float) -> float:
    """The least offset with which the event is not before its cause, despite rounding."""
    offset_s = cause_s - event_s
    return offset_s if event_s + offset_s >= cause_s else offset_s + math.ulp(max(abs(offset_s), abs(cause_s)))

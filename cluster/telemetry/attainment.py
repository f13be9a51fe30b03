"""Attainment and goodput of SLO classes over sliding windows, in constant memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

WINDOWS: Mapping[str, float] = {"1m": 60.0, "5m": 300.0, "1h": 3600.0}
"""Window names and lengths in seconds."""

_NUM_BUCKETS = 60
# A rate over a shorter span would be noise.
_MIN_SPAN_S = 1.0


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """The requests of a window.

    Attributes:
        num_met: the requests among ``num_requests`` that met both targets of their class.
        span_s: time that the window covers, which is less than its length at first.
    """

    num_requests: int
    num_met: int
    span_s: float

    @property
    def attainment(self) -> float | None:
        """Share of requests that met their targets; ``None`` without requests."""
        return self.num_met / self.num_requests if self.num_requests else None

    @property
    def goodput(self) -> float:
        """Requests per second that met their targets."""
        return self.num_met / self.span_s


class SlidingWindow:
    """Counts requests of the last ``window_s`` seconds in a ring of buckets.

    It drops a bucket at a time, so it covers the window less at most one bucket (a sixtieth by default). Reading has no
    side effects and may happen in another thread than counting.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, window_s: float, clock: Callable[[], float] = time.monotonic, num_buckets: int = _NUM_BUCKETS
    ) -> None:
        self._clock = clock
        self._num_buckets = num_buckets
        self._bucket_s = window_s / num_buckets
        self._began_s = clock()
        # The index since the clock's zero of the interval that each bucket counts.
        self._numbers = [-1] * num_buckets
        self._requests = [0] * num_buckets
        self._met = [0] * num_buckets

    def add(self, *, met: bool) -> None:
        """Counts a request that ends now."""
        number = int(self._clock() // self._bucket_s)
        index = number % self._num_buckets
        if self._numbers[index] != number:
            # Cleared before its number changes, so a concurrent reader skips it as old or finds it empty.
            self._requests[index] = self._met[index] = 0
            self._numbers[index] = number
        self._requests[index] += 1
        self._met[index] += met

    def read(self) -> WindowFigures:
        now_s = self._clock()
        oldest = int(now_s // self._bucket_s) - self._num_buckets + 1
        kept = [index for index, number in enumerate(self._numbers) if number >= oldest]
        span_s = now_s - max(self._began_s, oldest * self._bucket_s)
        # In the opposite order of a concurrent `add`, so that num_met never exceeds num_requests.
        num_met = sum(self._met[index] for index in kept)
        return WindowFigures(
            sum(self._requests[index] for index in kept),
            num_met,
            max(span_s, _MIN_SPAN_S),
        )


class AttainmentTracker:
    """The windows of every class.

    Args:
        names: names of the classes.
        clock: monotonic seconds.
    """

    def __init__(self, names: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[str, dict[str, SlidingWindow]] = {}
        self.add_classes(names)

    def add_classes(self, names: Iterable[str]) -> None:
        """Counts further classes; known ones keep their figures."""
        new = {
            name: {window: SlidingWindow(seconds, self._clock) for window, seconds in WINDOWS.items()}
            for name in names
            if name not in self._windows
        }
        self._windows = {**self._windows, **new}  # a reader in another thread iterates over the old one

    def add(self, name: str, *, met: bool) -> None:
        """Counts a request of the class ``name`` that ends now. Raises :class:`KeyError` for an unknown class."""
        for window in self._windows[name].values():
            window.add(met=met)

    def read(self) -> dict[str, dict[str, WindowFigures]]:
        """The figures by class and window."""
        return {
            name: {window: counts.read() for window, counts in windows.items()}
            for name, windows in self._windows.items()
        }

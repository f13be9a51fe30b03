"""Handling of SIGINT and SIGTERM in a process that runs a cluster. Python delivers them to the main thread."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopEvent:
    """An event that may be set in a signal handler.

    :meth:`threading.Event.set` takes a lock that the interrupted thread may hold in :meth:`threading.Event.wait`,
    which is a deadlock. :class:`queue.SimpleQueue` is safe in handlers.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._news.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the event is set, at most ``timeout_s``. Returns whether it is set."""
        if not self._is_set:
            with suppress(queue.Empty):
                self._news.get(timeout=timeout_s)
                self._news.put(None)  # for other waiting threads
        return self._is_set


class StopSignals:
    """A context in which the first signal sets ``stop`` and, until :meth:`end_of_start`, raises KeyboardInterrupt.

    Only KeyboardInterrupt passes through asyncio and ray unchanged. Later signals have no effect, except that with
    ``impatient`` another SIGINT also raises it, so that a second Ctrl-C skips the shutdown.
    """

    def __init__(self, *, impatient: bool = True) -> None:
        self.stop = StopEvent()
        self._impatient = impatient
        self._unwinds = True
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def end_of_start(self) -> None:
        """Makes later signals only set ``stop``."""
        self._unwinds = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop.is_set():
            if number == signal.SIGINT and self._impatient:
                raise KeyboardInterrupt
            return
        self.stop.set()
        if self._unwinds:
            raise KeyboardInterrupt


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Delivers signals after the block, to the handlers from before it.

    It wraps ``ray.init``, which crashes if a handler raises inside it, and which sets SIGTERM handlers of its own. Its
    Python handler exits, which is treated as a SIGTERM. Its C++ handler sets an alarm that aborts the process three
    seconds later, which is cancelled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    timer, on_alarm = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    previous = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in _SIGNALS}
    try:
        yield
    except SystemExit:  # only ray's handlers exit in ray.init
        arrived.append(signal.SIGTERM)
        raise  # unless an earlier handler raises something else
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if signal.SIGTERM in arrived:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            if on_alarm is not None:  # Python cannot restore a handler set outside of Python
                signal.signal(signal.SIGALRM, on_alarm)
        for late in arrived:
            signal.raise_signal(late)

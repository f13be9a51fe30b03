"""What SIGINT and SIGTERM do to a process that starts and runs a cluster. Python delivers them to the main thread."""

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
    """An event that a signal handler may set.

    :meth:`threading.Event.set` takes a lock that the thread which the signal interrupts may hold, in
    :meth:`threading.Event.wait`; it would then wait for ever. :class:`queue.SimpleQueue` is made for handlers.
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
        """Waits until it is set, or so long. Whether it is set."""
        if not self._is_set:
            with suppress(queue.Empty):
                self._news.get(timeout=timeout_s)
                self._news.put(None)  # for whoever else waits
        return self._is_set


class StopSignals:
    """As a context: the first signal sets ``stop`` and, until :meth:`end_of_start`, raises KeyboardInterrupt.

    Of all exceptions only this one passes through asyncio and ray unharmed. Later signals change nothing, except that
    with ``impatient`` another SIGINT raises it too: whoever presses Ctrl-C again does not want to wait for a shutdown.
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
        """From here on a signal only sets ``stop``."""
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

    For ``ray.init``, which crashes when a handler raises in the middle of it, and sets SIGTERM handlers of its own.
    Those of Python exit, which is taken for the SIGTERM that it is; that of C++ has the process aborted three seconds
    later by an alarm, which is called off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    timer, on_alarm = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    previous = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in _SIGNALS}
    try:
        yield
    except SystemExit:  # nothing but those handlers exits in ray.init
        arrived.append(signal.SIGTERM)
        raise  # unless a handler from before raises something else
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if signal.SIGTERM in arrived:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            if on_alarm is not None:  # Python cannot set a handler again that others had set
                signal.signal(signal.SIGALRM, on_alarm)
        for late in arrived:
            signal.raise_signal(late)

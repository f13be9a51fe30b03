"""Handling of SIGINT, SIGTERM and SIGHUP in a process that runs a cluster. Python delivers them to the main thread."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Literal, Self

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

    def wake(self) -> None:
        """Ends the present or the next wait before its time.

        Every handler must wake or set the event: when one has taken longer than the rest of the timeout of
        :meth:`queue.SimpleQueue.get`, CPython goes on to wait without a timeout.
        """
        self._news.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the event is set, at most ``timeout_s``. Returns whether it is set."""
        if not self._is_set:
            with suppress(queue.Empty):
                self._news.get(timeout=timeout_s)
                if self._is_set:
                    self._news.put(None)  # for other waiting threads
        return self._is_set


class StopSignals:
    """A context in which the first signal sets ``stop`` and, until :meth:`end_of_start`, raises KeyboardInterrupt.

    Only KeyboardInterrupt passes through asyncio and ray unchanged. Later signals have no effect, except that with
    ``impatient`` another SIGINT also raises it, so that a second Ctrl-C skips the shutdown.

    Args:
        on_hangup: ``"reload"`` makes SIGHUP ask for a reload (:meth:`take_reload`), unless it came because the
            terminal was closed, which stops. ``"end"`` leaves SIGHUP as it is.
    """

    def __init__(self, *, impatient: bool = True, on_hangup: Literal["reload", "end"] = "end") -> None:
        self.stop = StopEvent()
        self._impatient = impatient
        self._numbers = (*_SIGNALS, signal.SIGHUP) if on_hangup == "reload" else _SIGNALS
        self._num_hangups = 0
        self._num_taken = 0
        self._had_terminal = _has_terminal()
        self._unwinds = True
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in self._numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def end_of_start(self) -> None:
        """Makes later signals only set ``stop``."""
        self._unwinds = False

    def take_reload(self) -> bool:
        """Whether a reload was asked for since the last call."""
        num_hangups = self._num_hangups  # a signal between two reads counts for the next call
        wanted, self._num_taken = num_hangups != self._num_taken, num_hangups
        return wanted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and not (self._had_terminal and not _has_terminal()):
            self._num_hangups += 1
            self.stop.wake()
            return
        if self.stop.is_set():
            if number == signal.SIGINT and self._impatient:
                raise KeyboardInterrupt
            return
        self.stop.set()
        if self._unwinds:
            raise KeyboardInterrupt


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal that is still open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


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

"""Runs the engine in a thread of its own. Only this thread touches the scheduler and the blocks: other threads put a
function in the mailbox and get a future. The thread sleeps while there is no work; nothing polls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from baton.core.errors import BatonError, WorkerLostError
from baton.core.request import TokenOutput
from baton.engine.engine import Engine

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Call(Generic[T]):
    """A function in the mailbox, and the future that its sender waits for."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.future: Future[T] = Future()

    def run(self) -> Exception | None:
        """Runs the function; returns its error, which the future gets too."""
        if not self.future.set_running_or_notify_cancel():
            return None
        try:
            self.future.set_result(self._function())
        except BaseException as error:  # noqa: BLE001 - the caller gets it, whatever it is
            self.future.set_exception(error)
            return error if isinstance(error, Exception) else None
        return None

    def fail(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(WorkerLostError("this worker's engine has ended"))


class EngineLoop:
    """Runs an engine until stopped.

    Args:
        on_outputs: called in the engine's thread with every step's new tokens.
        on_idle: called in the engine's thread when it runs out of work after at least one step, before it sleeps. Mail
            alone does not trigger it.
        num_threads: threads that torch may use for this engine; ``None`` keeps torch's default.
        niceness: niceness of the thread and of those that it starts (Linux only).
        on_closed: called in the engine's thread when it ends, for whatever reason.
    """

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[Sequence[TokenOutput]], None],
        on_idle: Callable[[], None] | None = None,
        num_threads: int | None = None,
        on_closed: Callable[[], None] | None = None,
        niceness: int = 0,
    ) -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_idle = on_idle
        self._num_threads = num_threads
        self._niceness = niceness
        self._on_closed = on_closed
        self._mailbox: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()  # None only wakes the thread up
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)
        self._closing = threading.Lock()  # no call enters the mailbox after it is emptied for the last time
        self._closed = False

    def start(self) -> None:
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether the thread has ended or is about to: all calls fail. Any thread may ask."""
        return self._closed

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the current step; pending calls fail with :class:`WorkerLostError`."""
        self._close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        else:
            self._fail_mail()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Runs ``function`` in the engine's thread between two steps."""
        call = _Call(function)
        with self._closing:
            if not self._closed:
                self._mailbox.put(call)
                return call.future
        call.fail()
        return call.future

    async def call(self, function: Callable[[], T]) -> T:
        """Like :meth:`submit`, for asyncio callers."""
        return await asyncio.wrap_future(self.submit(function))

    def _run(self) -> None:
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)  # applies to the calling thread
            if self._niceness and sys.platform == "linux":  # elsewhere it applies to the whole process
                os.nice(self._niceness)
            self._run_until_closed()
        except Exception:
            logger.critical("the engine has stopped", exc_info=True)
        finally:  # callers must not wait for a thread that has ended
            self._close()
            self._fail_mail()
            if self._on_closed is not None:
                self._on_closed()

    def _run_until_closed(self) -> None:
        stalled, has_run = True, False  # has_run: since the engine was last idle
        while self._take_mail(wait=stalled):
            outputs = self._engine.step()
            if outputs:
                self._on_outputs(outputs)
            # Waiting requests that cannot be scheduled are retried when freed blocks are announced by mail.
            stalled = not self._engine.last_step_ran
            has_run = has_run or not stalled
            if stalled and has_run and not self._engine.scheduler.has_work():
                has_run = False
                if self._on_idle is not None:
                    self._on_idle()

    def _take_mail(self, *, wait: bool) -> bool:
        """Runs the calls in the mailbox; returns False when the loop is closed.

        Raises:
            DeviceLostError: a call showed that the device is lost.
        """
        try:
            call = self._mailbox.get(block=wait)
            while True:
                if call is not None:
                    if self._closed:
                        call.fail()
                    elif (error := call.run()) is not None and not isinstance(error, BatonError):
                        self._engine.raise_if_lost(error)
                call = self._mailbox.get_nowait()
        except queue.Empty:
            return not self._closed

    def _close(self) -> None:
        with self._closing:
            self._closed = True
            self._mailbox.put(None)

    def _fail_mail(self) -> None:
        while True:
            try:
                call = self._mailbox.get_nowait()
            except queue.Empty:
                return
            if call is not None:
                call.fail()

"""Gives the engine a thread of its own. Everything that touches scheduler or blocks runs there, one thing at a time:
others leave a function in the mailbox and get a future. A thread without work sleeps; nothing polls.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from engine.engine import Engine
from engine.errors import WorkerLostError
from engine.request import FinishReason, TokenOutput

T = TypeVar("T")

_STOP = object()


class EngineLoop:
    """Runs an engine until stopped.

    Args:
        on_outputs: called in the engine's thread with every step's new tokens, and with the ends of requests that
            were aborted.
        on_idle: called in the engine's thread each time it runs out of work, before it goes to sleep.
        num_threads: threads that torch may use for this engine; None leaves torch's own choice.
    """

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[Sequence[TokenOutput]], None],
        on_idle: Callable[[], None] | None = None,
        num_threads: int | None = None,
    ) -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_idle = on_idle
        self._num_threads = num_threads
        self._mailbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)
        self._closed = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the current step; calls that are still waiting fail."""
        self._closed.set()
        self._mailbox.put(_STOP)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Runs ``function`` in the engine's thread between two steps."""
        future: Future[T] = Future()
        if self._closed.is_set():
            future.set_exception(WorkerLostError("this worker is shutting down"))
            return future

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller gets it, whatever it is
                future.set_exception(error)

        self._mailbox.put(run)
        return future

    async def call(self, function: Callable[[], T]) -> T:
        """:meth:`submit` for asyncio callers."""
        return await asyncio.wrap_future(self.submit(function))

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is. Does not wait; a request that is gone already is fine."""
        self.submit(lambda: self._finish(request_id, FinishReason.ABORT))

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        if self._engine.finish(request_id, reason):
            self._on_outputs([TokenOutput(request_id, finish_reason=reason)])

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # counts for the thread that says it
        stalled = True
        while self._take_mail(wait=stalled):
            outputs = self._engine.step()
            if outputs:
                self._on_outputs(outputs)
            # Waiting requests that cannot be scheduled wake up when somebody gives blocks back, by mail.
            stalled = not self._engine.last_step_ran
            if stalled and self._on_idle is not None and not self._engine.scheduler.has_work():
                self._on_idle()
        self._fail_mail()

    def _take_mail(self, *, wait: bool) -> bool:
        """Runs what lies in the mailbox; False when told to stop."""
        try:
            mail = self._mailbox.get(block=wait)
            while True:
                if mail is _STOP:
                    return False
                mail()  # type: ignore[operator]
                mail = self._mailbox.get_nowait()
        except queue.Empty:
            return True

    def _fail_mail(self) -> None:
        while True:
            try:
                mail = self._mailbox.get_nowait()
            except queue.Empty:
                return
            if mail is not _STOP:
                mail()  # type: ignore[operator]

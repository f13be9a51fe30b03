"""The thread that talks to NIXL for a receiver.

NIXL has no event to wait for: the thread sleeps while nothing is read, and looks every 50 µs while something is.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.core.errors import TransferError
from baton.kv_transfer.payload.nixl_agent import NixlAgent, ReadState

GRACE_S = 5.0
"""How long the thread may take for what takes it no time."""
FAILED = "NIXL cannot read the sender's memory"
SILENT = "it does not answer"
_STOPS = "the worker stops"
_LOOK_EVERY_S = 50e-6


@dataclass(eq=False, slots=True)
class Read:
    """
    Attributes:
        stretch: (address there, address here, number of bytes).
        tell: called once, with an error or None, and whether NIXL has let go of the buffer.
    """

    agent: str
    stretch: tuple[int, int, int]
    tell: Callable[[TransferError | None, bool], None]
    timeout_s: float
    until_s: float = 0.0
    handle: int = 0


class ReadingThread:
    """Makes all calls of an agent, one after the other, and looks at reads under way. Methods are for an event loop."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reads: list[Read] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="kv-nixl", daemon=True)
        self._thread.start()

    def read(self, read: Read) -> None:
        """Begins one."""
        if self._is_closed:
            read.tell(TransferError(f"{FAILED}: {_STOPS}."), True)
        else:
            self._jobs.put(partial(self._begin, read))

    def post(self, function: Callable[[], Any]) -> None:
        """Whatever becomes of it."""

        def job() -> None:
            with suppress(Exception):
                function()

        self._jobs.put(job)

    async def run(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """Its result. Raises TransferError for whatever NIXL raises, or when it takes too long."""
        if self._is_closed:
            raise TransferError(f"{FAILED}: {_STOPS}.")
        done: Future[Any] = Future()

        def job() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except Exception as error:  # noqa: BLE001 - NIXL has many, of no common class
                done.set_exception(TransferError(f"NIXL: {error}"))

        self._jobs.put(job)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(done)
        except TimeoutError:
            raise TransferError(f"NIXL: {SILENT}.") from None

    def close(self) -> None:
        """Takes nothing more; what is being read fails."""
        self._is_closed = True
        self._jobs.put(None)

    def join(self) -> None:
        """Waits for its end, but not for ever. Any thread."""
        self._thread.join(GRACE_S)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(block=not self._reads)
            except queue.Empty:
                self._reads = [read for read in self._reads if not self._is_over(read)]
                time.sleep(_LOOK_EVERY_S if self._reads else 0.0)
                continue
            if job is None:
                break
            job()
        for read in self._reads:
            self._give_up(read, _STOPS, is_over=False)

    def _begin(self, read: Read) -> None:
        try:
            read.handle = self._agent.begin_read(read.agent, *read.stretch)
        except Exception as error:  # noqa: BLE001 - as in run
            read.tell(TransferError(f"{FAILED}: {error}"), True)
            return
        read.until_s = time.monotonic() + read.timeout_s
        if not self._is_over(read):
            self._reads.append(read)

    def _is_over(self, read: Read) -> bool:
        try:
            state = self._agent.state(read.handle)
        except Exception as error:  # noqa: BLE001 - as in run
            self._give_up(read, str(error), is_over=False)
            return True
        if state is ReadState.UNDER_WAY and time.monotonic() < read.until_s:
            return False
        if state is ReadState.DONE:
            with suppress(Exception):
                self._agent.release(read.handle)
            read.tell(None, True)
        elif state is ReadState.FAILED:
            self._give_up(read, "the read failed", is_over=True)
        else:
            self._give_up(read, f"nothing came for {read.timeout_s:g} s", is_over=False)
        return True

    def _give_up(self, read: Read, reason: str, *, is_over: bool) -> None:
        """What is released under way may be written to all the same: UCX stops no such read."""
        with suppress(Exception):
            self._agent.release(read.handle)
        read.tell(TransferError(f"{FAILED}: {reason}."), is_over)

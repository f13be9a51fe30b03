"""NIXL's agent, and the thread that makes a receiver's calls to it.

NIXL has no event to wait for: the thread sleeps while there are no reads, and otherwise polls every 50 µs.
"""

from __future__ import annotations

import asyncio
import importlib
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from baton.core.errors import ConfigError, TransferError

GRACE_S = 5.0
"""Time limit of the thread's calls that should return at once."""
FAILED = "NIXL cannot read the sender's memory"
SILENT = "it does not answer"
_STOPS = "the worker is stopping"
_LOOK_EVERY_S = 50e-6
_BACKEND = "UCX"
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""``nixl`` imports one of the others, which can also be installed without it."""
_PROGRESS_EVERY_US = 100
"""NIXL's own Python class uses 0, with which its thread takes a whole core even while idle."""


class ReadState(Enum):
    """The state of a read."""

    UNDER_WAY = "is under way"
    DONE = "is done"
    FAILED = "failed"


class NixlAgent:
    """The part of NIXL that baton uses. Not thread-safe. Methods raise NIXL's exceptions.

    Args:
        serves: whether other processes read this process's memory, which takes a thread where there is no RDMA.

    Raises:
        ConfigError: NIXL is not installed, or does not start here.
    """

    def __init__(self, *, serves: bool) -> None:
        self._nixl = _import_nixl()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = serves
        config.pthrDelay = _PROGRESS_EVERY_US
        try:
            self._agent = self._nixl.nixlAgent(f"baton-{uuid.uuid4().hex}", config)
            self._backends = [self._agent.createBackend(_BACKEND, {})]
        except Exception as error:  # NIXL's exceptions have no common class
            raise ConfigError(
                f"kv_transfer.transport is nixl, but NIXL cannot start on this node, with {_BACKEND}: {error}."
            ) from error

    def register(self, memory: memoryview) -> Any:
        """Lets this agent read into memory, and other agents read from it, until the result is deregistered."""
        region = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address_of(memory), len(memory), 0, "")])
        self._agent.registerMem(region, self._backends)
        return region

    def deregister(self, region: Any) -> None:
        self._agent.deregisterMem(region, self._backends)

    def description(self) -> bytes:
        """The metadata that another agent needs to read registered memory."""
        return bytes(self._agent.getLocalMD())

    def meet(self, description: bytes) -> str:
        """Loads another agent's metadata and returns the agent's name. Sends nothing to that agent yet."""
        name = self._agent.loadRemoteMD(description)
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> None:
        """Ends the connection to another agent."""
        self._agent.invalidateRemoteMD(name)

    def begin_read(self, name: str, source: int, target: int, num_bytes: int) -> int:
        """Starts a read from another agent's registered memory into registered memory of this process.

        Returns:
            A handle for :meth:`state` and :meth:`release`.
        """
        there, here = (
            self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(address, num_bytes, 0)]) for address in (source, target)
        )
        handle = int(self._agent.createXferReq(self._nixl.NIXL_READ, here, there, name, "", self._backends))
        try:
            self._agent.postXferReq(handle)
        except BaseException:
            self.release(handle)
            raise
        return handle

    def state(self, handle: int) -> ReadState:
        """The state of a read. Polling it also drives the read."""
        status = self._agent.getXferStatus(handle)
        if status == self._nixl.NIXL_SUCCESS:
            return ReadState.DONE
        return ReadState.UNDER_WAY if status == self._nixl.NIXL_IN_PROG else ReadState.FAILED

    def release(self, handle: int) -> None:
        """Releases a read. If it is unfinished, it may still write to its target."""
        self._agent.releaseXferReq(handle)


def address_of(memory: memoryview) -> int:
    """The address of the first byte."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


@dataclass(eq=False, slots=True)
class Read:
    """One read.

    Attributes:
        stretch: source address, target address, number of bytes.
        report: called once, with an error or ``None``, and whether NIXL no longer writes to the buffer.
    """

    agent: str
    stretch: tuple[int, int, int]
    report: Callable[[TransferError | None, bool], None]
    timeout_s: float
    until_s: float = 0.0
    handle: int = 0


class ReadingThread:
    """Makes all calls of an agent, one at a time, and polls its reads. Call the methods from an event loop."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reads: list[Read] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="kv-nixl", daemon=True)
        self._thread.start()

    def read(self, read: Read) -> None:
        """Begins a read."""
        if self._is_closed:
            read.report(TransferError(f"{FAILED}: {_STOPS}."), True)
        else:
            self._jobs.put(partial(self._begin, read))

    def post(self, function: Callable[[], Any]) -> None:
        """Calls a function and ignores its result and errors."""

        def job() -> None:
            with suppress(Exception):
                function()

        self._jobs.put(job)

    async def run(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """Calls a function and returns its result. Raises TransferError when the call fails or takes too long."""
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
        """Accepts no more calls. Pending reads fail."""
        self._is_closed = True
        self._jobs.put(None)

    def join(self) -> None:
        """Waits at most :data:`GRACE_S` for the thread to end. Any thread may call it."""
        self._thread.join(GRACE_S)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(block=not self._reads)
            except queue.Empty:
                self._reads = [read for read in self._reads if not self._has_ended(read)]
                time.sleep(_LOOK_EVERY_S if self._reads else 0.0)
                continue
            if job is None:
                break
            job()
        for read in self._reads:
            self._give_up(read, _STOPS, has_ended=False)

    def _begin(self, read: Read) -> None:
        try:
            read.handle = self._agent.begin_read(read.agent, *read.stretch)
        except Exception as error:  # noqa: BLE001 - as in run
            read.report(TransferError(f"{FAILED}: {error}"), True)
            return
        read.until_s = time.monotonic() + read.timeout_s
        if not self._has_ended(read):
            self._reads.append(read)

    def _has_ended(self, read: Read) -> bool:
        try:
            state = self._agent.state(read.handle)
        except Exception as error:  # noqa: BLE001 - as in run
            self._give_up(read, str(error), has_ended=False)
            return True
        if state is ReadState.UNDER_WAY and time.monotonic() < read.until_s:
            return False
        if state is ReadState.DONE:
            with suppress(Exception):
                self._agent.release(read.handle)
            read.report(None, True)
        elif state is ReadState.FAILED:
            self._give_up(read, "the read failed", has_ended=True)
        else:
            self._give_up(read, f"no data arrived for {read.timeout_s:g} s", has_ended=False)
        return True

    def _give_up(self, read: Read, reason: str, *, has_ended: bool) -> None:
        """Releases the read, which may still write to its buffer: UCX does not stop it."""
        with suppress(Exception):
            self._agent.release(read.handle)
        read.report(TransferError(f"{FAILED}: {reason}."), has_ended)


def _import_nixl() -> Any:
    reasons = []
    for name in _PACKAGES:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            reasons.append(str(error))
    raise ConfigError(
        "kv_transfer.transport is nixl, but NIXL is not installed on this node. Install it with "
        f"`pip install 'baton-serve[nixl]'`, or set kv_transfer.transport to grpc. ({reasons[0]})"
    )

"""Bytes between a socket and where they lie, in either direction: many small stretches of a cache at once, uncopied."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import xxhash

_MOST_AT_ONCE = 256
"""Stretches of one system call, which takes 1,024 at most. One call seldom moves more than a megabyte."""
_LEAST_WORTH = 256 * 1024


class ByteStream(Protocol):
    """Bytes to and from another process, in their order."""

    async def send(self, views: Sequence[memoryview]) -> None:
        """Returns when the system has taken all bytes. Raises OSError when a connection is broken or closed."""
        ...

    async def receive(self, views: Sequence[memoryview], check: Callable[[], None] = ...) -> int:
        """Fills memory with what comes.

        Args:
            check: called before memory is written to, with no pause between; ends it by raising.

        Returns:
            The xxh3-64 of what has come.

        Raises:
            OSError: a connection is broken, closed, or at its end: :class:`NothingCameError` when no byte has come.
        """
        ...

    def close(self) -> None:
        """Who waits for it gets an OSError; harmless when that has been done."""
        ...


class NothingCameError(ConnectionResetError):
    """The connection was at its end when something was waited for."""


def nothing_to_check() -> None:
    """For memory that nobody takes away meanwhile."""


class _Stretches:
    """What is left of some stretches of memory, from the first byte that has not been moved yet."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self._next = 0
        self.num_bytes = self._num_bytes_in_all = sum(map(len, self._views))

    @property
    def has_begun(self) -> bool:
        return self.num_bytes < self._num_bytes_in_all

    def ahead(self) -> list[memoryview]:
        return self._views[self._next : self._next + _MOST_AT_ONCE]

    def moved(self, num_bytes: int) -> list[memoryview]:
        """Passes over so many; they are returned."""
        passed = []
        self.num_bytes -= num_bytes
        while num_bytes:
            view = self._views[self._next]
            if len(view) > num_bytes:
                passed.append(view[:num_bytes])
                self._views[self._next] = view[num_bytes:]
                break
            passed.append(view)
            num_bytes -= len(view)
            self._next += 1
        return passed


class RawSocket:
    """Implements :class:`ByteStream` by a connected socket of the running event loop.

    Args:
        connection: not blocking; closed with this object.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._least = 1

    async def send(self, views: Sequence[memoryview]) -> None:
        left = _Stretches(views)
        while batch := left.ahead():
            try:
                left.moved(self._socket.sendmsg(batch))
            except BlockingIOError:
                await self._until(self._loop.add_writer, self._loop.remove_writer)
            else:
                await asyncio.sleep(0)  # a peer that keeps up must not keep others from this loop

    async def receive(self, views: Sequence[memoryview], check: Callable[[], None] = nothing_to_check) -> int:
        digest = xxhash.xxh3_64()
        await self.fill(views, check, digest.update)  # while it is in the processor's caches
        return digest.intdigest()

    async def fill(
        self, views: Sequence[memoryview], check: Callable[[], None], came: Callable[[memoryview], object]
    ) -> None:
        """:meth:`receive` without a checksum.

        Args:
            came: called with each stretch that has been filled, in their order.
        """
        left = _Stretches(views)
        while batch := left.ahead():
            check()
            try:
                num_bytes = self._socket.recvmsg_into(batch)[0]
            except BlockingIOError:
                self._wake_with(left.num_bytes)
                await self._until(self._loop.add_reader, self._loop.remove_reader)
                continue
            if not num_bytes:
                error = ConnectionResetError if left.has_begun else NothingCameError
                raise error("the connection was closed")
            for view in left.moved(num_bytes):
                came(view)
            await asyncio.sleep(0)

    def _wake_with(self, num_bytes: int) -> None:
        """Not for less than so many, or than makes a call worth while: the sender's system pays for waking this one."""
        least = min(num_bytes, _LEAST_WORTH)
        if least != self._least:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionAbortedError("the connection was closed"))
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()

    async def _until(self, add: Callable[..., object], remove: Callable[[socket.socket], object]) -> None:
        """Waits until the socket can be used again."""
        waiting = self._waiting = self._loop.create_future()
        add(self._socket, _resolve, waiting)
        try:
            await waiting
        finally:
            self._waiting = None
            if self._socket.fileno() >= 0:
                remove(self._socket)


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)

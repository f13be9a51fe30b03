"""Byte streams between two workers over one or several TCP connections, without copies between socket and memory.

Several connections help where each is limited: clouds cap the share of a link that one flow gets, and multipath
networks send a flow along one path. :class:`StripedSocket` distributes the stream in stripes of a fixed size: byte
``n`` is in stripe ``n // STRIPE_BYTES``, which is sent on connection ``stripe % num_connections``. Both ends count
bytes, so no extra framing is sent. All connections run at the speed of the slowest. Each end handles one stripe at a
time; the connections still work in parallel, because the system's buffers hold several stripes each.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import xxhash

STRIPE_BYTES = 512 * 1024
"""Smaller stripes cost more system calls and wake-ups: a third of the rate with 128 KiB. Where a socket's buffer holds
less than a stripe, as on long links with packet loss, the connections mostly take turns."""
_MAX_AT_ONCE = 256
"""Views passed to one system call, whose limit is 1,024. One call rarely moves more than a megabyte."""
_MIN_RECEIVED_BYTES = 256 * 1024


class ByteStream(Protocol):
    """An ordered stream of bytes to and from another process."""

    async def send(self, views: Sequence[memoryview]) -> None:
        """Returns when the system has taken all bytes. Raises OSError when a connection is broken or closed."""
        ...

    async def receive(self, views: Sequence[memoryview], check: Callable[[], None] = ...) -> int:
        """Fills the views with received bytes.

        Args:
            check: called before every write to memory, without awaiting between; raises to stop receiving.

        Returns:
            The xxh3-64 of the received bytes.

        Raises:
            OSError: a connection is broken, closed, or at its end; :class:`NothingCameError` if no byte came before.
        """
        ...

    def close(self) -> None:
        """Closes the stream. Pending calls raise OSError. Harmless when repeated."""
        ...


class NothingCameError(ConnectionResetError):
    """The connection ended before the first byte."""


def nothing_to_check() -> None:
    """Stands in for ``check`` when the memory cannot change its owner."""


class _Stretches:
    """The bytes of some views that are still to be moved."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self._next = 0
        self.num_bytes = self._num_bytes_in_all = sum(map(len, self._views))

    @property
    def has_begun(self) -> bool:
        return self.num_bytes < self._num_bytes_in_all

    def ahead(self) -> list[memoryview]:
        return self._views[self._next : self._next + _MAX_AT_ONCE]

    def moved(self, num_bytes: int) -> list[memoryview]:
        """Advances by ``num_bytes`` and returns the views of these bytes."""
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
    """Implements :class:`ByteStream` over one connected socket, for the running event loop.

    Args:
        connection: a non-blocking socket; closed with this object.
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
                await asyncio.sleep(0)  # a fast peer must not starve other tasks of the loop

    async def receive(self, views: Sequence[memoryview], check: Callable[[], None] = nothing_to_check) -> int:
        digest = xxhash.xxh3_64()
        await self.fill(views, check, digest.update)  # checksummed while the bytes are in the CPU's caches
        return digest.intdigest()

    async def fill(
        self, views: Sequence[memoryview], check: Callable[[], None], came: Callable[[memoryview], object]
    ) -> None:
        """Does what :meth:`receive` does, without a checksum.

        Args:
            came: called with each filled view, in order.
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
        """Sets how many bytes wake this process: waking it for a few bytes costs the sender's system more."""
        least = min(num_bytes, _MIN_RECEIVED_BYTES)
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
        """Waits until the socket is ready again."""
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


def join(sockets: Sequence[RawSocket]) -> ByteStream:
    """Joins sockets, in the same order at both ends, into one stream, which takes them over."""
    return sockets[0] if len(sockets) == 1 else StripedSocket(sockets)


class StripedSocket:
    """Implements :class:`ByteStream`; see :func:`join`."""

    def __init__(self, sockets: Sequence[RawSocket]) -> None:
        self._sockets = tuple(sockets)
        self._num_sent = 0
        self._num_received = 0

    async def send(self, views: Sequence[memoryview]) -> None:
        position = self._num_sent
        self._num_sent += sum(map(len, views))
        for connection, share in self._deal(views, position):
            await connection.send(share)

    async def receive(self, views: Sequence[memoryview], check: Callable[[], None] = nothing_to_check) -> int:
        position = self._num_received
        self._num_received += sum(map(len, views))
        digest = xxhash.xxh3_64()
        for connection, share in self._deal(views, position):
            await connection.fill(share, check, digest.update)
        return digest.intdigest()

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()

    def _deal(self, views: Sequence[memoryview], position: int) -> Iterator[tuple[RawSocket, list[memoryview]]]:
        """Yields each stripe's connection and views, beginning at ``position`` of the stream."""
        share: list[memoryview] = []
        for view in views:
            start = 0
            while start < len(view):
                stripe, offset = divmod(position, STRIPE_BYTES)
                end = min(len(view), start + STRIPE_BYTES - offset)
                share.append(view[start:end])
                position += end - start
                start = end
                if position % STRIPE_BYTES == 0:
                    yield self._sockets[stripe % len(self._sockets)], share
                    share = []
        if share:
            yield self._sockets[position // STRIPE_BYTES % len(self._sockets)], share

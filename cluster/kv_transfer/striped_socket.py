"""One stream of bytes over several TCP connections, for links that limit each of them: clouds cap what one flow may
take of a link, networks of several paths send a flow along one of them, and over a long way its window limits it.

The stream is dealt out in stripes of a fixed size, in turn: byte ``n`` is in stripe ``n // STRIPE_BYTES``, which
travels in connection ``stripe % num_connections``. Both ends count, so nothing but the bytes themselves is sent, and
whatever is above sees one stream in its order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import xxhash

from cluster.kv_transfer.raw_socket import ByteStream, RawSocket, nothing_to_check

STRIPE_BYTES = 256 * 1024
"""A part of the default size gives each of four connections two, and one system call moves a whole one."""


def join(sockets: Sequence[RawSocket]) -> ByteStream:
    """One stream over all of them, which both ends must have in the same order. They belong to it."""
    return sockets[0] if len(sockets) == 1 else StripedSocket(sockets)


class StripedSocket:
    """Implements :class:`cluster.kv_transfer.raw_socket.ByteStream`; see :func:`join`. When one connection breaks, all
    have."""

    def __init__(self, sockets: Sequence[RawSocket]) -> None:
        self._sockets = tuple(sockets)
        self._num_sent = 0
        self._num_received = 0

    async def send(self, views: Sequence[memoryview]) -> None:
        shares = self._deal(views, self._num_sent)
        self._num_sent += sum(map(len, views))
        await _all([socket.send(share) for socket, share in zip(self._sockets, shares, strict=True) if share])

    async def receive(self, views: Sequence[memoryview], check: Callable[[], None] = nothing_to_check) -> int:
        shares = self._deal(views, self._num_received)
        self._num_received += sum(map(len, views))
        await _all(
            [socket.fill(share, check, _nothing) for socket, share in zip(self._sockets, shares, strict=True) if share]
        )
        digest = xxhash.xxh3_64()
        for view in views:
            digest.update(view)
        return digest.intdigest()

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()

    def _deal(self, views: Sequence[memoryview], position: int) -> list[list[memoryview]]:
        """What of the bytes from a position of the stream on travels in each connection."""
        shares: list[list[memoryview]] = [[] for _ in self._sockets]
        for view in views:
            start = 0
            while start < len(view):
                stripe, offset = divmod(position, STRIPE_BYTES)
                end = min(len(view), start + STRIPE_BYTES - offset)
                shares[stripe % len(shares)].append(view[start:end])
                position += end - start
                start = end
        return shares


async def _all(moves: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Waits for all, or for none of them any more when one fails."""
    if len(moves) == 1:  # the head of a part, mostly
        return await moves[0]
    tasks = [asyncio.ensure_future(move) for move in moves]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _nothing(view: memoryview) -> None:
    """The checksum is that of the stream, not of what one connection brings."""

"""One stream of bytes over several TCP connections, for links that limit each of them: clouds cap what one flow may
take of a link, and networks of several paths send a flow along one of them. All go as fast as the slowest of them.

The stream is dealt out in stripes of a fixed size, in turn: byte ``n`` is in stripe ``n // STRIPE_BYTES``, which
travels in connection ``stripe % num_connections``. Both ends count, so nothing but the bytes themselves is sent, and
whatever is above sees one stream in its order.

Either end has one stripe in hand at a time. The connections are busy together all the same, out of and into the
system's buffers, which hold some stripes of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import xxhash

from baton.kv_transfer.payload.raw_socket import ByteStream, RawSocket, nothing_to_check

STRIPE_BYTES = 512 * 1024
"""Smaller ones cost more system calls and wakes: a third of the rate with 128 KiB. Where a socket's buffer holds less
than one, as over a long way that loses packets, the connections rather take turns."""


def join(sockets: Sequence[RawSocket]) -> ByteStream:
    """One stream over all of them, which both ends must have in the same order. They belong to it."""
    return sockets[0] if len(sockets) == 1 else StripedSocket(sockets)


class StripedSocket:
    """Implements :class:`baton.kv_transfer.payload.raw_socket.ByteStream`; see :func:`join`."""

    def __init__(self, sockets: Sequence[RawSocket]) -> None:
        self._sockets = tuple(sockets)
        self._num_sent = 0
        self._num_received = 0

    async def send(self, views: Sequence[memoryview]) -> None:
        position = self._num_sent
        self._num_sent += sum(map(len, views))
        for socket, share in self._deal(views, position):
            await socket.send(share)

    async def receive(self, views: Sequence[memoryview], check: Callable[[], None] = nothing_to_check) -> int:
        position = self._num_received
        self._num_received += sum(map(len, views))
        digest = xxhash.xxh3_64()
        for socket, share in self._deal(views, position):
            await socket.fill(share, check, digest.update)
        return digest.intdigest()

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()

    def _deal(self, views: Sequence[memoryview], position: int) -> Iterator[tuple[RawSocket, list[memoryview]]]:
        """The bytes from a position of the stream on, stripe by stripe, each with its connection."""
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

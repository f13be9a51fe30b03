"""Channels to other workers. All streams to a peer share one channel, which is closed after a while without streams."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc.aio

from baton.core.errors import WorkerLostError
from baton.rpc.channel import create_channel
from baton.rpc.credentials import PeerCredentials

IDLE_S = 300.0
"""A lost worker does not return at the same address. A live worker needs a channel every few seconds."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class PeerChannel:
    """A channel to one peer. Payload paths store what they learn about the peer under this object, while it exists.

    Attributes:
        peer: the address, ``host:port``.
        metadata: what every call must carry.
        num_streams: number of streams that use the channel.
        expiry: timer that closes the channel when it has no streams.
    """

    peer: str
    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...] = ()
    num_streams: int = 0
    expiry: asyncio.TimerHandle | None = None


class PeerChannels:
    """The channels of one worker.

    Args:
        credentials: those of this worker.
        idle_s: how long a channel without streams is kept.
    """

    def __init__(self, credentials: PeerCredentials, idle_s: float = IDLE_S) -> None:
        self._credentials = credentials
        self._idle_s = idle_s
        self._newest: dict[str, PeerChannel] = {}
        self._open: set[PeerChannel] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def take(self, peer: str) -> PeerChannel:
        """Takes a channel for one more stream. Give it back when the stream ends.

        Raises:
            WorkerLostError: all of this worker's channels have been closed.
        """
        if self._closed:
            raise WorkerLostError(f"this worker's connection to {peer} has been closed.")
        entry = self._newest.get(peer)
        if entry is None:
            channel = create_channel(peer, self._credentials)
            entry = self._newest[peer] = PeerChannel(peer, channel, self._credentials.call_metadata(peer))
            self._open.add(entry)
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        entry.num_streams += 1
        return entry

    def give_back(self, entry: PeerChannel) -> None:
        """Ends one stream's use of a channel."""
        entry.num_streams -= 1
        if entry.num_streams or entry not in self._open:
            return
        if self._newest.get(entry.peer) is entry:
            entry.expiry = asyncio.get_running_loop().call_later(self._idle_s, self.retire, entry)
        else:
            self._close(entry)

    def retire(self, entry: PeerChannel) -> None:
        """Stops using the channel for new streams. Its present streams continue, and the last of them closes it."""
        if self._newest.get(entry.peer) is entry:
            del self._newest[entry.peer]
        if not entry.num_streams and entry in self._open:
            self._close(entry)

    async def close(self) -> None:
        """Closes all channels. Their streams fail."""
        self._closed = True
        self._newest.clear()
        for entry in list(self._open):
            self._close(entry)
        await asyncio.gather(*self._closing)

    def _close(self, entry: PeerChannel) -> None:
        self._open.discard(entry)
        if entry.expiry is not None:
            entry.expiry.cancel()
        task = asyncio.create_task(entry.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

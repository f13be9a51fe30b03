"""Channels to other workers: one for all streams to a peer, closed when nobody has needed it for a while."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import grpc.aio

from baton.core.errors import WorkerLostError
from baton.rpc.channel import create_channel

RETRY_S = 60.0
"""What kept a connection from working may have been a moment's."""
IDLE_S = 300.0
"""Workers that are gone do not come back at the same address; those that are there need a channel every few seconds."""


@dataclass(slots=True, eq=False)
class PeerChannel:
    """
    Attributes:
        num_streams: how many use it.
        expiry: closes it, while there are none.
        is_known_remote: the log says already that this peer does not read this worker's memory.
        connects_after_s: monotonic time before which nobody tries to connect to it beside this channel.
    """

    peer: str
    channel: grpc.aio.Channel
    num_streams: int = 0
    expiry: asyncio.TimerHandle | None = None
    is_known_remote: bool = False
    connects_after_s: float = 0.0

    @property
    def may_connect(self) -> bool:
        """Whether a connection beside this channel is worth a try."""
        return time.monotonic() >= self.connects_after_s

    def avoid_connections(self) -> None:
        """One beside this channel could not be opened, or broke while the channel did not."""
        self.connects_after_s = time.monotonic() + RETRY_S


class PeerChannels:
    """
    Args:
        idle_s: how long a channel without streams is kept.
    """

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._newest: dict[str, PeerChannel] = {}
        self._open: set[PeerChannel] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def take(self, peer: str) -> PeerChannel:
        """A channel for one more stream. Whoever takes it gives it back when the stream is over.

        Raises:
            WorkerLostError: all of this worker's channels have been closed.
        """
        if self._closed:
            raise WorkerLostError(f"this worker's connection to {peer} has been closed.")
        entry = self._newest.get(peer)
        if entry is None:
            entry = self._newest[peer] = PeerChannel(peer, create_channel(peer))
            self._open.add(entry)
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        entry.num_streams += 1
        return entry

    def give_back(self, entry: PeerChannel) -> None:
        """One of its streams is over."""
        entry.num_streams -= 1
        if entry.num_streams or entry not in self._open:
            return
        if self._newest.get(entry.peer) is entry:
            entry.expiry = asyncio.get_running_loop().call_later(self._idle_s, self.retire, entry)
        else:
            self._close(entry)

    def retire(self, entry: PeerChannel) -> None:
        """No new stream gets it. Those that have it go on, and the last of them closes it."""
        if self._newest.get(entry.peer) is entry:
            del self._newest[entry.peer]
        if not entry.num_streams and entry in self._open:
            self._close(entry)

    async def close(self) -> None:
        """Closes all channels, whose streams break."""
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

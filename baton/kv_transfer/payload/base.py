"""The contract of a payload path: one way for the bytes of parts to reach the receiving worker.

A path is a file with two ends. A worker makes its ends once; each transfer then negotiates its path:

    sending worker                                          receiving worker
    SendPath.offer    describes the path in KVReserve  ──▶  ReceivePath.accept     answers in KVReserved
    SendPath.open     sets the path up                 ◀──
    PartSender.send   sends a part                     ──▶  PartReceiver.receive   writes it to its place

Everything else belongs to ``sender.py`` and ``receiver.py``: the stream, the window, checksums, counts, the commit.
Both workers try their paths in the order of ``transports.py``. The last one uses messages, which always works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from baton.kv_transfer.base import PartBuffer, Payload, Pieces
from baton.kv_transfer.payload.part_intake import PartIntake
from baton.kv_transfer.peer_channels import PeerChannel
from baton.rpc.wire import kv_pb2

Write = Callable[[bytes], Awaitable[None]]
"""Writes a frame to the transfer's gRPC stream. Raises ``BatonError`` when the stream broke."""


class PartSender(Protocol):
    """The sending end of a path, for one transfer.

    Attributes:
        shares_memory: whether the receiver reads parts from buffers of this path.
        num_connections: how many connections carry the parts. Each may have a window of unacknowledged bytes.
    """

    shares_memory: bool = False
    num_connections: int = 1

    def buffer(self, num_bytes: int) -> PartBuffer | None:
        """Memory from which the receiver reads a part of ``num_bytes``; ``None`` when this path has none free."""
        return None

    async def send(self, part: kv_pb2.KVPart, payload: Payload | Pieces | PartBuffer) -> None:
        """Returns once the path has taken the part. The caller limits how long that may take.

        Args:
            part: complete except for the fields that only this path uses.
            payload: unchanged until the receiver has acknowledged the part.

        Raises:
            TransferError: ``payload`` is a buffer of another path.
            OSError: the path broke.
            BatonError: the stream broke.
        """
        ...

    def close(self, cause: OSError | None = None) -> None:
        """Ends the path; harmless when repeated.

        Args:
            cause: why the transfer failed, if this path broke or stalled; the next transfer may avoid the path.
        """
        return


class SendPath(Protocol):
    """The sending end of a path, for all transfers of a worker."""

    def offer(self, peer: PeerChannel, reserve: kv_pb2.KVReserve) -> None:
        """Adds to the reservation what the receiver needs to know of this path."""
        ...

    async def open(
        self, peer: PeerChannel, reserved: kv_pb2.KVReserved, num_bytes: int, write: Write
    ) -> PartSender | None:
        """Sets the path up for one transfer.

        Args:
            reserved: the receiver's answer.
            num_bytes: native KV that the transfer will move.

        Returns:
            ``None`` when the receiver did not accept this path, or it cannot be set up; the next path is tried.
        """
        ...

    def close(self) -> None:
        """Releases what the worker's transfers share."""
        return


class PartReceiver(Protocol):
    """The receiving end of a path, for one transfer.

    Attributes:
        reading: takes in parts that come beside the stream, on paths that have such. Its error ends the transfer.
    """

    reading: asyncio.Future[None] | None = None

    async def receive(self, part: kv_pb2.KVPart, payload: memoryview) -> None:
        """Takes in a part that the stream brings.

        Args:
            payload: what the message holds behind the header; may be empty.

        Raises:
            BatonError: the part was not agreed on, is not due, or is damaged.
        """
        ...


class ReceivePath(Protocol):
    """The receiving end of a path, for all transfers of a worker."""

    def start(self, host: str) -> None:
        """Begins to listen, on paths that do. A port that cannot be had is logged, and the path is not accepted.

        Args:
            host: address at which senders reach this worker.
        """
        return

    def accept(
        self, reserve: kv_pb2.KVReserve, reserved: kv_pb2.KVReserved, intake: PartIntake
    ) -> AbstractAsyncContextManager[PartReceiver | None]:
        """Opens the path for the length of a transfer.

        Args:
            reserve: what the sender offers.
            reserved: the answer, sent once this context is entered; an end that accepts says so in it.
            intake: where the parts go.

        Returns:
            A context with ``None`` when this path cannot be used; the next one is tried.
        """
        ...

    async def close(self) -> None:
        """Releases what the worker's transfers share."""
        return

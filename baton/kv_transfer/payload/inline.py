"""Payloads inside the messages of the gRPC stream: the path that every receiver accepts.

The other paths build on these classes: a part that they cannot carry is sent in its message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.core.errors import TransferError
from baton.kv_transfer.base import PartBuffer, Payload, Pieces
from baton.kv_transfer.codec import encode_part
from baton.kv_transfer.payload.base import PartIntake, PartReceiver, PartSender, ReceivePath, SendPath, Write
from baton.kv_transfer.peer_channels import PeerChannel
from baton.rpc.wire import kv_pb2


class InlineSender(PartSender):
    """Sends each part as one message."""

    def __init__(self, write: Write) -> None:
        self._write = write

    async def send(self, part: kv_pb2.KVPart, payload: Payload | Pieces | PartBuffer) -> None:
        if not isinstance(payload, Payload | Pieces):
            raise TransferError("a KV part is in a buffer of a different transport.")
        await self._write(encode_part(part, payload))


class InlineSendPath(SendPath):
    """Is always available and needs no negotiation."""

    def offer(self, peer: PeerChannel, reserve: kv_pb2.KVReserve) -> None:
        return

    async def open(self, peer: PeerChannel, reserved: kv_pb2.KVReserved, num_bytes: int, write: Write) -> InlineSender:
        return InlineSender(write)


class InlineReceiver(PartReceiver):
    """Takes in parts whose message holds the payload."""

    def __init__(self, intake: PartIntake) -> None:
        self._intake = intake

    async def receive(self, part: kv_pb2.KVPart, payload: memoryview) -> None:
        if part.HasField("slot"):
            raise TransferError(
                "a KV part refers to memory that was not agreed on, or contains its payload although it "
                "refers to memory."
            )
        await self._intake.write(part, payload)


class InlineReceivePath(ReceivePath):
    """Accepts every transfer."""

    @asynccontextmanager
    async def accept(
        self, reserve: kv_pb2.KVReserve, reserved: kv_pb2.KVReserved, intake: PartIntake
    ) -> AsyncIterator[PartReceiver | None]:
        yield InlineReceiver(intake)

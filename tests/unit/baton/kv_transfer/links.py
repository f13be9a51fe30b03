"""The transports, each connected to a sink, for test suites of all transports."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import grpc.aio
import pytest

from baton.kv_transfer.base import (
    KVSendStream,
    KVSink,
    KVTransport,
    PartHeader,
    PartPlace,
    Payload,
    Reservation,
    TransferOffer,
)
from baton.kv_transfer.flow import Throttle
from baton.kv_transfer.payload import byte_stream
from baton.kv_transfer.payload.base import ReceivePath, SendPath
from baton.kv_transfer.payload.in_process import InProcessKVTransport
from baton.kv_transfer.payload.inline import InlineReceivePath, InlineSendPath
from baton.kv_transfer.payload.nixl import NixlReader, NixlReceivePath, NixlSendPath
from baton.kv_transfer.payload.segment import SEGMENT_NAME, SharedSegment
from baton.kv_transfer.payload.shared_memory import SegmentMappings, SharedMemoryReceivePath, SharedMemorySendPath
from baton.kv_transfer.payload.sockets import SocketReceivePath, SocketSendPath
from baton.kv_transfer.receiver import SILENCE_S, KVTransferService
from baton.kv_transfer.sender import MAX_INFLIGHT_BYTES, METHOD, SERVICE, GrpcKVTransport, GrpcSendStream
from baton.rpc.channel import ERROR_KEY, PeerServer, create_channel
from baton.rpc.wire.kv_pb2 import KVReply
from tests.credentials import CREDENTIALS
from tests.kv_receiver import SourceKV
from tests.waiting import TIMEOUT_S

NIXL = pytest.param("nixl", marks=pytest.mark.nixl)
TRANSPORTS = ("grpc", "in_process", "shared", NIXL, "connected", "striped")
"""The in-process transport, and gRPC with each payload path of :data:`PATHS`."""
PATHS: dict[str, Callable[[], tuple[list[SendPath], list[ReceivePath]]]] = {
    "grpc": lambda: ([], []),
    "shared": lambda: ([SharedMemorySendPath(1 << 20)], [SharedMemoryReceivePath()]),
    "nixl": lambda: ([NixlSendPath(1 << 20)], [NixlReceivePath(NixlReader(20.0))]),
    "connected": lambda: ([SocketSendPath(1, bytes_per_connection=1)], [SocketReceivePath()]),
    "striped": lambda: ([SocketSendPath(3, bytes_per_connection=1)], [SocketReceivePath()]),
}
"""The two ends of each path, tried before messages."""
NUM_CONNECTIONS = {"striped": 3}


@dataclass(frozen=True, slots=True)
class Link:
    """A connection to one receiver. ``server`` is ``None`` for the in-process transport."""

    transport: KVTransport
    peer: str
    server: PeerServer | None = None


def transport_over(
    *paths: SendPath,
    throttle: Throttle | None = None,
    timeout_s: float = 20.0,
    max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
) -> GrpcKVTransport:
    """A sender with these paths and messages."""
    return GrpcKVTransport([*paths, InlineSendPath()], CREDENTIALS, throttle, timeout_s, max_inflight_bytes)


class BufferingTransport(GrpcKVTransport):
    """Sends every part through a buffer of its path, if the path has buffers."""

    async def open(self, offer: TransferOffer, peer: str) -> GrpcSendStream:
        stream = await super().open(offer, peer)
        send = stream.send

        async def send_buffered(header: PartHeader, payload: Payload) -> None:
            if not len(payload):  # there are no empty buffers
                return await send(header, payload)
            buffer = stream.buffer(len(payload))
            assert buffer is not None
            buffer.view[:] = payload
            return await send(header, buffer)

        if stream.reservation.shares_memory:
            stream.send = send_buffered  # type: ignore[method-assign]
        return stream


@asynccontextmanager
async def serving(
    sink: KVSink, paths: Sequence[ReceivePath], silence_s: float = SILENCE_S
) -> AsyncIterator[tuple[PeerServer, str]]:
    """Runs a receiver with these paths and messages; yields its server and address."""
    server, service = PeerServer(CREDENTIALS), KVTransferService(sink, [*paths, InlineReceivePath()], silence_s)
    service.start("127.0.0.1")
    service.add_to(server.grpc)
    peer = server.bind("127.0.0.1")
    await server.start()
    try:
        yield server, peer
    finally:
        await server.stop(grace=0)
        await service.close()


@asynccontextmanager
async def kv_server(
    sink: KVSink,
    mappings: SegmentMappings | None,
    *,
    listens: bool = False,
    silence_s: float = SILENCE_S,
    nixl: NixlReader | None = None,
) -> AsyncIterator[tuple[PeerServer, str]]:
    """Runs a receiver; yields its server and address."""
    paths: list[ReceivePath] = []
    if mappings is not None:
        paths.append(SharedMemoryReceivePath(mappings))
    if nixl is not None:
        paths.append(NixlReceivePath(nixl))
    if listens:
        paths.append(SocketReceivePath())
    async with serving(sink, paths, silence_s) as served:
        yield served


async def slots_free(segment: SharedSegment) -> None:
    """Waits until all slots are free, and fails if some stay taken."""
    async with asyncio.timeout(TIMEOUT_S):
        while segment.num_free_slots < segment.layout.num_slots:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def num_mappings() -> int:
    """The number of segments that this process has mapped."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(f"memfd:{SEGMENT_NAME}")


def num_mappings_before() -> int:
    """:func:`num_mappings` after a garbage collection, which removes the mappings of other tests."""
    gc.collect()
    return num_mappings()


@asynccontextmanager
async def link(
    kind: str,
    sink: KVSink,
    *,
    throttle: Throttle | None = None,
    max_inflight_bytes: int = 1 << 20,
    stripe_bytes: int = 100,
) -> AsyncIterator[Link]:
    """Connects a transport to a sink. Fails at the end unless every slot of shared memory is free.

    Args:
        max_inflight_bytes: limit of unacknowledged bytes of a transfer, over all of its connections.
        stripe_bytes: stripe size with ``striped``; small, so that small parts have several stripes.
    """
    if kind == "in_process":
        yield Link(InProcessKVTransport({"receiver": sink}, throttle), "receiver")
        return
    send, receive = PATHS[kind]()
    segments = [path.segment() for path in send if isinstance(path, SharedMemorySendPath)]
    async with serving(sink, receive) as (server, peer):
        window = max_inflight_bytes // NUM_CONNECTIONS.get(kind, 1)
        transport = BufferingTransport([*send, InlineSendPath()], CREDENTIALS, throttle, 20.0, window)
        try:
            with patch.object(byte_stream, "STRIPE_BYTES", stripe_bytes):
                yield Link(transport, peer, server)
        finally:
            await transport.close()
    for segment in segments:
        assert segment is not None
        await slots_free(segment)


async def send_all(stream: KVSendStream, source: SourceKV, part_bytes: int = 700) -> int:
    """Sends every missing part and the commit; returns the acknowledged bytes."""
    reservation = stream.reservation
    for header, payload in source.parts(reservation.num_cached_tokens, part_bytes, reservation.encoding):
        await stream.send(header, payload)
    return await stream.commit()


async def talk(peer: str, frames: Sequence[bytes]) -> tuple[list[str], str | None]:
    """Sends raw frames; returns the kinds of the replies and the error code of the status."""
    channel = create_channel(peer, CREDENTIALS)
    replies: list[str] = []
    call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(
        _each(frames), timeout=5.0, metadata=CREDENTIALS.call_metadata(peer)
    )
    try:
        async for data in call:
            reply = KVReply.FromString(data)
            replies.append(str(reply.WhichOneof("kind")))
            if reply.HasField("failed"):
                replies[-1] = f"failed: {reply.failed.code}"
    except grpc.aio.AioRpcError as error:
        metadata = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
        return replies, metadata.get(ERROR_KEY)
    finally:
        await channel.close()
    return replies, None


async def _each(frames: Sequence[bytes]) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame


@dataclass(slots=True)
class RecordingSink:
    """A sink that accepts everything.

    Attributes:
        gate: while it is not set, no write returns, as with an extremely slow receiver.
        failure: raised by every write.
    """

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    parts: list[tuple[PartHeader, bytes]] = field(default_factory=list)
    num_bytes: int = 0
    aborts: list[str] = field(default_factory=list)
    reserved: asyncio.Event = field(default_factory=asyncio.Event)

    async def reserve(self, offer: TransferOffer) -> Reservation:
        self.reserved.set()
        return Reservation(0)

    async def write(self, transfer_id: str, header: PartHeader, payload: memoryview, checksum: int) -> None:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.num_bytes += len(payload)

    def place(self, transfer_id: str, header: PartHeader, num_bytes: int) -> PartPlace | None:
        return None

    async def commit(self, transfer_id: str, draft_state: bytes | None = None) -> int:
        await self.gate.wait()
        return self.num_bytes

    def abort(self, transfer_id: str, reason: str) -> None:
        self.aborts.append(reason)

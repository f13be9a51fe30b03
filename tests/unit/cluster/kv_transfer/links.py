"""Both transports, each connected to a sink, for suites that hold for any transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from cluster.kv_transfer.base import KVSendStream, KVSink, KVTransport, PartHeader, Reservation, TransferOffer
from cluster.kv_transfer.grpc_service import KVTransferService
from cluster.kv_transfer.grpc_transport import GrpcKVTransport
from cluster.kv_transfer.in_process import InProcessKVTransport
from cluster.kv_transfer.throttle import Throttle
from cluster.rpc import create_server
from tests.kv_receiver import SourceKV

TRANSPORTS = ("grpc", "in_process")


@dataclass(frozen=True, slots=True)
class Link:
    """A way to one receiver. ``server`` is None in one process."""

    transport: KVTransport
    peer: str
    server: grpc.aio.Server | None = None


@asynccontextmanager
async def link(
    kind: str, sink: KVSink, *, throttle: Throttle | None = None, max_inflight_bytes: int = 1 << 20
) -> AsyncIterator[Link]:
    if kind == "in_process":
        yield Link(InProcessKVTransport({"receiver": sink}, throttle), "receiver")
        return
    server = create_server()
    KVTransferService(sink).add_to(server)
    peer = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    transport = GrpcKVTransport(throttle, timeout_s=20.0, max_inflight_bytes=max_inflight_bytes)
    try:
        yield Link(transport, peer, server)
    finally:
        await transport.close()
        await server.stop(grace=0)


async def send_all(stream: KVSendStream, source: SourceKV, part_bytes: int = 700) -> int:
    """Every missing part, then the commit; returns the acknowledged bytes."""
    for header, payload in source.parts(stream.reservation.num_cached_tokens, part_bytes):
        await stream.send(header, payload)
    return await stream.commit()


@dataclass(slots=True)
class RecordingSink:
    """Takes whatever comes.

    Attributes:
        gate: closed, no write returns; a slow receiver in its extreme.
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

    async def commit(self, transfer_id: str, draft_state: bytes | None = None) -> int:
        await self.gate.wait()
        return self.num_bytes

    def abort(self, transfer_id: str, reason: str) -> None:
        self.aborts.append(reason)

"""TCP connections next to the gRPC stream: valid input, their number, and transfers without them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from baton.core.errors import ChecksumError, TransferError
from baton.kv_transfer.base import PartHeader, Pieces
from baton.kv_transfer.codec import checksum, encode_frame, encode_head, encode_part, pack_part
from baton.kv_transfer.payload import sockets
from baton.kv_transfer.payload.byte_stream import ByteStream, RawSocket
from baton.kv_transfer.payload.sockets import SocketSender, SocketSendPath, connect
from baton.kv_transfer.sender import METHOD, SERVICE, GrpcSendStream
from baton.rpc.channel import create_channel
from baton.rpc.wire.kv_pb2 import KVCommit, KVConnection, KVFrame, KVPart, KVReply, KVReserve
from tests.credentials import CREDENTIALS
from tests.kv_receiver import Receiver, SourceKV
from tests.tiny_models import random_prompts
from tests.unit.baton.kv_transfer.links import Link, kv_server, link, send_all, transport_over
from tests.waiting import TIMEOUT_S

PROMPT = random_prompts((9,))[0]
SILENCE_S = 0.5


class ByHand:
    """A sender's two ends, for parts that no transport would send."""

    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes], connection: ByteStream, source: SourceKV) -> None:
        self._call = call
        self.connection = connection
        self.source = source

    async def send(self, part: KVPart, payload: bytes = b"") -> None:
        await self.send_raw(encode_head(part) + payload)

    async def send_raw(self, data: bytes) -> None:
        await self.connection.send([memoryview(data)])

    async def send_message(self, header: PartHeader, payload: bytes) -> None:
        """Through the stream."""
        await self._call.write(encode_part(part_of(header, payload), payload))

    async def commit(self, num_parts: int, num_bytes: int) -> None:
        await self._call.write(encode_frame(KVFrame(commit=KVCommit(num_parts=num_parts, num_bytes=num_bytes))))

    async def reply(self) -> KVReply:
        """The next one that is no acknowledgement of a part."""
        while True:
            reply = KVReply.FromString(await self._call.read())
            if reply.WhichOneof("kind") != "received":
                return reply

    async def failure(self) -> tuple[str, str]:
        async with asyncio.timeout(TIMEOUT_S):
            failed = (await self.reply()).failed
        return failed.code, failed.message

    def first_part(self) -> tuple[KVPart, bytes]:
        header, payload = next(self.source.parts())
        return part_of(header, payload), bytes(payload)


def part_of(header: PartHeader, payload: bytes) -> KVPart:
    """The part with its length, as in a connection; in a message, nothing reads the length."""
    part = pack_part(header, checksum(payload))
    part.num_bytes = len(payload)
    return part


@pytest.fixture
async def sender(receiver: Receiver) -> AsyncIterator[ByHand]:
    async with kv_server(receiver.importer, None, listens=True, silence_s=SILENCE_S) as (_, peer):
        async with by_hand(receiver, peer) as sender:
            yield sender
        await receiver.all_given_back()


@asynccontextmanager
async def by_hand(receiver: Receiver, peer: str) -> AsyncIterator[ByHand]:
    source = SourceKV(receiver.spec, PROMPT)
    channel = create_channel(peer, CREDENTIALS)
    call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=CREDENTIALS.call_metadata(peer))
    spec = {"spec_json": source.spec.to_json(), "spec_fingerprint": source.spec.fingerprint()}
    request = KVReserve(transfer_id="transfer-1", token_ids=PROMPT, deadline_s=1.0, connects=True, **spec)
    await call.write(encode_frame(KVFrame(reserve=request)))
    reserved = KVReply.FromString(await call.read()).reserved
    connection = await connect(peer, reserved.connection)
    try:
        yield ByHand(call, connection, source)
    finally:
        connection.close()
        call.cancel()
        await channel.close()


async def test_parts_arrive_at_their_position(sender: ByHand, receiver: Receiver) -> None:
    parts = [part_of(header, payload) for header, payload in sender.source.parts()]
    for part, (_, payload) in zip(parts, sender.source.parts(), strict=True):
        await sender.send(part, bytes(payload))
    num_bytes = sum(part.num_bytes for part in parts)
    await sender.commit(len(parts), num_bytes)  # overtakes them, maybe
    assert (await sender.reply()).committed.num_bytes == num_bytes
    imported = await receiver.importer.claim("transfer-1")
    assert await receiver.read(imported) == sender.source.layers
    receiver.importer.release(imported)


async def test_a_part_is_received_without_a_copy(receiver: Receiver) -> None:
    source = SourceKV(receiver.spec, PROMPT)
    for kind in ("connected", "striped", "grpc", "in_process"):
        async with link(kind, receiver.importer) as way:
            stream = await way.transport.open(source.offer(kind), way.peer)
            for header, payload in source.parts(stream.reservation.num_cached_tokens):
                views = tuple(memoryview(payload)[at : at + 3] for at in range(0, len(payload), 3))
                await stream.send(header, Pieces(views, len(payload)))
            await stream.commit()
        imported = await receiver.importer.claim(kind)
        assert await receiver.read(imported) == source.layers
        receiver.importer.release(imported)


async def test_damaged_parts_are_detected(sender: ByHand) -> None:
    part, payload = sender.first_part()
    await sender.send(part, payload[:-1] + bytes([payload[-1] ^ 1]))
    assert (await sender.failure())[0] == ChecksumError.code


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_bytes": 0}, "must have 1 to"),
        ({"num_bytes": 1 << 40}, "must have 1 to"),
        ({"num_bytes": 8}, "8 bytes, but its header announced"),
        ({"layer_start": 1}, "layers"),
        ({"token_start": 3}, "was expected"),
        ({"encoding": "morse"}, "'morse'"),
        ({"encoding": "int8"}, "was not agreed on"),
    ],
)
async def test_an_unexpected_part_ends_the_transfer(sender: ByHand, changes: dict[str, object], said: str) -> None:
    part, payload = sender.first_part()
    wrong = KVPart()
    wrong.CopyFrom(part)
    for name, value in changes.items():
        setattr(wrong, name, value)
    await sender.send(wrong, payload)
    code, message = await sender.failure()
    assert code == TransferError.code
    assert said in message


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00\xff\xff\xff", b"\x00" * 12])
async def test_an_invalid_part_ends_the_transfer(sender: ByHand, data: bytes) -> None:
    await sender.send_raw(data)
    assert (await sender.failure())[0] == TransferError.code


async def test_a_connection_that_ends_within_a_part_ends_the_transfer(sender: ByHand) -> None:
    part, payload = sender.first_part()
    await sender.send(part, payload[:10])
    sender.connection.close()
    code, message = await sender.failure()
    assert code == TransferError.code
    assert "ended before everything was sent" in message


async def test_announced_bytes_that_never_arrive_do_not_block(sender: ByHand) -> None:
    part, payload = sender.first_part()
    await sender.send(part, payload)
    await sender.commit(2, 2 * len(payload))
    assert (await sender.failure()) == (TransferError.code, f"the sender sent nothing for {SILENCE_S:g} s.")


async def test_blocks_of_an_abandoned_transfer_are_not_written(sender: ByHand, receiver: Receiver) -> None:
    part, payload = sender.first_part()
    await sender.send(part, payload[:16])
    await asyncio.sleep(0.1)
    receiver.importer.abort("transfer-1", "somebody else needs the room")
    await receiver.all_given_back()
    tensors = (*receiver.engine.runner.cache.keys, *receiver.engine.runner.cache.values)
    before = [tensor.clone() for tensor in tensors]
    await sender.send_raw(payload[16:])
    assert (await sender.failure())[0] == TransferError.code
    assert all(bytes(now.numpy()) == bytes(then.numpy()) for now, then in zip(tensors, before, strict=True))


async def test_parts_can_arrive_in_messages_after_the_connection_closed(sender: ByHand, receiver: Receiver) -> None:
    sender.connection.close()
    await asyncio.sleep(SILENCE_S / 2)  # the receiver has seen it
    parts = list(sender.source.parts())
    for header, payload in parts:
        await sender.send_message(header, payload)
    await sender.commit(len(parts), sum(len(payload) for _, payload in parts))
    assert (await sender.reply()).WhichOneof("kind") == "committed"
    receiver.importer.release(await receiver.importer.claim("transfer-1"))


@pytest.mark.parametrize(
    ("num_tokens", "connections", "count"), [(15, 4, 1), (31, 4, 1), (32, 4, 2), (100, 4, 4), (100, 2, 2)]
)
async def test_large_transfers_use_several_connections(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, num_tokens: int, connections: int, count: int
) -> None:
    counts = []

    async def count_them(peer: str, offered: KVConnection, count: int, options: object) -> ByteStream:
        counts.append(count)
        return await connect(peer, offered, count)

    monkeypatch.setattr(sockets, "connect", count_them)
    async with kv_server(receiver.importer, None, listens=True) as (_, peer):
        per_connection = 16 * receiver.spec.bytes_per_token
        transport = transport_over(SocketSendPath(connections, bytes_per_connection=per_connection))
        source = SourceKV(receiver.spec, random_prompts((num_tokens,))[0])
        await send_all(await transport.open(source.offer("large"), peer), source)
        receiver.importer.release(await receiver.importer.claim("large"))
        await transport.close()
    assert counts == [count]


async def test_a_broken_connection_is_distinguished_from_a_lost_worker(receiver: Receiver) -> None:
    source = SourceKV(receiver.spec, PROMPT)
    async with link("connected", receiver.importer) as way:
        stream = await way.transport.open(source.offer("broken"), way.peer)
        parts = source.parts(part_bytes=200)
        await stream.send(*next(parts))
        assert isinstance(stream, GrpcSendStream)
        async with asyncio.timeout(TIMEOUT_S):
            while stream.num_inflight_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert isinstance(stream.parts, SocketSender)
        stream.parts.connection.close()
        with pytest.raises(TransferError, match="connection ended"):
            await stream.send(*next(parts))
        await stream.abort()
        stream = await way.transport.open(source.offer("in-messages"), way.peer)
        assert isinstance(stream, GrpcSendStream)
        assert not isinstance(stream.parts, SocketSender)
        await send_all(stream, source)
        receiver.importer.release(await receiver.importer.claim("in-messages"))
        await receiver.all_given_back()


@pytest.mark.parametrize("listens", [False, True])
async def test_without_a_connection_parts_travel_in_messages(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, listens: bool
) -> None:
    """The receiver has no port, or it is unreachable; the second transfer does not try again."""
    num_tries = 0

    async def refuse(peer: str, offered: KVConnection, count: int, options: object) -> RawSocket:
        nonlocal num_tries
        num_tries += 1
        raise ConnectionRefusedError("a firewall")

    monkeypatch.setattr(sockets, "connect", refuse)
    async with kv_server(receiver.importer, None, listens=listens) as (server, peer):
        transport = transport_over(SocketSendPath(1))
        way = Link(transport, peer, server)
        with caplog.at_level(logging.WARNING):
            for name in ("one", "two"):
                source = SourceKV(receiver.spec, [*PROMPT, len(name)])
                await send_all(await way.transport.open(source.offer(name), peer), source)
                receiver.importer.release(await receiver.importer.claim(name))
        await transport.close()
    assert num_tries == (1 if listens else 0)
    assert caplog.text.count("no direct connection to the worker") == num_tries

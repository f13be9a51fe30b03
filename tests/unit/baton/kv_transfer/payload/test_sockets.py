"""Connections for KV before anything comes in them: tickets and numbers, strangers, ports and addresses."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from baton.kv_transfer.codec import Introduction
from baton.kv_transfer.payload import socket_listener, sockets
from baton.kv_transfer.payload.byte_stream import ByteStream, RawSocket
from baton.kv_transfer.payload.socket_listener import DataListener
from baton.kv_transfer.payload.sockets import connect
from baton.rpc.wire.kv_pb2 import KVConnection
from tests.waiting import TIMEOUT_S


@pytest.fixture
async def listener() -> AsyncIterator[DataListener]:
    listener = DataListener()
    listener.start("127.0.0.1")
    try:
        yield listener
    finally:
        await listener.stop()


async def is_closed(connection: ByteStream) -> bool:
    async with asyncio.timeout(TIMEOUT_S):
        try:
            await connection.receive([memoryview(bytearray(1))])
        except ConnectionError:
            return True
    return False


async def test_a_ticket_admits_the_announced_number_of_connections(listener: DataListener) -> None:
    with listener.expect() as expected:
        assert expected is not None
        first = await connect("127.0.0.1:1", expected.offer)
        arrived = await expected.arrived()
        with pytest.raises(ConnectionError):
            await connect("127.0.0.1:1", expected.offer)
        await first.send([memoryview(b"a")])
        taken = bytearray(1)
        await arrived.receive([memoryview(taken)])
        assert taken == b"a"
    assert await is_closed(first)
    first.close()


async def test_several_connections_form_one_stream_in_numerical_order(listener: DataListener) -> None:
    sent, taken = random.Random(0).randbytes(3_000_000), bytearray(3_000_000)
    with listener.expect() as expected:
        assert expected is not None
        sender = await connect("127.0.0.1:1", expected.offer, 3)
        receiver = await expected.arrived()
        await asyncio.gather(sender.send([memoryview(sent)]), receiver.receive([memoryview(taken)]))
        with pytest.raises(ConnectionError):  # all that were announced are here
            await connect("127.0.0.1:1", expected.offer)
    assert taken == sent
    assert await is_closed(sender)
    sender.close()


@pytest.mark.parametrize(("number", "count"), [(0, 2), (1, 3), (2, 2), (0, 0), (5, 1)])
async def test_a_connection_that_does_not_match_the_others_is_rejected(
    listener: DataListener, number: int, count: int
) -> None:
    """Number 0 of 2 is here: its like, another count, and numbers that there are none of."""
    with listener.expect() as expected:
        assert expected is not None
        first = await introduce(expected.offer, 0, 2)
        with pytest.raises(ConnectionError):
            await introduce(expected.offer, number, count)
        second = await introduce(expected.offer, 1, 2)
        await expected.arrived()
    for connection in (first, second):
        assert await is_closed(connection)
        connection.close()


async def test_a_transfer_has_at_most_the_offered_number_of_connections(listener: DataListener) -> None:
    with listener.expect() as expected:
        assert expected is not None
        with pytest.raises(ConnectionError):
            await connect("127.0.0.1:1", expected.offer, expected.offer.most + 1)
        (await connect("127.0.0.1:1", expected.offer, expected.offer.most)).close()


async def test_if_one_of_several_connections_is_rejected_none_is_kept(listener: DataListener) -> None:
    with listener.expect() as expected:
        assert expected is not None
        taken = await introduce(expected.offer, 1, 3)
        with pytest.raises(ConnectionError):
            await connect("127.0.0.1:1", expected.offer, 3)
        others = [expected._arrived[number] for number in (0, 2) if number in expected._arrived]
        assert all([await is_closed(other) for other in others])
        taken.close()


async def test_connections_are_closed_if_others_never_arrive(listener: DataListener) -> None:
    with listener.expect() as expected:
        assert expected is not None
        first = await introduce(expected.offer, 0, 2)
    assert await is_closed(first)
    first.close()


async def introduce(offer: KVConnection, number: int, count: int) -> RawSocket:
    return await sockets._connect("127.0.0.1", offer.port, Introduction(offer.ticket, number, count), ())


async def test_connections_without_a_ticket_are_rejected(
    listener: DataListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_listener, "TICKET_TIMEOUT_S", 0.2)
    with listener.expect() as expected:
        assert expected is not None
        for ticket in (b"?" * 16, b"short", b""):
            with pytest.raises(ConnectionError):
                await connect("127.0.0.1:1", KVConnection(port=expected.offer.port, ticket=ticket))
        known = await connect("127.0.0.1:1", expected.offer)
        await expected.arrived()
        known.close()


async def test_many_simultaneous_connections_are_all_accepted(
    listener: DataListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More connections than may be unidentified at a time, among them some that never identify themselves."""
    monkeypatch.setattr(socket_listener, "_MAX_UNIDENTIFIED", 4)
    monkeypatch.setattr(socket_listener, "TICKET_TIMEOUT_S", 0.2)
    with ExitStack() as stack:
        everybody = [stack.enter_context(listener.expect()) for _ in range(40)]
        port = everybody[0].offer.port if everybody[0] is not None else 0
        for _ in range(6):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        offers = [expected.offer for expected in everybody if expected is not None]
        connections = await asyncio.gather(*(connect("127.0.0.1:1", offer, timeout_s=20.0) for offer in offers))
        assert len(connections) == 40
        for connection in connections:
            connection.close()


async def test_another_program_on_the_port_is_not_mistaken_for_the_receiver() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400")
        await writer.drain()
        writer.close()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    for behaviour, error in ((answer, ConnectionRefusedError), (say_nothing, TimeoutError)):
        server = await asyncio.start_server(behaviour, "127.0.0.1", 0)
        offer = KVConnection(port=server.sockets[0].getsockname()[1], ticket=b"?" * 16)
        with pytest.raises(error):
            await connect("127.0.0.1:1", offer, timeout_s=0.3)
        server.close()


def has_ipv6_loopback() -> bool:
    """Asks the system, not the code under test."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback address")


@pytest.mark.parametrize(
    "host",
    [pytest.param("::1", marks=needs_ipv6), pytest.param("[::1]", marks=needs_ipv6), "localhost", "127.0.0.1"],
)
async def test_every_form_of_address_is_accepted(host: str) -> None:
    listener = DataListener()
    listener.start(host)
    with listener.expect() as expected:
        assert expected is not None
        (await connect(f"[{host.strip('[]')}]:1", expected.offer)).close()
    await listener.stop()


async def test_a_port_without_a_listener_is_not_offered(
    listener: DataListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_identify", None)  # whatever goes wrong
    with listener.expect() as expected:
        assert expected is not None
        with pytest.raises(OSError):  # noqa: PT011 - of whatever kind
            await connect("127.0.0.1:1", expected.offer)
    with listener.expect() as expected:
        assert expected is None


async def test_an_immediate_stop_frees_the_port() -> None:
    listener = DataListener()
    listener.start("127.0.0.1")
    with listener.expect() as expected:
        assert expected is not None
        await listener.stop()
        with pytest.raises(ConnectionRefusedError):
            await connect("127.0.0.1:1", expected.offer)


async def test_no_connection_is_expected_without_a_listener() -> None:
    with DataListener().expect() as expected:
        assert expected is None

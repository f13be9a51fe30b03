"""Byte ranges through one or several connections arrive whole and in order, and change no other byte."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv_transfer.payload import byte_stream
from baton.kv_transfer.payload.byte_stream import STRIPE_BYTES, ByteStream, RawSocket, join


@contextmanager
def raw_pair() -> Iterator[tuple[RawSocket, RawSocket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    first, second = (RawSocket(end) for end in ends)
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def cut(data: bytearray, sizes: list[int]) -> list[memoryview]:
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(data)[start : start + size])
        start += size
    return views


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 5000), max_size=40).filter(any),
    st.randoms(use_true_random=False),
)
def test_sent_bytes_arrive_however_they_are_split(sizes: list[int], rng: random.Random) -> None:
    sent = bytearray(rng.randbytes(sum(sizes)))
    others = sizes[:]
    rng.shuffle(others)
    taken = bytearray(len(sent))

    async def run() -> int:
        with raw_pair() as (sender, receiver):
            _, digest = await asyncio.gather(sender.send(cut(sent, sizes)), receiver.receive(cut(taken, others)))
        return digest

    assert asyncio.run(run()) == xxhash.xxh3_64_intdigest(sent)
    assert taken == sent


async def test_many_small_buffers_take_several_calls() -> None:
    sent, taken = bytearray(random.Random(0).randbytes(3000)), bytearray(3000)
    with raw_pair() as (sender, receiver):
        await asyncio.gather(sender.send(cut(sent, [1] * 3000)), receiver.receive(cut(taken, [2] * 1500)))
    assert taken == sent


async def test_an_early_end_of_stream_is_an_error() -> None:
    with raw_pair() as (sender, receiver):
        taking = asyncio.create_task(receiver.receive([memoryview(bytearray(100))]))
        await sender.send([memoryview(b"half")])
        sender.close()
        with pytest.raises(ConnectionResetError):
            await taking


async def test_nothing_is_written_after_the_target_was_released() -> None:
    taken = bytearray(100)
    has_expired = False

    def check() -> None:
        if has_expired:
            raise LookupError

    with raw_pair() as (sender, receiver):
        taking = asyncio.create_task(receiver.receive([memoryview(taken)], check))
        await sender.send([memoryview(b"x" * 60)])
        await asyncio.sleep(0.05)
        before, has_expired = bytes(taken), True
        await sender.send([memoryview(b"y" * 40)])
        with pytest.raises(LookupError):
            await taking
    assert bytes(taken) == before


@pytest.mark.parametrize("receives", [True, False])
async def test_closing_wakes_waiting_readers_and_writers(receives: bool) -> None:
    with raw_pair() as (first, _):
        room = [memoryview(bytearray(1 << 22))]
        waiting = asyncio.create_task(first.receive(room) if receives else first.send(room))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        first.close()
        first.close()
        with pytest.raises(OSError):  # noqa: PT011 - of whatever kind
            await waiting


async def test_a_cancelled_transfer_leaves_the_socket_usable() -> None:
    taken = bytearray(4)
    with raw_pair() as (sender, receiver):
        waiting = asyncio.create_task(receiver.receive([memoryview(bytearray(10))]))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.gather(sender.send([memoryview(b"word")]), receiver.receive([memoryview(taken)]))
    assert taken == b"word"


async def test_other_tasks_run_while_a_peer_keeps_up() -> None:
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with raw_pair() as (sender, receiver):
        await sender.send([memoryview(b"x" * 4000)])
        await asyncio.sleep(0.05)  # all of it is there
        other = asyncio.create_task(take_turns())
        for _ in range(100):
            await receiver.receive([memoryview(bytearray(40))])
        other.cancel()
    assert turns >= 100


@contextmanager
def joined_pair(count: int) -> Iterator[tuple[ByteStream, ByteStream, list[tuple[RawSocket, RawSocket]]]]:
    with ExitStack() as stack:
        pairs = [stack.enter_context(raw_pair()) for _ in range(count)]
        yield join([first for first, _ in pairs]), join([second for _, second in pairs]), pairs


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=8), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(1, 700),
    st.randoms(use_true_random=False),
)
def test_striped_bytes_arrive_however_they_are_split(
    messages: list[list[int]], count: int, stripe_bytes: int, rng: random.Random
) -> None:
    async def run() -> None:
        with joined_pair(count) as (sender, receiver, _):
            for sizes in messages:
                others = sizes[:]
                rng.shuffle(others)
                sent, taken = bytearray(rng.randbytes(sum(sizes))), bytearray(sum(sizes))
                _, digest = await asyncio.gather(sender.send(cut(sent, sizes)), receiver.receive(cut(taken, others)))
                assert digest == xxhash.xxh3_64_intdigest(sent)
                assert taken == sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_stream, "STRIPE_BYTES", stripe_bytes)
        asyncio.run(run())


async def test_every_connection_gets_its_share() -> None:
    sent = random.Random(0).randbytes(3 * STRIPE_BYTES)
    with joined_pair(3) as (sender, _, pairs):
        sending = asyncio.create_task(sender.send([memoryview(sent)]))
        for number, (_, end) in enumerate(pairs):
            stripe = bytearray(STRIPE_BYTES)
            await end.receive([memoryview(stripe)])
            assert stripe == sent[number * STRIPE_BYTES : (number + 1) * STRIPE_BYTES]
        await sending


@pytest.mark.parametrize("receives", [True, False])
@pytest.mark.parametrize("number", [0, 1])
async def test_a_broken_connection_ends_all(receives: bool, number: int) -> None:
    with joined_pair(3) as (sender, receiver, pairs):
        room = memoryview(bytearray(6 * STRIPE_BYTES))
        moving = asyncio.create_task(receiver.receive([room]) if receives else sender.send([room]))  # type: ignore[arg-type]
        for pair in pairs[:number]:  # until it is that one's turn
            stripe = [memoryview(bytearray(STRIPE_BYTES))]
            await (pair[0].send(stripe) if receives else pair[1].receive(stripe))  # type: ignore[misc]
        pairs[number][0 if receives else 1].close()
        with pytest.raises(OSError):  # noqa: PT011 - of whatever kind
            await moving


async def test_no_stripe_is_written_after_the_target_was_released() -> None:
    taken = bytearray(2 * STRIPE_BYTES)
    has_expired = False

    def check() -> None:
        if has_expired:
            raise LookupError

    with joined_pair(2) as (_, receiver, pairs):
        taking = asyncio.create_task(receiver.receive([memoryview(taken)], check))
        await pairs[0][0].send([memoryview(bytes(STRIPE_BYTES))])
        await asyncio.sleep(0.05)
        has_expired = True
        sending = asyncio.create_task(pairs[1][0].send([memoryview(b"y" * STRIPE_BYTES)]))
        with pytest.raises(LookupError):
            await taking
        sending.cancel()
    assert not any(taken)


async def test_closing_several_connections_wakes_waiting_readers_and_writers() -> None:
    with joined_pair(2) as (_, receiver, _):
        waiting = asyncio.create_task(receiver.receive([memoryview(bytearray(2 * STRIPE_BYTES))]))
        await asyncio.sleep(0.05)
        receiver.close()
        receiver.close()
        with pytest.raises(OSError):  # noqa: PT011 - of whatever kind
            await waiting


def test_a_single_connection_is_not_wrapped() -> None:
    async def run() -> None:
        with raw_pair() as (first, _):
            assert join([first]) is first

    asyncio.run(run())

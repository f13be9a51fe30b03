"""One stream over several connections: the same bytes in the same order, whatever the cuts and whoever is faster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv_transfer.payload import striped_socket
from baton.kv_transfer.payload.raw_socket import ByteStream, RawSocket
from baton.kv_transfer.payload.striped_socket import STRIPE_BYTES, join
from tests.unit.baton.kv_transfer.payload.test_raw_socket import cut, raw_pair


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
def test_what_is_sent_arrives_however_it_is_cut_and_dealt_out(
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
        patch.setattr(striped_socket, "STRIPE_BYTES", stripe_bytes)
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
async def test_one_that_breaks_ends_all(receives: bool, number: int) -> None:
    with joined_pair(3) as (sender, receiver, pairs):
        room = memoryview(bytearray(6 * STRIPE_BYTES))
        moving = asyncio.create_task(receiver.receive([room]) if receives else sender.send([room]))  # type: ignore[arg-type]
        for pair in pairs[:number]:  # until it is that one's turn
            stripe = [memoryview(bytearray(STRIPE_BYTES))]
            await (pair[0].send(stripe) if receives else pair[1].receive(stripe))  # type: ignore[misc]
        pairs[number][0 if receives else 1].close()
        with pytest.raises(OSError):  # noqa: PT011 - of whatever kind
            await moving


async def test_nothing_is_written_once_the_place_is_anothers() -> None:
    taken = bytearray(2 * STRIPE_BYTES)
    is_over = False

    def check() -> None:
        if is_over:
            raise LookupError

    with joined_pair(2) as (_, receiver, pairs):
        taking = asyncio.create_task(receiver.receive([memoryview(taken)], check))
        await pairs[0][0].send([memoryview(bytes(STRIPE_BYTES))])
        await asyncio.sleep(0.05)
        is_over = True
        sending = asyncio.create_task(pairs[1][0].send([memoryview(b"y" * STRIPE_BYTES)]))
        with pytest.raises(LookupError):
            await taking
        sending.cancel()
    assert not any(taken)


async def test_closing_wakes_whoever_waits() -> None:
    with joined_pair(2) as (_, receiver, _):
        waiting = asyncio.create_task(receiver.receive([memoryview(bytearray(2 * STRIPE_BYTES))]))
        await asyncio.sleep(0.05)
        receiver.close()
        receiver.close()
        with pytest.raises(OSError):  # noqa: PT011 - of whatever kind
            await waiting


def test_a_single_connection_is_itself() -> None:
    async def run() -> None:
        with raw_pair() as (first, _):
            assert join([first]) is first

    asyncio.run(run())

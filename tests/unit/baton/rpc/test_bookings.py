"""A worker tells each router what the others have booked on it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from baton.core.errors import InvalidRequestError
from baton.rpc.bookings import BOOKING_KEY, BookingBoard
from baton.rpc.wire import worker_pb2


class Call:
    """Stands for the context of a gRPC call with this metadata."""

    def __init__(self, *metadata: tuple[str, object]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Any:
        return self._metadata


def call(name: str, router: str = "a", **fields: Any) -> Any:
    booking = worker_pb2.Booking(router=router, name=name, **fields)
    return Call(("other", "x"), (BOOKING_KEY, booking.SerializeToString()))


def names(events: worker_pb2.BookingEvents) -> list[str]:
    return [opened.booking.name for opened in events.open]


async def test_a_snapshot_then_changes_of_other_routers_only() -> None:
    now = 5.0
    board = BookingBoard(lambda: now)
    stream = board.watch("b", 0, 0)
    with ExitStack() as held:
        first = held.enter_context(board.booking_of(call("a/1", uncached_tokens=7, decode_worker="d1")))
        held.enter_context(board.booking_of(call("b/1", router="b")))
        now = 6.5
        events = await anext(stream)
        assert events.is_snapshot
        assert names(events) == ["a/1"]
        assert (events.open[0].age_s, events.open[0].is_computed) == (1.5, False)
        assert events.open[0].booking.decode_worker == "d1"
        first.advance(1)
        events = await anext(stream)
        assert not events.is_snapshot
        assert (events.open[0].is_computed, events.open[0].num_new_tokens) == (True, 1)
        for _ in range(31):
            first.advance(1)
        events = await anext(stream)
        assert events.open[0].num_new_tokens == 32
    events = await anext(stream)
    assert (list(events.ended), names(events)) == (["a/1"], [])
    await stream.aclose()


async def test_a_place_that_is_taken_again_at_once_never_looks_free() -> None:
    board = BookingBoard()
    stream = board.watch("b", 0, 0.005)
    with board.booking_of(call("a/1", decode_worker="d1")):
        assert names(await anext(stream)) == ["a/1"]
    await asyncio.sleep(0)  # the stream could tell of the end now
    told = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with board.booking_of(call("a/2", decode_worker="d1")):
        events = await told
        assert (list(events.ended), names(events)) == ([], ["a/2"])
        assert list((await anext(stream)).ended) == ["a/1"]
    await stream.aclose()


async def test_a_computed_prompt_is_told_before_growth() -> None:
    board = BookingBoard()
    stream = board.watch("b", 0, 3600)
    with board.booking_of(call("a/1")) as opened:
        await anext(stream)
        opened.advance(1)
        assert (await anext(stream)).open[0].is_computed
        told = asyncio.ensure_future(anext(stream))
        opened.advance(100)
        await asyncio.sleep(0.01)
        assert not told.done()
        told.cancel()


async def test_what_ended_between_two_messages_is_not_mentioned() -> None:
    board = BookingBoard()
    stream = board.watch("b", 0, 0)
    assert not (await anext(stream)).open
    with board.booking_of(call("a/1")):
        pass
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    with board.booking_of(call("a/2")):
        assert names(await waiting) == ["a/2"]
    await stream.aclose()


async def test_many_bookings_come_in_several_messages() -> None:
    board = BookingBoard()
    stream = board.watch("b", 0, 0)
    with ExitStack() as held:
        for number in range(4500):
            held.enter_context(board.booking_of(call(f"a/{number}")))
        sizes = [len((await anext(stream)).open) for _ in range(3)]
    assert sizes == [2000, 2000, 500]
    await stream.aclose()


def test_calls_without_a_booking_are_handled_without_one() -> None:
    with BookingBoard().booking_of(Call(("other", "x"))) as booking:  # type: ignore[arg-type]
        booking.advance(3)


@pytest.mark.parametrize("packed", [b"\xff\xff\xff", b"", "text", worker_pb2.Booking(name="x").SerializeToString()])
def test_metadata_that_is_no_booking_is_refused(packed: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"baton-booking-bin"):
        BookingBoard().booking_of(Call((BOOKING_KEY, packed))).__enter__()  # type: ignore[arg-type]


def test_a_name_is_open_once() -> None:
    board = BookingBoard()
    with board.booking_of(call("a/1")), pytest.raises(InvalidRequestError, match="a/1"):
        board.booking_of(call("a/1")).__enter__()
    with board.booking_of(call("a/1")):
        pass

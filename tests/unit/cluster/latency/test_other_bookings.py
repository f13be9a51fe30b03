"""The ledger of a router holds the work of the others as if it had booked it itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.rpc.bookings import BOOKING_KEY, BookingBoard
from baton.rpc.wire import worker_pb2
from cluster.latency.ledger import WorkLedger
from cluster.latency.other_bookings import OtherBookings
from tests.unit.baton.rpc.test_bookings import Call

WORKERS = ("p1", "p2", "d1", "d2")


@dataclass
class World:
    """Workers with boards, a ledger that hears of them, and a ledger in which everything is entered directly."""

    now_s: float = 100.0
    boards: dict[str, BookingBoard] = field(default_factory=dict)
    heard: WorkLedger = field(default_factory=WorkLedger)
    direct: WorkLedger = field(default_factory=WorkLedger)
    num_freed: int = 0

    def __post_init__(self) -> None:
        def free() -> None:
            self.num_freed += 1

        self.boards = {worker: BookingBoard(self.clock) for worker in WORKERS}
        self.others = OtherBookings(self.heard, free, self.clock)
        self.streams = {worker: board.watch("me", 0, 0) for worker, board in self.boards.items()}

    def clock(self) -> float:
        return self.now_s

    async def listen(self, worker: str) -> None:
        self.others.apply(worker, await anext(self.streams[worker]))

    def figures(self, ledger: WorkLedger) -> dict[str, Any]:
        return {
            worker: (
                ledger.backlog_tokens(worker),
                ledger.num_prompts(worker),
                ledger.batch(worker),
                ledger.final_tokens(worker),
                ledger.tpot_target_s(worker),
                ledger.queue(worker, self.now_s),
            )
            for worker in WORKERS
        }

    def check(self) -> None:
        assert self.figures(self.heard) == self.figures(self.direct)


def opened(world: World, worker: str, name: str, **fields: Any) -> tuple[Any, AbstractContextManager[Any]]:
    booking = worker_pb2.Booking(router="other", name=name, **fields)
    held = world.boards[worker].booking_of(Call((BOOKING_KEY, booking.SerializeToString())))  # type: ignore[arg-type]
    return held.__enter__(), held


async def test_a_request_moves_from_prefill_to_decode() -> None:
    world = World()
    for worker in WORKERS:
        await world.listen(worker)
    plan = {"decode_worker": "d1", "num_tokens": 100, "expected_tokens": 40, "tpot_target_s": 0.05}
    prefill, prefilling = opened(world, "p1", "o/1", uncached_tokens=80, cached_tokens=20, **plan)
    world.now_s += 1.5
    await world.listen("p1")
    world.direct.begin_prompt("p1", "o/1", 80, 20, 100.0)
    world.direct.begin_decoding("d1", "o/1", 100, 0.05, 40)
    world.check()  # the decode worker has not heard of it yet

    prefill.advance(1)
    await world.listen("p1")
    world.direct.end_prompt("p1", "o/1", world.now_s)
    world.direct.grow("d1", "o/1", 1)
    world.check()

    decode, decoding = opened(world, "d1", "o/1", **plan)
    await world.listen("d1")
    prefilling.__exit__(None, None, None)
    await world.listen("p1")
    world.check()  # now the decode worker alone reports it

    decode.advance(64)
    await world.listen("d1")
    world.direct.grow("d1", "o/1", 63)
    world.check()
    freed = world.num_freed
    decoding.__exit__(None, None, None)
    await world.listen("d1")
    world.direct.end_decoding("d1", "o/1")
    world.check()
    assert world.num_freed > freed
    assert world.figures(world.heard) == world.figures(WorkLedger())


async def test_a_worker_that_is_forgotten_leaves_nothing_behind() -> None:
    world = World()
    plan = {"uncached_tokens": 8, "decode_worker": "d1", "num_tokens": 8}
    held = [opened(world, "p1", "o/1", **plan), opened(world, "d1", "o/2", **plan)]
    for worker in WORKERS:
        await world.listen(worker)
    assert world.heard.batch("d1") == (2, 16)
    assert world.others.has_any
    world.others.forget("p1")
    world.others.forget("d1")
    world.others.forget("d1")
    assert not world.others.has_any
    assert world.figures(world.heard) == world.figures(WorkLedger())
    del held


@settings(max_examples=60, deadline=None)
@given(st.data())
async def test_any_course_of_events_ends_with_the_same_ledger(data: st.DataObject) -> None:
    """Local requests on decode workers, in any order, with messages at any time."""
    world = World()
    held: dict[str, tuple[str, Any, AbstractContextManager[Any], int]] = {}

    numbers = itertools.count()

    async def tell(worker: str) -> None:
        _, closing = opened(world, worker, f"marker/{next(numbers)}")  # so that there is something to hear
        await world.listen(worker)
        closing.__exit__(None, None, None)

    def begin() -> None:
        number = len(held)
        worker = data.draw(st.sampled_from(("d1", "d2")))
        tokens = data.draw(st.integers(1, 5000))
        call, closing = opened(
            world, worker, f"o/{number}", uncached_tokens=tokens, decode_worker=worker, num_tokens=tokens
        )
        held[f"o/{number}"] = (worker, call, closing, tokens)
        world.direct.begin_prompt(worker, f"o/{number}", tokens, 0, world.now_s)
        world.direct.begin_decoding(worker, f"o/{number}", tokens)

    def advance(name: str) -> None:
        worker, call, _, _ = held[name]
        world.direct.end_prompt(worker, name, world.now_s)
        world.direct.grow(worker, name, 32)
        call.advance(32)

    def end(name: str) -> None:
        worker, _, closing, _ = held[name]
        world.direct.end_prompt(worker, name, world.now_s)
        world.direct.end_decoding(worker, name)
        closing.__exit__(None, None, None)
        held[name] = (worker, None, closing, 0)

    for _ in range(data.draw(st.integers(1, 12))):
        world.now_s += 0.25
        running = [name for name, (_, call, _, _) in held.items() if call is not None]
        actions: list[Callable[[], None]] = [begin]
        if running:
            name = data.draw(st.sampled_from(running))
            actions += [lambda name=name: advance(name), lambda name=name: end(name)]  # type: ignore[misc]
        data.draw(st.sampled_from(actions))()
        if data.draw(st.booleans()):
            await tell(data.draw(st.sampled_from(WORKERS)))
    for worker in WORKERS:
        await tell(worker)
        await world.listen(worker)  # the end of the marker
    for worker in WORKERS:
        for figure in ("backlog_tokens", "num_prompts", "batch", "final_tokens"):
            assert getattr(world.heard, figure)(worker) == getattr(world.direct, figure)(worker)

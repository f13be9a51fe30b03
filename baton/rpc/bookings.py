"""What several routers have booked on a worker. Each router hears of the bookings of the others from the worker itself.

With one router, calls carry no bookings, and nothing here does any work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from baton.core.errors import InvalidRequestError
from baton.rpc.wire import worker_pb2

BOOKING_KEY = "baton-booking-bin"
PAUSE_S = 0.004
"""Shortest time between two messages to a router."""
ROOM_PAUSE_S = 0.02
"""An end is told this much later than a new booking. The router whose request has ended may take the place again at
once. The others must hear of that before they hear of the end, or they would book the same place."""
_TOLD_TOKENS = 32
"""A sequence that has grown is only mentioned again after this many tokens, since estimates need no more."""
_TOLD_PER_MESSAGE = 2000
_MAX_OPEN = 100_000


class OpenBooking:
    """The booking of a call that is in progress on this worker."""

    def __init__(self, booking: worker_pb2.Booking, now_s: float, changed: Callable[[], None]) -> None:
        self._booking = booking
        self._since_s = now_s
        self._changed = changed
        self._is_computed = False
        self._num_new_tokens = 0

    @property
    def router(self) -> str:
        return str(self._booking.router)

    @property
    def version(self) -> tuple[bool, int]:
        """Changes whenever other routers should hear of the booking again."""
        return self._is_computed, self._num_new_tokens // _TOLD_TOKENS

    def advance(self, num_tokens: int) -> None:
        """Counts tokens that go to the router. The first ones mean that the prompt is computed."""
        before = self.version
        self._is_computed = True
        self._num_new_tokens += num_tokens
        if self.version != before:
            self._changed()

    def to_message(self, now_s: float) -> worker_pb2.OpenBooking:
        return worker_pb2.OpenBooking(
            booking=self._booking,
            age_s=max(0.0, now_s - self._since_s),
            is_computed=self._is_computed,
            num_new_tokens=self._num_new_tokens,
        )


class _NoBooking:
    """Stands for the booking of a call without one."""

    def advance(self, num_tokens: int) -> None:
        pass


_NO_BOOKING = _NoBooking()


class BookingBoard:
    """The bookings of all calls in progress on this worker.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, OpenBooking] = {}
        self._changed = asyncio.Event()

    @contextmanager
    def booking_of(self, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[OpenBooking | _NoBooking]:
        """Keeps the booking that a call carries, if it carries one, while the call is handled.

        Raises:
            InvalidRequestError: the metadata contains no booking, or one of a name that is open already.
        """
        packed = next((value for key, value in context.invocation_metadata() or () if key == BOOKING_KEY), None)
        if packed is None:
            yield _NO_BOOKING
            return
        with self.keep(_unpack(packed)) as opened:
            yield opened

    @contextmanager
    def keep(self, booking: worker_pb2.Booking) -> Iterator[OpenBooking]:
        """Keeps a booking while its call is handled.

        Raises:
            InvalidRequestError: a booking of that name is open already, or too many are.
        """
        if booking.name in self._open or len(self._open) >= _MAX_OPEN:
            raise InvalidRequestError(f"The booking {booking.name[:80]!r} is open already, or too many are.")
        opened = self._open[booking.name] = OpenBooking(booking, self._clock(), self._notify)
        self._notify()
        try:
            yield opened
        finally:
            del self._open[booking.name]
            self._notify()

    async def watch(
        self, router: str, pause_s: float = PAUSE_S, room_pause_s: float = ROOM_PAUSE_S
    ) -> AsyncGenerator[worker_pb2.BookingEvents]:
        """The bookings of other routers than ``router``: a snapshot, then changes, at most every ``pause_s``.

        Args:
            room_pause_s: how much later ends and growth are told than new bookings and computed prompts.
        """
        told: dict[str, tuple[bool, int]] = {}
        late: dict[str, float] = {}
        """When an end or growth was noticed that is not told yet, by name."""
        is_first = True
        while True:
            changed, now_s = self._changed, self._clock()
            events = worker_pb2.BookingEvents(is_snapshot=is_first)
            for name, version in list(told.items()):
                opened = self._open.get(name)
                if opened is not None and (opened.version == version or opened.version[0] != version[0]):
                    late.pop(name, None)  # nothing to tell, or something that does not wait
                elif now_s >= late.setdefault(name, now_s) + room_pause_s:
                    del told[name], late[name]
                    if opened is None:
                        events.ended.append(name)
            for name, opened in self._open.items():
                if opened.router != router and told.get(name) != opened.version and name not in late:
                    told[name] = opened.version
                    events.open.append(opened.to_message(now_s))
                    if len(events.open) >= _TOLD_PER_MESSAGE:
                        break  # the rest follows after the pause
            if is_first or events.open or events.ended:
                yield events
            is_first = False
            if len(events.open) < _TOLD_PER_MESSAGE:
                due_s = min(late.values()) + room_pause_s - self._clock() if late else None
                with suppress(TimeoutError):
                    async with asyncio.timeout(due_s):
                        await changed.wait()
            await asyncio.sleep(pause_s)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _unpack(packed: object) -> worker_pb2.Booking:
    try:
        booking = worker_pb2.Booking.FromString(packed if isinstance(packed, bytes) else b"")
    except DecodeError as error:
        raise InvalidRequestError(f"The metadata {BOOKING_KEY} of a call is not a Booking.") from error
    if not booking.router or not booking.name:
        raise InvalidRequestError(f"The metadata {BOOKING_KEY} of a call names no router or no booking.")
    return booking

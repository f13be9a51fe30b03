"""The work of other routers on the same workers, as the workers report it.

Without it, each router would think that the workers are free of all work but its own, and two routers would book the
same room.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from baton.rpc.conversions import unpack_queue_priority
from baton.rpc.wire import worker_pb2
from cluster.latency.ledger import WorkLedger
from cluster.registry.worker_streams import WorkerStreams
from cluster.registry.workers import Worker


@dataclass(slots=True)
class _Decoding:
    """A sequence of another router.

    Attributes:
        tokens: those that the ledger counts.
        reporters: workers that report it: at first the prefill worker, then the decode worker.
    """

    decode_id: str
    tokens: int
    reporters: set[str]


class OtherBookings:
    """Keeps the bookings of other routers in a ledger.

    Args:
        ledger: this router's ledger, where other names are used for its own work.
        freed: called when a worker may have more room.
        clock: monotonic seconds.
    """

    def __init__(
        self, ledger: WorkLedger, freed: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ledger = ledger
        self._freed = freed
        self._clock = clock
        self._reported: dict[str, set[str]] = {}
        """Names of open bookings, by the worker that reports them."""
        self._decoding: dict[str, _Decoding] = {}

    @property
    def has_any(self) -> bool:
        """Whether other routers have anything in progress."""
        return bool(self._reported)

    def apply(self, worker_id: str, events: worker_pb2.BookingEvents) -> None:
        """Takes a message of ``Worker.WatchBookings``."""
        if events.is_snapshot:
            self.forget(worker_id)
        for name in events.ended:
            self._end(worker_id, name, is_computed=True)
        for message in events.open:
            self._take(worker_id, message)
        if events.ended or any(message.is_computed for message in events.open):
            self._freed()

    def forget(self, worker_id: str) -> None:
        """Drops everything that a worker has reported."""
        for name in list(self._reported.get(worker_id, ())):
            self._end(worker_id, name, is_computed=False)

    def _take(self, worker_id: str, message: worker_pb2.OpenBooking) -> None:
        booking, now_s = message.booking, self._clock()
        name, sent_s = booking.name, now_s - message.age_s
        names = self._reported.setdefault(worker_id, set())
        is_new = name not in names
        names.add(name)
        if message.is_computed:
            self._ledger.end_prompt(worker_id, name, now_s)
        elif is_new and booking.uncached_tokens:
            priority = unpack_queue_priority(booking.queue_priority, sent_s)
            self._ledger.begin_prompt(worker_id, name, booking.uncached_tokens, booking.cached_tokens, sent_s, priority)
        if booking.decode_worker:
            self._note_decoding(worker_id, booking, booking.num_tokens + message.num_new_tokens)

    def _note_decoding(self, worker_id: str, booking: worker_pb2.Booking, num_tokens: int) -> None:
        known = self._decoding.get(booking.name)
        if known is None:
            self._decoding[booking.name] = _Decoding(booking.decode_worker, num_tokens, {worker_id})
            self._ledger.begin_decoding(
                booking.decode_worker,
                booking.name,
                num_tokens,
                booking.tpot_target_s or inf,
                booking.expected_tokens,
            )
            return
        known.reporters.add(worker_id)
        if num_tokens > known.tokens:
            self._ledger.grow(known.decode_id, booking.name, num_tokens - known.tokens)
            known.tokens = num_tokens

    def _end(self, worker_id: str, name: str, *, is_computed: bool) -> None:
        names = self._reported.get(worker_id, set())
        names.discard(name)
        if not names:
            self._reported.pop(worker_id, None)
        self._ledger.end_prompt(worker_id, name, self._clock(), is_computed=is_computed)
        known = self._decoding.get(name)
        if known is None:
            return
        known.reporters.discard(worker_id)
        if not known.reporters:
            del self._decoding[name]
            self._ledger.end_decoding(known.decode_id, name)


def booking_streams(router_id: str, bookings: OtherBookings) -> WorkerStreams[worker_pb2.BookingEvents]:
    """The streams that keep ``bookings`` current. Workers must be added to them, and removed from them.

    Args:
        router_id: the id of this router, whose own bookings are not reported to it.
    """

    def take(worker: Worker, events: worker_pb2.BookingEvents) -> None:
        bookings.apply(worker.info.worker_id, events)

    return WorkerStreams("bookings", lambda worker: worker.client.watch_bookings(router_id), take, bookings.forget)

"""The router's connection to a simulated worker in its own process: a ``WorkerClient`` without a network."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

from baton.core.errors import WorkerLostError
from baton.core.step_log import StepLog
from baton.core.timeline import Event, Timeline, TransferPart
from baton.rpc.wire import worker_pb2
from cluster.registry.worker_client import WorkerClient
from cluster.simulation.worker import SimulatedWorker

MessageT = TypeVar("MessageT")


class InProcessClient(WorkerClient):
    """Calls a worker in the same event loop and with the same clock, so no clock offset is measured.

    Args:
        worker: the worker at ``address``; ``None`` means that there is none.
    """

    def __init__(self, address: str, worker: SimulatedWorker | None) -> None:
        self.address = address  # the base class would open a channel
        self._simulated = worker

    def prefill(
        self, request: worker_pb2.PrefillRequest, timeout_s: float, booking: worker_pb2.Booking | None = None
    ) -> AsyncGenerator[worker_pb2.PrefillEvent]:
        worker = self._present()
        events = worker.prefill(request, timeout_s)
        return _booked(worker, booking, events, lambda event: len(event.first_token.token_ids))

    def generate(
        self, request: worker_pb2.GenerateRequest, timeout_s: float, booking: worker_pb2.Booking | None = None
    ) -> AsyncGenerator[worker_pb2.TokenBatch]:
        worker = self._present()
        batches = worker.generate(request, timeout_s)
        return _booked(worker, booking, batches, lambda batch: len(batch.token_ids))

    async def abandon(self, transfer_id: str) -> None:
        if self._simulated is not None:
            self._simulated.sink.abandon(transfer_id)

    def watch_cache(self) -> AsyncGenerator[worker_pb2.CacheEvents]:
        return self._present().watch_cache()

    def watch_bookings(self, router_id: str) -> AsyncGenerator[worker_pb2.BookingEvents]:
        return self._present().bookings.watch(router_id)

    async def stats(self, timeout_s: float = 2.0) -> worker_pb2.WorkerStats:
        return self._present().stats()

    @property
    def needs_sync(self) -> bool:
        return False

    async def sync_clock(self) -> None:
        """Does nothing, since both ends share a clock."""

    def record(self, timeline: Timeline, events: Mapping[Event, float]) -> None:
        for event, at_s in events.items():
            timeline.replace(event, at_s)

    def record_steps(self, log: StepLog, batch: worker_pb2.TokenBatch, first_token: int) -> None:
        """Does nothing, since a replay does not use steps."""

    def record_parts(self, timeline: Timeline, parts: Sequence[worker_pb2.TransferPart]) -> None:
        timeline.parts = [
            TransferPart(part.num_bytes, part.num_parts, part.started_s, part.sent_s, part.acknowledged_s)
            for part in parts
        ]

    async def close(self) -> None:
        """Ends every open call. Its reader gets a :class:`WorkerLostError`."""
        worker, self._simulated = self._simulated, None
        if worker is not None:
            worker.stop(WorkerLostError(f"the worker at {self.address} has left the cluster"))

    def _present(self) -> SimulatedWorker:
        if self._simulated is None:
            raise WorkerLostError(f"the worker at {self.address} has left the cluster")
        return self._simulated


def _booked(
    worker: SimulatedWorker,
    booking: worker_pb2.Booking | None,
    messages: AsyncGenerator[MessageT],
    num_tokens: Callable[[MessageT], int],
) -> AsyncGenerator[MessageT]:
    """The messages of a call, whose booking the worker keeps meanwhile. A single router books nothing."""
    return messages if booking is None else _kept(worker, booking, messages, num_tokens)


async def _kept(
    worker: SimulatedWorker,
    booking: worker_pb2.Booking,
    messages: AsyncGenerator[MessageT],
    num_tokens: Callable[[MessageT], int],
) -> AsyncGenerator[MessageT]:
    async with aclosing(messages):
        with worker.bookings.keep(booking) as opened:
            async for message in messages:
                opened.advance(num_tokens(message))
                yield message

"""The router's connection to one worker, and the offset between their clocks."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc.aio

from baton.core.errors import BatonError, WorkerLostError
from baton.core.step_log import StepLog
from baton.core.steps import StepProgress
from baton.core.timeline import Event, Timeline, TransferPart
from baton.process.background import BackgroundTasks
from baton.rpc.bookings import BOOKING_KEY
from baton.rpc.channel import create_channel, error_from_rpc
from baton.rpc.conversions import unpack_progress
from baton.rpc.credentials import PeerCredentials
from baton.rpc.wire import worker_pb2, worker_pb2_grpc
from cluster.registry.clock_offset import ClockOffset

_PINGS = 5
_PING_TIMEOUT_S = 5.0
_ABANDON_TIMEOUT_S = 5.0
_RESYNC_AFTER_S = 60.0
_RETRY_SYNC_AFTER_S = 2.0


class _Connection:
    """A channel to a worker. Closing it ends every open call with a :class:`WorkerLostError`, and refuses later ones.

    Attributes:
        metadata: what every call must carry.
        certificates: those that it was made with.
        end: why it was closed; empty while it is open.
    """

    def __init__(self, address: str, credentials: PeerCredentials) -> None:
        self.address = address
        self.metadata = credentials.call_metadata(address)
        self.end = ""
        self.certificates = credentials.current_certificates()
        self._channel = create_channel(address, credentials)
        self.prefill = worker_pb2_grpc.PrefillStub(self._channel)
        self.decode = worker_pb2_grpc.DecodeStub(self._channel)
        self.worker = worker_pb2_grpc.WorkerStub(self._channel)

    @contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Raises every failure of a call as a ``BatonError``."""
        if self.end:
            raise WorkerLostError(self.end)
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if self.end:
                raise WorkerLostError(self.end) from error
            raise error_from_rpc(error, self.address) from error
        except grpc.aio.UsageError as error:
            if self.end:
                raise WorkerLostError(self.end) from error
            raise
        except asyncio.CancelledError:
            # Closing the channel cancels its calls, which looks like a cancellation of the task that waits for one.
            task = asyncio.current_task()
            if self.end and (task is None or not task.cancelling()):
                raise WorkerLostError(self.end) from None
            raise

    async def close(self) -> None:
        """Set ``end`` before."""
        await self._channel.close()


class WorkerClient:
    """Calls one worker over gRPC. Every failure is raised as a ``BatonError``."""

    def __init__(self, address: str, credentials: PeerCredentials) -> None:
        self.address = address
        self._credentials = credentials
        self._connection = _Connection(address, credentials)
        self._suspension = ""
        self._closing = BackgroundTasks()
        self._clock = ClockOffset()
        self._sync_due_s = float("-inf")

    def suspend(self, reason: str) -> None:
        """Drops the connection, and refuses calls other than :meth:`ping` and :meth:`probe` until :meth:`resume`.

        Open calls end at once with a :class:`WorkerLostError`, whatever the worker or the network does. Output that
        the worker sends later has no reader.
        """
        self._suspension = f"the worker at {self.address} is suspected: {reason}"
        self._connect_again()

    def _connect_again(self) -> None:
        dropped, self._connection = self._connection, _Connection(self.address, self._credentials)
        dropped.end = self._suspension
        self._closing.spawn(dropped.close())

    def resume(self) -> None:
        """Allows calls again."""
        self._suspension = ""

    @property
    def is_suspended(self) -> bool:
        return bool(self._suspension)

    def prefill(
        self, request: worker_pb2.PrefillRequest, timeout_s: float, booking: worker_pb2.Booking | None = None
    ) -> AsyncGenerator[worker_pb2.PrefillEvent]:
        """Computes a prompt on the worker. Closing the iterator cancels the call.

        Args:
            booking: what the worker tells other routers; ``None`` if there are none.
        """
        return self._stream(
            lambda connection: connection.prefill.Prefill(
                request, timeout=timeout_s, metadata=(*connection.metadata, *_carried(booking))
            )
        )

    def generate(
        self, request: worker_pb2.GenerateRequest, timeout_s: float, booking: worker_pb2.Booking | None = None
    ) -> AsyncGenerator[worker_pb2.TokenBatch]:
        """Generates tokens on the worker. Closing the iterator cancels the call.

        Args:
            booking: as for :meth:`prefill`.
        """
        return self._stream(
            lambda connection: connection.decode.Generate(
                request, timeout=timeout_s, metadata=(*connection.metadata, *_carried(booking))
            )
        )

    async def abandon(self, transfer_id: str) -> None:
        """Makes the worker free KV that no request will claim. Errors are ignored, since it expires on the worker."""
        request = worker_pb2.AbandonRequest(transfer_id=transfer_id)
        with suppress(BatonError):
            await self._call(
                lambda connection: connection.decode.Abandon(
                    request, timeout=_ABANDON_TIMEOUT_S, metadata=connection.metadata
                )
            )

    def watch_cache(self) -> AsyncGenerator[worker_pb2.CacheEvents]:
        """The content of the worker's prefix cache, and then its changes. Closing the iterator cancels the call."""
        request = worker_pb2.WatchCacheRequest()
        return self._stream(lambda connection: connection.worker.WatchCache(request, metadata=connection.metadata))

    def watch_bookings(self, router_id: str) -> AsyncGenerator[worker_pb2.BookingEvents]:
        """What routers other than ``router_id`` have booked on the worker, and then its changes."""
        request = worker_pb2.WatchBookingsRequest(router=router_id)
        return self._stream(lambda connection: connection.worker.WatchBookings(request, metadata=connection.metadata))

    async def _stream(self, begin: Callable[[_Connection], Any]) -> AsyncGenerator[Any]:
        connection = self._trusted()
        with connection.typed_errors():
            call = begin(connection)
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    yield message
            finally:
                call.cancel()  # no effect on a finished call

    def _trusted(self) -> _Connection:
        if self._suspension:
            raise WorkerLostError(self._suspension)
        return self._connection

    def _untrusted(self) -> _Connection:
        """The connection, even of a suspected worker. It may have been lost because a certificate had ended."""
        connection = self._connection
        if (
            self._suspension
            and not connection.end
            and connection.certificates is not self._credentials.current_certificates()
        ):
            self._connect_again()
        return self._connection

    async def ping(self, timeout_s: float) -> StepProgress:
        """How far the worker's steps have come. A suspended worker is asked, too.

        Raises:
            BatonError: the worker does not answer.
        """
        return unpack_progress(await self._ping(self._untrusted(), timeout_s))

    async def probe(self, timeout_s: float) -> None:
        """Makes the worker compute a token. A suspended worker is asked, too.

        Raises:
            BatonError: the worker does not.
        """
        connection = self._untrusted()
        with connection.typed_errors():
            request = worker_pb2.ProbeRequest()
            await connection.worker.Probe(request, timeout=timeout_s, metadata=connection.metadata)

    async def _ping(self, connection: _Connection, timeout_s: float) -> worker_pb2.PingReply:
        with connection.typed_errors():
            reply: worker_pb2.PingReply = await connection.worker.Ping(
                worker_pb2.PingRequest(), timeout=timeout_s, metadata=connection.metadata
            )
            return reply

    async def stats(self, timeout_s: float = 2.0) -> worker_pb2.WorkerStats:
        """The worker's statistics.

        Raises:
            BatonError: the worker does not answer.
        """
        request = worker_pb2.StatsRequest()
        stats: worker_pb2.WorkerStats = await self._call(
            lambda connection: connection.worker.GetStats(request, timeout=timeout_s, metadata=connection.metadata)
        )
        return stats

    async def _call(self, begin: Callable[[_Connection], Awaitable[Any]]) -> Any:
        connection = self._trusted()
        with connection.typed_errors():
            return await begin(connection)

    @property
    def needs_sync(self) -> bool:
        return time.monotonic() >= self._sync_due_s

    async def sync_clock(self) -> None:
        """Measures the offset of the worker's clock with the fastest of some round trips, assuming symmetric delays.

        Raises:
            BatonError: the worker does not answer.
        """
        self._sync_due_s = time.monotonic() + _PINGS * _PING_TIMEOUT_S  # one measurement at a time
        best_s, offset_s = float("inf"), 0.0
        try:
            for _ in range(_PINGS):
                sent_s = time.monotonic()
                reply = await self._ping(self._trusted(), _PING_TIMEOUT_S)
                round_trip_s = time.monotonic() - sent_s
                if round_trip_s < best_s:
                    best_s, offset_s = round_trip_s, sent_s + round_trip_s / 2 - reply.monotonic_s
        except BatonError:
            self._sync_due_s = time.monotonic() + _RETRY_SYNC_AFTER_S
            raise
        self._clock.measured(offset_s, best_s / 2)
        self._sync_due_s = time.monotonic() + _RESYNC_AFTER_S

    def record(self, timeline: Timeline, events: Mapping[Event, float]) -> None:
        """Adds the worker's events, which have just arrived, to a timeline; see :meth:`ClockOffset.record`."""
        self._clock.record(timeline, events)

    def record_steps(self, log: StepLog, batch: worker_pb2.TokenBatch, first_token: int) -> None:
        """Adds the steps of a batch to one of its sequence's logs, on this process's clock.

        Args:
            first_token: number of tokens that the sequence had before the batch.
        """
        shift_s = self._clock.has_arrived(max((step.ended_s for step in batch.steps), default=-math.inf))
        if shift_s is None:
            return
        received_s, left = time.monotonic(), len(batch.steps)
        for step in batch.steps:
            left -= 1
            is_last = not left  # earlier steps emitted no token
            log.add(
                step_index=step.index,
                started_s=step.started_s + shift_s,
                ended_s=step.ended_s + shift_s,
                busy_s=step.busy_s,
                draft_s=step.draft_s,
                num_steps=step.num_steps,
                num_computed=step.num_computed_tokens,
                num_emitted=len(batch.token_ids) if is_last else 0,
                num_drafted=batch.num_drafted if is_last else 0,
                num_accepted=batch.num_accepted if is_last else 0,
                num_sequences=step.num_sequences,
                num_batch_tokens=step.num_batch_tokens,
                num_prompt_tokens=step.num_prompt_tokens,
                received_s=received_s,
                first_token=first_token,
            )

    def record_parts(self, timeline: Timeline, parts: Sequence[worker_pb2.TransferPart]) -> None:
        """Replaces the parts of the hand-off in a timeline, on this process's clock."""
        shift_s = self._clock.has_arrived(max((part.sent_s for part in parts), default=-math.inf))
        if shift_s is None:
            return
        timeline.parts = [
            TransferPart(
                part.num_bytes,
                part.num_parts,
                part.started_s + shift_s,
                part.sent_s + shift_s,
                part.acknowledged_s + shift_s if part.acknowledged_s else 0.0,
            )
            for part in parts
        ]

    async def close(self) -> None:
        """Ends every open call, and refuses later ones. Their readers get a :class:`WorkerLostError`."""
        self._suspension = self._connection.end = f"the worker at {self.address} has left the cluster"
        await self._connection.close()


def _carried(booking: worker_pb2.Booking | None) -> tuple[tuple[str, bytes], ...]:
    """The metadata of a call with this booking."""
    return () if booking is None else ((BOOKING_KEY, booking.SerializeToString()),)

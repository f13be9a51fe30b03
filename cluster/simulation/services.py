"""The gRPC services of a simulated worker: those of both roles, and the one that every worker has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc.aio

from baton.rpc.channel import reporting_errors
from baton.rpc.conversions import pack_progress
from baton.rpc.credentials import ClusterSecret
from baton.rpc.wire import worker_pb2, worker_pb2_grpc
from cluster.simulation.worker import SimulatedWorker

logger = logging.getLogger(__name__)

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class SimulatedServices(
    worker_pb2_grpc.PrefillServicer, worker_pb2_grpc.DecodeServicer, worker_pb2_grpc.WorkerServicer
):
    """Implements ``proto/worker.proto``. Cancelling a call aborts its request."""

    def __init__(self, worker: SimulatedWorker, secret: ClusterSecret) -> None:
        self._worker = worker
        self._secret = secret
        self._bookings = worker.bookings
        self._loop = asyncio.get_running_loop()

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillServicer_to_server(self, server)
        worker_pb2_grpc.add_DecodeServicer_to_server(self, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)

    async def Prefill(  # noqa: N802 - named by the schema
        self, request: worker_pb2.PrefillRequest, context: _Context
    ) -> None:
        async with reporting_errors(context, logger, request.sequence.request_id):
            if request.HasField("handoff"):
                self._secret.check_peer(request.handoff.peer, request.handoff.peer_proof)
        events = self._worker.prefill(request)
        async with reporting_errors(context, logger, request.sequence.request_id), aclosing(events):
            with self._bookings.booking_of(context) as booking:
                async for event in events:
                    booking.advance(len(event.first_token.token_ids))
                    await context.write(event)

    async def Generate(  # noqa: N802 - named by the schema
        self, request: worker_pb2.GenerateRequest, context: _Context
    ) -> None:
        batches = self._worker.generate(request)
        async with reporting_errors(context, logger, request.sequence.request_id), aclosing(batches):
            with self._bookings.booking_of(context) as booking:
                async for batch in batches:
                    booking.advance(len(batch.token_ids))
                    await context.write(batch)

    async def Abandon(  # noqa: N802 - named by the schema
        self, request: worker_pb2.AbandonRequest, context: _Context
    ) -> worker_pb2.AbandonReply:
        self._worker.sink.abandon(request.transfer_id)
        return worker_pb2.AbandonReply()

    async def Ping(  # noqa: N802 - named by the schema
        self, request: worker_pb2.PingRequest, context: _Context
    ) -> worker_pb2.PingReply:
        return pack_progress(self._worker.engine.progress(), self._loop.time())

    async def Probe(  # noqa: N802 - named by the schema
        self, request: worker_pb2.ProbeRequest, context: _Context
    ) -> worker_pb2.ProbeReply:
        async with reporting_errors(context, logger, "probe"):
            await self._worker.probe()
        return worker_pb2.ProbeReply()

    async def GetStats(  # noqa: N802 - named by the schema
        self, request: worker_pb2.StatsRequest, context: _Context
    ) -> worker_pb2.WorkerStats:
        return self._worker.stats()

    async def WatchCache(  # noqa: N802 - named by the schema
        self, request: worker_pb2.WatchCacheRequest, context: _Context
    ) -> AsyncGenerator[worker_pb2.CacheEvents]:
        async with aclosing(self._worker.watch_cache()) as messages:
            async for message in messages:
                yield message

    async def WatchBookings(  # noqa: N802 - named by the schema
        self, request: worker_pb2.WatchBookingsRequest, context: _Context
    ) -> AsyncGenerator[worker_pb2.BookingEvents]:
        async with aclosing(self._bookings.watch(request.router)) as messages:
            async for message in messages:
                yield message

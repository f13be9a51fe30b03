"""The gRPC service that every worker has, independent of its role."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio

from baton.rpc.bookings import BookingBoard
from baton.rpc.channel import reporting_errors
from baton.rpc.conversions import pack_progress
from baton.rpc.wire import worker_pb2, worker_pb2_grpc
from cluster.worker.role import WorkerRole

logger = logging.getLogger(__name__)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Serves the worker's clock, its figures, the content of its prefix cache and its bookings."""

    def __init__(self, worker_id: str, pool: str, role: WorkerRole, bookings: BookingBoard) -> None:
        self._worker_id = worker_id
        self._pool = pool
        self._role = role
        self._bookings = bookings
        self._started_s = time.monotonic()

    async def Ping(  # noqa: N802 - named by the schema
        self, request: worker_pb2.PingRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PingReply:
        # Until its process is replaced, a worker whose engine has ended must not look as if it could serve.
        async with reporting_errors(context, logger, "ping"):
            progress = self._role.progress()
        return pack_progress(progress, time.monotonic())

    async def Probe(  # noqa: N802 - named by the schema
        self, request: worker_pb2.ProbeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ProbeReply:
        async with reporting_errors(context, logger, "probe"):
            await self._role.probe()
        return worker_pb2.ProbeReply()

    async def GetStats(  # noqa: N802 - named by the schema
        self, request: worker_pb2.StatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WorkerStats:
        stats = worker_pb2.WorkerStats(
            worker_id=self._worker_id, role=self._pool, uptime_s=time.monotonic() - self._started_s
        )
        await self._role.fill_stats(stats)
        return stats

    async def WatchCache(  # noqa: N802 - named by the schema
        self, request: worker_pb2.WatchCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[worker_pb2.CacheEvents]:
        async with aclosing(self._role.watch_cache()) as messages:
            async for message in messages:
                yield message

    async def WatchBookings(  # noqa: N802 - named by the schema
        self, request: worker_pb2.WatchBookingsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[worker_pb2.BookingEvents]:
        async with aclosing(self._bookings.watch(request.router)) as messages:
            async for message in messages:
                yield message

"""Assembles a decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import grpc.aio

from baton.core.chunk_budget import SchedulerLimits
from baton.core.kv_spec import KVEncoding
from baton.core.steps import StepProgress
from baton.engine.async_engine import AsyncEngine
from baton.engine.draft.loading import relative_size
from baton.engine.profile import profile_steps
from baton.engine.scheduling.ordering import EarliestDeadlineFirst
from baton.kv_transfer.transports import create_kv_service
from baton.rpc.cache_messages import DECODE_PAUSE_S, watch_messages
from baton.rpc.wire import worker_pb2, worker_pb2_grpc
from cluster.worker.role import WorkerContext, fill_engine_stats
from decode_worker.draft_reports import fill_speculation
from decode_worker.kv_import import KVImporter
from decode_worker.server import DecodeService
from decode_worker.speculation.registry import assemble_speculation


class DecodeRole:
    """Implements :class:`cluster.worker.role.WorkerRole`."""

    def __init__(self, context: WorkerContext) -> None:
        config, pool = context.config, context.pool
        self._max_model_len = context.max_model_len
        self._bookings = context.bookings
        speculation = assemble_speculation(config.speculation, context.runner, context.draft)
        self._speculation = speculation.controller
        draft, target = context.draft, context.runner.loaded
        self._draft_share = 0.0 if draft is None else relative_size(draft, target)
        self._engine = AsyncEngine(
            context.runner,
            SchedulerLimits(pool.chunk_tokens, pool.max_num_seqs, context.max_model_len),
            prefix_caching=config.engine.prefix_caching,
            hash_key=context.credentials.secret.block_hash_key,
            ordering=EarliestDeadlineFirst(),
            verifier=speculation.verifier,
            proposer=speculation.controller,
            max_draft_tokens=speculation.max_draft_tokens,
            num_threads=context.num_threads,
            grammars=context.grammars,
            runs_ahead=lambda plan: context.overlaps_scheduling and self._speculation.leaves_alone(plan),
            costs=self._speculation.costs,
        )
        kv = config.kv_transfer
        encodings = () if kv.encoding == "native" else (KVEncoding.INT8,)
        self._importer = KVImporter(self._engine, kv.claim_timeout_s, self._speculation.adopt, encodings)
        self._kv_service = create_kv_service(kv, context.credentials, self._importer, config.network.port_range)
        self._capture = partial(
            context.runner.capture_graphs, pool.max_num_seqs, speculation.max_draft_tokens, context.max_model_len
        )

    async def start(self, server: grpc.aio.Server, host: str) -> None:
        worker_pb2_grpc.add_DecodeServicer_to_server(
            DecodeService(self._engine, self._importer, self._bookings), server
        )
        self._kv_service.add_to(server)
        await asyncio.to_thread(self._capture)
        self._engine.start()
        self._kv_service.start(host)

    async def profile(self) -> None:
        with self._speculation.profiling():
            await profile_steps(self._engine, self._max_model_len, draft_method=self._speculation.network_method)

    def watch_cache(self) -> AsyncGenerator[worker_pb2.CacheEvents]:
        return watch_messages(self._engine.blocks.prefix_cache.events, DECODE_PAUSE_S)

    async def closed(self) -> None:
        await self._engine.closed.wait()

    def progress(self) -> StepProgress:
        return self._engine.progress()

    async def probe(self) -> None:
        await self._engine.probe()

    async def fill_stats(self, stats: worker_pb2.WorkerStats) -> None:
        fill_engine_stats(stats, await self._engine.stats())
        stats.num_transfers = self._importer.num_active
        stats.kv_bytes_received = self._importer.num_bytes_received
        fill_speculation(stats, self._speculation, self._draft_share)

    async def stop(self) -> None:
        await self._kv_service.close()
        await self._engine.stop()

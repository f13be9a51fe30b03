"""Assembles a prefill worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc.aio

from baton.core.chunk_budget import SchedulerLimits
from baton.core.steps import StepProgress
from baton.engine.async_engine import AsyncEngine
from baton.engine.draft.loading import create_draft_state
from baton.engine.profile import profile_steps
from baton.engine.step.overlap import always, never
from baton.kv_transfer.transports import create_transport
from baton.rpc.cache_messages import watch_messages
from baton.rpc.wire import worker_pb2, worker_pb2_grpc
from cluster.worker.role import WorkerContext, fill_engine_stats
from prefill_worker.encoding_choice import EncodingChoice
from prefill_worker.kv_export import KVExporter, no_draft_state
from prefill_worker.niceness import pick_niceness
from prefill_worker.ordering.registry import create_ordering
from prefill_worker.prompt_draft import PromptDraft
from prefill_worker.server import PrefillService


class PrefillRole:
    """Implements :class:`cluster.worker.role.WorkerRole`."""

    def __init__(self, context: WorkerContext) -> None:
        config, pool, runner = context.config, context.pool, context.runner
        self._max_model_len = context.max_model_len
        self._secret = context.credentials.secret
        self._bookings = context.bookings
        self._draft = _create_draft(context)
        self._engine = AsyncEngine(
            runner,
            SchedulerLimits(pool.chunk_tokens, pool.max_num_seqs, context.max_model_len),
            prefix_caching=config.engine.prefix_caching,
            hash_key=context.credentials.secret.block_hash_key,
            ordering=create_ordering(config.prefill.ordering),
            proposer=self._draft,
            max_draft_tokens=0,
            num_threads=context.num_threads,
            niceness=pick_niceness(
                config.prefill.niceness, on_cpu=runner.device.type == "cpu", has_tiles=runner.has_tiles
            ),
            grammars=context.grammars,
            runs_ahead=always if context.overlaps_scheduling and self._draft is None else never,
        )
        kv = config.kv_transfer
        self._transport = create_transport(kv, context.credentials)
        self._exporter = KVExporter(
            self._engine,
            self._transport,
            kv.part_bytes,
            kv.reserve_timeout_s,
            self._draft.export_state if self._draft else no_draft_state,
            EncodingChoice(kv.encoding),
        )

    async def start(self, server: grpc.aio.Server, host: str) -> None:
        service = PrefillService(self._engine, self._exporter, self._secret, self._bookings)
        worker_pb2_grpc.add_PrefillServicer_to_server(service, server)
        self._engine.start()

    async def profile(self) -> None:
        await profile_steps(self._engine, self._max_model_len)

    def watch_cache(self) -> AsyncGenerator[worker_pb2.CacheEvents]:
        return watch_messages(self._engine.blocks.prefix_cache.events)

    async def closed(self) -> None:
        await self._engine.closed.wait()

    def progress(self) -> StepProgress:
        return self._engine.progress()

    async def probe(self) -> None:
        await self._engine.probe()

    async def fill_stats(self, stats: worker_pb2.WorkerStats) -> None:
        fill_engine_stats(stats, await self._engine.stats())
        stats.num_transfers = self._exporter.num_active
        stats.kv_bytes_sent = self._exporter.num_bytes_sent
        stats.num_draft_failures = self._draft.num_failures if self._draft else 0

    async def stop(self) -> None:
        await self._engine.stop()
        await self._transport.close()


def _create_draft(context: WorkerContext) -> PromptDraft | None:
    if context.draft is None:
        return None
    return PromptDraft(create_draft_state(context.draft.network, context.runner, ships_prompts=True))

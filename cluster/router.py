"""The router: takes a request through a prefill and a decode worker, and through their failures.

    generate ── admit ── attempt ─┬─ nothing out yet:  prefill → first token → (KV travels) → decode
                                  └─ tokens out:       decode alone, recomputing what the client has seen

Tokens already sent are a journal: whatever dies, the next attempt continues behind it. Noise is keyed by (seed,
position), so that the continuation is the one that the client would have got.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from cluster.config import RouterConfig
from cluster.generation import GenerationRequest, ModelCard, TokenChunk
from cluster.handoff_watch import HandoffWatch
from cluster.messages import pack_sequence, unpack_events, unpack_finish_reason, unpack_logprobs
from cluster.metrics import RouterMetrics
from cluster.registry import DECODE, POOLS, PREFILL, Worker, WorkerRegistry
from cluster.routing.base import RoutingRequest
from cluster.routing.profile import RoutingProfile, default_profile
from cluster.timelines import TimelineStore
from cluster.wire import worker_pb2
from engine.errors import (
    BatonError,
    ChecksumError,
    DeadlineError,
    InternalError,
    LayoutMismatchError,
    NoWorkerError,
    OutOfBlocksError,
    OverloadedError,
    TransferError,
    WorkerLostError,
)
from engine.request import FinishReason
from engine.timeline import Event

logger = logging.getLogger(__name__)

_RETRYABLE = (WorkerLostError, TransferError, ChecksumError, LayoutMismatchError, OutOfBlocksError)


class _Journal:
    """What a request has produced so far, over all attempts."""

    def __init__(self, request: GenerationRequest, deadline_s: float) -> None:
        self.request = request
        self.deadline_s = deadline_s
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.attempt = 0
        self.finish_reason: FinishReason | None = None

    @property
    def time_left_s(self) -> float:
        """Raises :class:`DeadlineError` when there is none."""
        left = self.deadline_s - time.monotonic()
        if left <= 0:
            raise DeadlineError("The request took longer than router.request_timeout_s.")
        return left

    def take(self, batch: worker_pb2.TokenBatch) -> TokenChunk:
        self.token_ids.extend(batch.token_ids)
        self.finish_reason = unpack_finish_reason(batch)
        return TokenChunk(tuple(batch.token_ids), unpack_logprobs(batch), self.finish_reason, self.num_cached_tokens)


class Router:
    """Implements :class:`cluster.generation.Generator`.

    Args:
        profiles: how to choose a worker, by pool.
    """

    def __init__(
        self,
        model: ModelCard,
        registry: WorkerRegistry,
        config: RouterConfig,
        metrics: RouterMetrics,
        timelines: TimelineStore,
        profiles: dict[str, RoutingProfile] | None = None,
    ) -> None:
        self._model = model
        self._registry = registry
        self._config = config
        self._metrics = metrics
        self._timelines = timelines
        self._profiles = profiles or {pool: default_profile() for pool in POOLS}
        self._in_flight = 0
        self._background: set[asyncio.Task[None]] = set()
        self.num_finished = 0
        self.num_failed = 0

    @property
    def model(self) -> ModelCard:
        return self._model

    @property
    def num_in_flight(self) -> int:
        return self._in_flight

    def is_ready(self) -> bool:
        return all(self._registry.has_accepting(pool) for pool in POOLS)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        """See :class:`Generator`.

        Raises:
            OverloadedError: ``router.max_inflight`` sequences are in flight.
            BatonError: every attempt failed; the last one's error.
        """
        if self._in_flight >= self._config.max_inflight:
            self._metrics.requests.labels("rejected").inc()
            raise OverloadedError(
                f"{self._in_flight} sequences are in flight, which is as many as router.max_inflight allows. "
                "Try again a little later.",
                retry_after_s=1.0,
            )
        journal = _Journal(request, time.monotonic() + self._config.request_timeout_s)
        self._begin(request)
        outcome = "cancelled"
        try:
            async with aclosing(self._attempts(journal)) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason is not None:
                        outcome = str(chunk.finish_reason)
                        request.timeline.record(Event.FINISHED)
                    yield chunk
        except BatonError as error:
            outcome = error.code
            raise
        finally:
            self._end(journal, outcome)

    def _begin(self, request: GenerationRequest) -> None:
        self._in_flight += 1
        self._metrics.in_flight.set(self._in_flight)
        self._metrics.prompt_tokens.inc(len(request.prompt_token_ids))
        request.timeline.attributes["prompt_tokens"] = len(request.prompt_token_ids)
        self._timelines.add(request.timeline)

    def _end(self, journal: _Journal, outcome: str) -> None:
        self._in_flight -= 1
        self._metrics.in_flight.set(self._in_flight)
        timeline = journal.request.timeline
        timeline.record(Event.FINISHED)
        timeline.attributes.update(
            output_tokens=len(journal.token_ids),
            cached_tokens=journal.num_cached_tokens,
            attempts=journal.attempt,
            outcome=outcome,
        )
        self._metrics.observe_end(timeline, outcome, len(journal.token_ids))
        if outcome in (FinishReason.STOP, FinishReason.LENGTH, "cancelled"):
            self.num_finished += 1
        else:
            self.num_failed += 1
            logger.warning("request %s ended with %s", journal.request.request_id, outcome)

    async def _attempts(self, journal: _Journal) -> AsyncGenerator[TokenChunk]:
        while True:
            journal.attempt += 1
            steps = self._resume(journal) if journal.token_ids else self._disaggregated(journal)
            try:
                async with aclosing(steps) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except _RETRYABLE as error:
                if journal.attempt >= self._config.max_attempts:
                    raise
                self._metrics.retries.labels(error.code).inc()
                logger.warning(
                    "request %s: attempt %d failed (%s: %s); trying again",
                    journal.request.request_id, journal.attempt, error.code, error.message,
                )  # fmt: skip
                continue
            if journal.finish_reason is None:
                raise InternalError("a worker ended its stream without finishing the request")
            return

    async def _disaggregated(self, journal: _Journal) -> AsyncGenerator[TokenChunk]:
        """Prefill on one worker, decode on another."""
        request = journal.request
        decode = await self._select(DECODE, journal)
        prefill = await self._select(PREFILL, journal)
        request.timeline.replace(Event.ROUTED)
        request.timeline.attributes.update(prefill_worker=prefill.info.worker_id, decode_worker=decode.info.worker_id)
        transfer_id = f"{request.request_id}/{journal.attempt}"
        message = worker_pb2.PrefillRequest(
            sequence=pack_sequence(request.request_id, request.prompt_token_ids, request.params)
        )
        if request.params.max_tokens > 1:
            message.handoff.transfer_id = transfer_id
            message.handoff.peer = decode.info.address
        watch = HandoffWatch(request.timeline, prefill, self._metrics)
        finished = False
        with decode.assign():
            try:
                first = await watch.start(prefill.client.prefill(message, journal.time_left_s))
                journal.num_cached_tokens = first.num_cached_tokens
                request.timeline.record(Event.FIRST_TOKEN)
                chunk = journal.take(first)
                finished = chunk.finish_reason is not None
                yield chunk
                if not finished:
                    batches = self._decode(journal, decode, transfer_id)
                    async with aclosing(watch.guard(batches)) as guarded:
                        async for chunk in guarded:
                            finished = chunk.finish_reason is not None
                            yield chunk
            except WorkerLostError:
                await self._suspect(prefill, decode)
                raise
            finally:
                watch.finish(keep=finished)

    async def _resume(self, journal: _Journal) -> AsyncGenerator[TokenChunk]:
        """A decode worker computes prompt and journal by itself and goes on from there."""
        decode = await self._select(DECODE, journal)
        journal.request.timeline.attributes["decode_worker"] = decode.info.worker_id
        with decode.assign():
            try:
                async with aclosing(self._decode(journal, decode, "")) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except WorkerLostError:
                await self._suspect(decode)
                raise

    async def _decode(self, journal: _Journal, worker: Worker, transfer_id: str) -> AsyncGenerator[TokenChunk]:
        request, timeline = journal.request, journal.request.timeline
        message = worker_pb2.GenerateRequest(
            sequence=pack_sequence(request.request_id, request.prompt_token_ids, request.params, journal.token_ids),
            transfer_id=transfer_id,
        )
        async with aclosing(worker.client.generate(message, journal.time_left_s)) as batches:
            async for batch in batches:
                if batch.events:
                    worker.client.record(timeline, unpack_events(batch.events))
                    timeline.record(Event.SECOND_TOKEN)
                yield journal.take(batch)

    async def _select(self, pool: str, journal: _Journal) -> Worker:
        """A worker of the pool; waits a while for one, so that a restart is a pause and not an error.

        Raises:
            NoWorkerError: none came in time.
        """
        request = RoutingRequest(journal.request.request_id, len(journal.request.prompt_token_ids))
        give_up_at = time.monotonic() + min(self._config.worker_wait_s, journal.time_left_s)
        while True:
            changed = self._registry.changed
            snapshots = [worker.snapshot() for worker in self._registry.pool(pool)]
            chosen = self._profiles[pool].select(snapshots, request)
            worker = self._registry.get(chosen.worker_id) if chosen else None
            if worker is not None:
                self._keep_clock(worker)
                return worker
            left = give_up_at - time.monotonic()
            if left <= 0:
                raise NoWorkerError(
                    f"No {pool} worker took the request within {self._config.worker_wait_s:g} s. "
                    "See `baton status` for the state of the pools."
                )
            # Suspects become usable again with time alone, hence the cap.
            try:
                await asyncio.wait_for(changed.wait(), min(left, 0.5))
            except TimeoutError:
                continue

    def _keep_clock(self, worker: Worker) -> None:
        if worker.client.needs_sync:
            task = asyncio.create_task(worker.sync_clock())
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _suspect(self, *workers: Worker) -> None:
        """Finds out which of the workers is lost."""
        alive = await asyncio.gather(*(worker.client.is_alive() for worker in workers))
        for worker, answers in zip(workers, alive, strict=True):
            if not answers:
                worker.suspect()

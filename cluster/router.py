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
from dataclasses import replace

from cluster.background import BackgroundTasks
from cluster.config import DECODE, POOLS, PREFILL, RouterConfig
from cluster.generation import GenerationRequest, ModelCard, TokenChunk
from cluster.handoff_watch import HandoffWatch
from cluster.journal import Journal
from cluster.latency.request_predictions import RequestPredictions
from cluster.latency_model import LatencyModel
from cluster.logs import RequestLog
from cluster.messages import pack_sequence, unpack_events
from cluster.metrics import RouterMetrics
from cluster.outcomes import CANCELLED, ENDED_BY, REJECTED
from cluster.registry import Worker, WorkerRegistry
from cluster.routing.base import RoutingRequest
from cluster.routing.profile import RoutingProfile, default_profile
from cluster.slo import judge, target_attributes
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
    RequestCancelledError,
    TransferError,
    WorkerLostError,
    error_classes,
)
from engine.request import FinishReason
from engine.timeline import Event, FailedAttempt

logger = logging.getLogger(__name__)

_RETRYABLE = (
    WorkerLostError,
    TransferError,
    ChecksumError,
    LayoutMismatchError,
    OutOfBlocksError,
    # The router's own cancellations never come back as errors, so it was the worker that ended the call.
    RequestCancelledError,
)
_OUR_FAULTS = frozenset(code for code, cls in error_classes().items() if cls.http_status >= 500)
_MAX_WAIT_S = 0.5
"""Suspects become usable again with time alone, so nobody waits for a change longer than this."""


class Router:
    """Implements :class:`cluster.generation.Generator`.

    Args:
        profiles: how to choose a worker, by pool.
        predictions: made for every request when it is routed.
    """

    def __init__(
        self,
        model: ModelCard,
        registry: WorkerRegistry,
        config: RouterConfig,
        metrics: RouterMetrics,
        timelines: TimelineStore,
        profiles: dict[str, RoutingProfile] | None = None,
        predictions: RequestPredictions | None = None,
    ) -> None:
        self._model = model
        self._registry = registry
        self._config = config
        self._metrics = metrics
        self._timelines = timelines
        self._profiles = profiles or {pool: default_profile() for pool in POOLS}
        self._predictions = predictions or RequestPredictions(LatencyModel(), metrics.prediction_errors)
        self._in_flight = 0
        self._background = BackgroundTasks()
        self.num_finished = 0
        self.num_failed = 0

    @property
    def model(self) -> ModelCard:
        """The model as all present workers can serve it: the smallest KV cache bounds the context."""
        lengths = [worker.info.max_model_len for worker in self._registry.workers]
        return replace(
            self._model,
            max_model_len=min(lengths, default=self._model.max_model_len),
            draft_methods=frozenset(worker.info.draft_method for worker in self._registry.pool(DECODE)) - {""},
        )

    @property
    def num_in_flight(self) -> int:
        return self._in_flight

    def is_ready(self) -> bool:
        return all(self._registry.has_accepting(pool) for pool in POOLS)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        """See :class:`Generator`.

        Raises:
            OverloadedError: ``router.max_inflight`` sequences are in flight.
            DeadlineError: ``router.request_timeout_s`` is over.
            BatonError: every attempt failed; the last one's error.
        """
        if self._in_flight >= self._config.max_inflight:
            self._metrics.requests.labels(REJECTED).inc()
            request.timeline.attributes.update(target_attributes(request.slo), outcome=REJECTED)
            self._judge(request, REJECTED, 0)
            raise OverloadedError(
                f"{self._in_flight} sequences are in flight, which is as many as router.max_inflight allows. "
                "Try again a little later.",
                retry_after_s=1.0,
            )
        journal = Journal(request, self._config.request_timeout_s)
        self._begin(request)
        deliveries = self._metrics.track_deliveries(request.timeline, request.slo)
        outcome = CANCELLED
        try:
            async with aclosing(self._attempts(journal)) as chunks:
                async for chunk in chunks:
                    deliveries.observe()
                    if chunk.finish_reason is not None:
                        outcome = str(chunk.finish_reason)
                        request.timeline.record(Event.FINISHED)
                    yield chunk
        except BatonError as error:
            outcome = error.code
            raise
        except Exception as error:
            outcome = InternalError.code
            RequestLog(logger, request.request_id).exception("a request failed unexpectedly")
            raise InternalError(f"The router failed ({type(error).__name__}); its log says more.") from error
        finally:
            self._end(journal, outcome)

    def _begin(self, request: GenerationRequest) -> None:
        self._in_flight += 1
        self._metrics.in_flight.set(self._in_flight)
        self._metrics.observe_start(len(request.prompt_token_ids))
        request.timeline.record(Event.ADMITTED)
        request.timeline.attributes.update(target_attributes(request.slo), prompt_tokens=len(request.prompt_token_ids))
        self._timelines.add(request.timeline)

    def _end(self, journal: Journal, outcome: str) -> None:
        self._in_flight -= 1
        self._metrics.in_flight.set(self._in_flight)
        timeline = journal.request.timeline
        timeline.record(Event.FINISHED)
        self._predictions.ended(journal)
        if outcome == CANCELLED:
            outcome = str(timeline.attributes.get(ENDED_BY, CANCELLED))
        timeline.attributes.update(
            output_tokens=len(journal.token_ids),
            cached_tokens=journal.num_cached_tokens,
            drafted_tokens=journal.num_drafted,
            accepted_tokens=journal.num_accepted,
            attempts=journal.attempt,
            outcome=outcome,
        )
        slo, num_tokens = journal.request.slo, len(journal.token_ids)
        self._metrics.observe_end(timeline, outcome, num_tokens, journal.num_cached_tokens, slo)
        self._judge(journal.request, outcome, num_tokens)
        self._metrics.drafted_tokens.inc(journal.num_drafted)
        self._metrics.accepted_tokens.inc(journal.num_accepted)
        if outcome in (FinishReason.STOP, FinishReason.LENGTH, CANCELLED):
            self.num_finished += 1
        else:
            self.num_failed += 1
        level = logging.WARNING if outcome in _OUR_FAULTS else logging.INFO
        fields = {**timeline.attributes, "ttft_ms": timeline.ttft_ms, "duration_ms": timeline.total_ms}
        RequestLog(logger, journal.request.request_id).log(level, "a request ended", extra=fields)

    def _judge(self, request: GenerationRequest, outcome: str, num_output_tokens: int) -> None:
        verdict = judge(request.slo, request.timeline, outcome, num_output_tokens)
        request.timeline.attributes.update(verdict.attributes())
        self._metrics.slo.observe(request.slo, verdict)

    async def _attempts(self, journal: Journal) -> AsyncGenerator[TokenChunk]:
        while not journal.is_finished:
            journal.attempt += 1
            steps = self._resume(journal) if journal.token_ids else self._disaggregated(journal)
            try:
                async with aclosing(steps) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except BatonError as error:
                if journal.is_finished:
                    return  # the client has everything
                if isinstance(error, DeadlineError):
                    raise journal.deadline_error() from error
                if not isinstance(error, _RETRYABLE) or journal.attempt >= self._config.max_attempts:
                    raise
                self._metrics.retries.labels(error.code).inc()
                journal.request.timeline.failed_attempts.append(FailedAttempt(time.monotonic(), error.code))
                RequestLog(logger, journal.request.request_id).warning(
                    "attempt %d failed (%s: %s); trying again", journal.attempt, error.code, error.message
                )

    async def _disaggregated(self, journal: Journal) -> AsyncGenerator[TokenChunk]:
        """Prefill on one worker, decode on another."""
        request, timeline = journal.request, journal.request.timeline
        prefill, decode = await self._select(journal, PREFILL, DECODE)
        timeline.replace(Event.ROUTED)
        timeline.attributes.update(prefill_worker=prefill.info.worker_id, decode_worker=decode.info.worker_id)
        self._predictions.routed(journal, prefill.info, decode.info)
        call_id = journal.new_call_id()
        message = worker_pb2.PrefillRequest(sequence=pack_sequence(call_id, request.prompt_token_ids, request.params))
        if request.params.max_tokens > 1:
            message.handoff.transfer_id = call_id
            message.handoff.peer = decode.info.address
        watch = HandoffWatch(timeline, prefill, self._metrics, self._background)
        with decode.assign():
            try:
                first = await watch.start(prefill.client.prefill(message, journal.time_left_s))
                journal.num_cached_tokens = first.num_cached_tokens
                timeline.record(Event.FIRST_TOKEN)
                self._predictions.first_token(journal)
                timeline.decode_steps.follow(timeline.events[Event.FIRST_TOKEN])
                yield journal.take(first)
                if not journal.is_finished:
                    batches = self._decode(journal, decode, call_id, call_id)
                    async with aclosing(watch.guard(batches)) as chunks:
                        async for chunk in chunks:
                            yield chunk
            except _RETRYABLE:
                await self._blame(prefill if watch.is_broken else decode, journal)
                raise
            finally:
                await watch.close(keep=journal.is_finished)

    async def _resume(self, journal: Journal) -> AsyncGenerator[TokenChunk]:
        """A decode worker computes prompt and journal by itself and goes on from there."""
        (decode,) = await self._select(journal, DECODE)
        journal.request.timeline.attributes["decode_worker"] = decode.info.worker_id
        self._predictions.resumed(journal, decode.info)
        self._metrics.local_prefills.labels("recovery").inc()
        with decode.assign():
            try:
                async with aclosing(self._decode(journal, decode, journal.new_call_id())) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except _RETRYABLE:
                await self._blame(decode, journal)
                raise

    async def _decode(
        self, journal: Journal, worker: Worker, call_id: str, transfer_id: str = ""
    ) -> AsyncGenerator[TokenChunk]:
        request, timeline = journal.request, journal.request.timeline
        message = worker_pb2.GenerateRequest(
            sequence=pack_sequence(
                call_id, request.prompt_token_ids, request.params, journal.token_ids, request.speculation_method
            ),
            transfer_id=transfer_id,
        )
        async with aclosing(worker.client.generate(message, journal.time_left_s)) as batches:
            async for batch in batches:
                if batch.events:
                    worker.client.record(timeline, unpack_events(batch.events))
                    timeline.record(Event.SECOND_TOKEN)
                worker.client.record_steps(timeline.decode_steps, batch, len(journal.token_ids))
                yield journal.take(batch)
        if not journal.is_finished:
            raise WorkerLostError(f"{worker.info.worker_id} ended its stream without finishing the request")

    async def _select(self, journal: Journal, *pools: str) -> list[Worker]:
        """A worker of each pool; waits a while for them, so that a restart is a pause and not an error.

        All are chosen at one moment, and the caller assigns the request before it waits for anything: a worker that
        starts to drain either has the request or does not get it.

        Raises:
            NoWorkerError: none came in time.
        """
        give_up_at = time.monotonic() + self._config.worker_wait_s
        while True:
            changed = self._registry.changed
            chosen = {pool: self._choose(pool, journal) for pool in pools}
            workers = [worker for worker in chosen.values() if worker is not None]
            if len(workers) == len(pools):
                return workers
            left = give_up_at - time.monotonic()
            if left <= 0:
                missing = " and no ".join(pool for pool, worker in chosen.items() if worker is None)
                raise NoWorkerError(
                    f"No {missing} worker took the request within {self._config.worker_wait_s:g} s. "
                    "See `baton status` for the state of the pools."
                )
            wait_s = min(left, journal.time_left_s, _MAX_WAIT_S)
            try:
                await asyncio.wait_for(changed.wait(), wait_s)
            except TimeoutError:
                continue

    def _choose(self, pool: str, journal: Journal) -> Worker | None:
        request = RoutingRequest(
            journal.request.request_id,
            len(journal.request.prompt_token_ids),
            frozenset(journal.failed_on),
            journal.request.slo,
        )
        snapshots = [worker.snapshot() for worker in self._registry.pool(pool)]
        chosen = self._profiles[pool].select(snapshots, request)
        worker = self._registry.get(chosen.worker_id) if chosen else None
        if worker is not None and worker.client.needs_sync:
            self._background.spawn(worker.sync_clock())
        return worker

    async def _blame(self, worker: Worker, journal: Journal) -> None:
        """The next attempt prefers others; if the worker does not even answer, so do all requests for a moment."""
        journal.failed_on.add(worker.info.worker_id)
        if not await worker.client.is_alive():
            worker.suspect()

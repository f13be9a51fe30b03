"""The router: takes a request through a prefill and a decode worker, and through their failures.

    generate ── place ── attempt ─┬─ nothing out yet:  prefill → first token → (KV travels) → decode
                                  │                    or a decode worker alone, where that is better
                                  └─ tokens out:       decode alone, recomputing what the client has seen

Tokens already sent are a journal: whatever dies, the next attempt continues behind it. Noise is keyed by (seed,
position), so that the continuation is the one that the client would have got.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from baton.core.errors import BatonError, DeadlineError, InternalError, OverloadedError, error_classes
from baton.core.logs import RequestLog
from baton.core.outcomes import CANCELLED, ENDED_BY, FINISHED, REJECTED
from baton.core.request import FinishReason
from baton.core.roles import DECODE, POOLS
from baton.core.slo import judge, target_attributes
from baton.core.timeline import Event, FailedAttempt
from baton.explain.timelines import TimelineStore
from baton.process.background import BackgroundTasks
from cluster.autoscaling.traffic import TrafficMeter
from cluster.config.config import RouterConfig
from cluster.dispatch.attempts import RETRYABLE, Attempts
from cluster.dispatch.entry import Entry
from cluster.registry.workers import WorkerRegistry
from cluster.requests.generation import GenerationRequest, ModelCard, TokenChunk
from cluster.requests.journal import Journal
from cluster.routing.record import add_outcome
from cluster.routing.request_predictions import RequestPredictions
from cluster.telemetry.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_OUR_FAULTS = frozenset(code for code, cls in error_classes().items() if cls.http_status >= 500)


class Router:
    """Implements :class:`cluster.requests.generation.Generator`.

    Args:
        entry: gives requests their places on workers.
        predictions: learn from every request that is over.
        clock: monotonic seconds; a simulation brings its own.
        traffic: counts what comes in, for the autoscaler.
    """

    def __init__(
        self,
        model: ModelCard,
        registry: WorkerRegistry,
        config: RouterConfig,
        metrics: RouterMetrics,
        timelines: TimelineStore,
        predictions: RequestPredictions,
        entry: Entry,
        clock: Callable[[], float] = time.monotonic,
        traffic: TrafficMeter | None = None,
    ) -> None:
        self._model = self._card = model
        self._card_until: asyncio.Event | None = None
        self._registry = registry
        self._config = config
        self._metrics = metrics
        self._timelines = timelines
        self._predictions = predictions
        self._entry = entry
        self._clock = clock
        self._traffic = traffic or TrafficMeter(clock)
        self._in_flight = 0
        self._runner = Attempts(metrics, BackgroundTasks(), self._entry.first_token, clock)
        self.num_finished = 0
        self.num_cancelled = 0
        self.num_rejected = 0
        self.num_failed = 0

    @property
    def model(self) -> ModelCard:
        """The model as all present workers can serve it: the smallest KV cache bounds the context."""
        changed = self._registry.changed
        if self._card_until is not changed:  # another event from the next change on
            lengths = [worker.info.max_model_len for worker in self._registry.workers]
            self._card = replace(
                self._model,
                max_model_len=min(lengths, default=self._model.max_model_len),
                draft_methods=frozenset(worker.info.draft_method for worker in self._registry.pool(DECODE)) - {""},
            )
            self._card_until = changed
        return self._card

    @property
    def num_in_flight(self) -> int:
        return self._in_flight

    def is_ready(self) -> bool:
        return all(self._registry.has_accepting(pool) for pool in POOLS)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        """See :class:`Generator`.

        Raises:
            OverloadedError: ``router.max_inflight`` sequences are in flight, or admission has no room.
            DeadlineError: ``router.request_timeout_s`` is over.
            BatonError: every attempt failed; the last one's error.
        """
        self._traffic.arrived(request.slo, len(request.prompt_token_ids))
        if self._in_flight >= self._config.max_inflight:
            self._metrics.requests.labels(REJECTED).inc()
            request.timeline.attributes.update(target_attributes(request.slo), outcome=REJECTED)
            self._judge(request, REJECTED, 0)
            self.num_rejected += 1
            raise OverloadedError(
                f"{self._in_flight} sequences are in flight, which is as many as router.max_inflight allows. "
                "Try again a little later.",
                retry_after_s=1.0,
            )
        journal = Journal(request, self._config.request_timeout_s, self._clock)
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
            request.timeline.attributes["error_message"] = error.message
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
        request.timeline.record(Event.ADMITTED)
        request.timeline.attributes.update(target_attributes(request.slo), prompt_tokens=len(request.prompt_token_ids))
        self._timelines.add(request.timeline)

    def _end(self, journal: Journal, outcome: str) -> None:
        self._in_flight -= 1
        self._metrics.in_flight.set(self._in_flight)
        timeline = journal.request.timeline
        timeline.record(Event.FINISHED)
        if outcome == CANCELLED:
            outcome = str(timeline.attributes.get(ENDED_BY, CANCELLED))
            if outcome == FinishReason.STOP:
                journal.finish_reason = FinishReason.STOP  # as good an end as any, for those who learn from ends too
        self._predictions.ended(journal)
        self._traffic.ended(journal, was_local="prefill_worker" not in timeline.attributes)
        self._entry.ended(journal)
        if outcome == OverloadedError.code and not journal.token_ids:
            outcome = REJECTED  # refused, which is no failure; with a part of the answer out it would be one
        timeline.attributes.update(
            output_tokens=len(journal.token_ids),
            cached_tokens=journal.num_cached_tokens,
            drafted_tokens=journal.num_drafted,
            accepted_tokens=journal.num_accepted,
            attempts=journal.attempt,
            outcome=outcome,
        )
        timeline.drafts = journal.drafts
        slo, num_tokens = journal.request.slo, len(journal.token_ids)
        add_outcome(timeline, num_tokens)
        self._metrics.observe_end(timeline, outcome, num_tokens, journal.num_cached_tokens, slo)
        self._judge(journal.request, outcome, num_tokens)
        self._metrics.drafted_tokens.inc(journal.num_drafted)
        self._metrics.accepted_tokens.inc(journal.num_accepted)
        if outcome in FINISHED:
            self.num_finished += 1
        elif outcome == CANCELLED:
            self.num_cancelled += 1
        elif outcome == REJECTED:
            self.num_rejected += 1
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
            try:
                with await self._entry.admit(journal) as placement:
                    if journal.attempt == 1:
                        self._metrics.observe_prompt(len(journal.request.prompt_token_ids))
                    else:
                        journal.request.timeline.resume(self._clock())
                    async with aclosing(self._runner.run(journal, placement)) as chunks:
                        async for chunk in chunks:
                            yield chunk
            except BatonError as error:
                if journal.is_finished:
                    return  # the client has everything
                if isinstance(error, DeadlineError):
                    raise journal.deadline_error() from error
                if journal.attempt >= self._config.max_attempts or not self._may_go_well(journal, error):
                    raise
                self._metrics.retries.labels(error.code).inc()
                journal.request.timeline.failed_attempts.append(FailedAttempt(self._clock(), error.code))
                RequestLog(logger, journal.request.request_id).warning(
                    "attempt %d failed (%s: %s); trying again", journal.attempt, error.code, error.message
                )

    def _may_go_well(self, journal: Journal, error: BatonError) -> bool:
        """Whether another attempt makes sense.

        A worker's own fault is tried once on another worker. A request that fails there too is at fault itself, and
        must not reach every worker.
        """
        if isinstance(error, RETRYABLE):
            return True
        if not isinstance(error, InternalError) or journal.num_internal_errors > 0 or not journal.accused:
            return False
        journal.num_internal_errors += 1
        return self._registry.has_untried(journal.accused[-1].info.pool, journal.failed_on)

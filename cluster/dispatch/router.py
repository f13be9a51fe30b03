"""The router runs each request on a prefill and a decode worker, and retries when workers fail.

    generate ── place ── attempt ─┬─ nothing out yet:  prefill → first token → (KV transfer) → decode
                                  │                    or a decode worker alone, where that is better
                                  └─ tokens out:       decode alone, recomputing what the client has seen

After a failure, the next attempt continues after the tokens already sent. Sampling noise is keyed by (seed,
position), so the continuation equals that of an undisturbed request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from baton.core.errors import BatonError, DeadlineError, InternalError, OverloadedError, error_classes
from baton.core.logs import RequestLog
from baton.core.outcomes import CANCELLED, ENDED_BY, FINISHED, REJECTED
from baton.core.request import FinishReason
from baton.core.roles import DECODE
from baton.core.timeline import Event
from baton.process.background import BackgroundTasks
from cluster.admission.admission import Admission
from cluster.config.router_config import RouterConfig
from cluster.dispatch.attempts import RETRYABLE, Attempts
from cluster.registry.workers import WorkerRegistry
from cluster.requests.generation import GenerationRequest, ModelCard, TokenChunk
from cluster.requests.request_observers import RequestObservers
from cluster.requests.request_record import RequestRecord, RequestState
from cluster.routing.dispatcher import Placement

logger = logging.getLogger(__name__)

_OUR_FAULTS = frozenset(code for code, cls in error_classes().items() if cls.http_status >= 500)


class Router:
    """Implements :class:`cluster.requests.generation.Generator`.

    Args:
        admission: assigns requests to workers.
        check: asks the worker with this id whether it is there, and judges it before it returns, soon.
        observers: notified of every event of every request.
        clock: monotonic seconds; a simulation passes virtual time.
    """

    def __init__(
        self,
        model: ModelCard,
        registry: WorkerRegistry,
        config: RouterConfig,
        admission: Admission[Placement],
        observers: RequestObservers,
        check: Callable[[str], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = self._card = model
        self._card_until: asyncio.Event | None = None
        self._registry = registry
        self._config = config
        self._admission = admission
        self._observers = observers
        self._clock = clock
        self._in_flight = 0
        self._runner = Attempts(observers, BackgroundTasks(), check, clock)
        self.num_finished = 0
        self.num_cancelled = 0
        self.num_rejected = 0
        self.num_failed = 0

    @property
    def model(self) -> ModelCard:
        """The model card under the limits of the present workers: the shortest ``max_model_len`` counts."""
        changed = self._registry.changed
        if self._card_until is not changed:  # the registry replaces the event at each change
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
        return self._admission.is_ready

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        """Streams the tokens of a sequence. Ends after ``router.max_attempts`` failures without a token in between.

        Raises:
            OverloadedError: ``router.max_inflight`` sequences are in flight, or admission has no room.
            DeadlineError: ``router.request_timeout_s`` has passed.
            BatonError: too many attempts failed; this is the error of the last one.
        """
        record = RequestRecord(request, self._config.request_timeout_s, self._clock)
        self._observers.arrived(record)
        if self._in_flight >= self._config.max_inflight:
            self._count_end(record, REJECTED)
            raise OverloadedError(
                f"{self._in_flight} sequences are in flight, which is the limit of router.max_inflight. "
                "Try again later.",
                retry_after_s=1.0,
            )
        self._accept(record)
        outcome = CANCELLED
        try:
            async with aclosing(self._attempts(record)) as chunks:
                async for chunk in chunks:
                    self._note_tokens(record, chunk)
                    if chunk.finish_reason is not None:
                        outcome = str(chunk.finish_reason)
                        record.timeline.record(Event.FINISHED)
                    yield chunk
        except BatonError as error:
            outcome = error.code
            record.timeline.attributes["error_message"] = error.message
            raise
        except Exception as error:
            outcome = InternalError.code
            RequestLog(logger, request.request_id).exception("a request failed unexpectedly")
            raise InternalError(f"The router failed ({type(error).__name__}); see its log.") from error
        finally:
            self._end(record, outcome)

    def _accept(self, record: RequestRecord) -> None:
        self._in_flight += 1
        record.was_accepted = True
        record.change_state(RequestState.QUEUED)
        record.timeline.record(Event.ADMITTED)
        self._observers.accepted(record)

    def _note_tokens(self, record: RequestRecord, chunk: TokenChunk) -> None:
        is_first = record.last_tokens_s is None
        record.note_tokens(self._clock())
        if record.state is RequestState.PLACED:
            record.change_state(RequestState.STREAMING)
        if is_first:
            self._observers.first_token(record)
        self._observers.tokens(record, len(chunk.token_ids))

    def _end(self, record: RequestRecord, outcome: str) -> None:
        self._in_flight -= 1
        timeline = record.timeline
        timeline.record(Event.FINISHED)
        if outcome == CANCELLED:
            outcome = str(timeline.attributes.get(ENDED_BY, CANCELLED))
            if outcome == FinishReason.STOP:
                record.finish_reason = FinishReason.STOP  # a stop string is a regular end for observers
        if outcome == OverloadedError.code and not record.token_ids:
            outcome = REJECTED  # not a failure, since the client has received nothing
        self._count_end(record, outcome)
        level = logging.WARNING if outcome in _OUR_FAULTS else logging.INFO
        fields = {**timeline.attributes, "ttft_ms": timeline.ttft_ms, "duration_ms": timeline.total_ms}
        RequestLog(logger, record.request.request_id).log(level, "a request ended", extra=fields)

    def _count_end(self, record: RequestRecord, outcome: str) -> None:
        record.outcome = outcome
        record.change_state(RequestState.ENDED)
        self._observers.ended(record)
        if outcome in FINISHED:
            self.num_finished += 1
        elif outcome == CANCELLED:
            self.num_cancelled += 1
        elif outcome == REJECTED:
            self.num_rejected += 1
        else:
            self.num_failed += 1

    async def _attempts(self, record: RequestRecord) -> AsyncGenerator[TokenChunk]:
        num_failures = 0  # since the last token
        while not record.is_finished:
            record.attempt += 1
            num_known = len(record.token_ids)
            try:
                with await self._admission.admit(record) as placement:
                    record.change_state(RequestState.PLACED)
                    self._observers.placed(record)
                    async with aclosing(self._runner.run(record, placement)) as chunks:
                        async for chunk in chunks:
                            yield chunk
            except BatonError as error:
                if record.is_finished:
                    return  # the client has all tokens
                if isinstance(error, DeadlineError):
                    raise record.deadline_error() from error
                # A request that goes on where other workers were lost is not the cause of that.
                num_failures = num_failures + 1 if len(record.token_ids) == num_known else 1
                if num_failures >= self._config.max_attempts or not self._may_go_well(record, error):
                    raise
                if record.state is not RequestState.QUEUED:  # it is, if it failed while waiting for workers
                    record.change_state(RequestState.QUEUED)
                self._observers.attempt_failed(record, error)
                RequestLog(logger, record.request.request_id).warning(
                    "attempt %d failed (%s: %s); trying again", record.attempt, error.code, error.message
                )

    def _may_go_well(self, record: RequestRecord, error: BatonError) -> bool:
        """Whether another attempt may succeed.

        After an internal error, the request is tried once on another worker. A second internal error is blamed on the
        request, which is then not sent to further workers.
        """
        if isinstance(error, RETRYABLE):
            return True
        if not isinstance(error, InternalError) or record.num_internal_errors > 0 or not record.accused:
            return False
        record.num_internal_errors += 1
        return self._registry.has_untried(record.accused[-1].info.pool, record.failed_on)

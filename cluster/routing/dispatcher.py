"""Chooses the workers of a request and books it on them.

Both steps are synchronous, so no worker changes its state between forecast and booking: a worker that starts to drain
either has the request already or does not get it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from baton.core.errors import NoWorkerError
from baton.core.roles import DECODE, PREFILL
from cluster.registry.workers import Worker, WorkerRegistry
from cluster.requests.request_observers import RequestObserver
from cluster.requests.request_record import Booking, RequestRecord
from cluster.routing.request_predictions import RequestPredictions
from cluster.routing.routing_contracts import Preference, RouteChooser, RouteDecision, RoutingRequest, WorkerSnapshot
from cluster.routing.scorers import SCORERS

PAIR = "pair"
LOCAL = "local"
_DECISION_SECONDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)


class RoutingMetrics:
    """Metrics of routing decisions.

    Attributes:
        decisions: seconds to take snapshots of all workers and to choose a route.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        scorers = Summary(
            "baton_routing_scorer_seconds",
            "Time of a scorer for all candidates of a request.",
            ["scorer"],
            registry=registry,
        )
        self._scorers = {name: scorers.labels(name) for name in SCORERS}
        self.decisions = Histogram(
            "baton_routing_decision_seconds",
            "Time to choose a route; a request that waits in the router may be evaluated several times.",
            buckets=_DECISION_SECONDS,
            registry=registry,
        )
        self._routes = Counter(
            "baton_routes", "Chosen routes, by kind: a pair of workers, or local prefill.", ["kind"], registry=registry
        )
        for kind in (PAIR, LOCAL):
            self._routes.labels(kind)

    def observe_scorer(self, name: str, seconds: float) -> None:
        """Counts the time of a scorer."""
        self._scorers[name].observe(seconds)

    def observe_route(self, *, local: bool) -> None:
        """Counts a booked route."""
        self._routes.labels(LOCAL if local else PAIR).inc()


_EXPECTED_FOR_S = 5.0
"""How long after its predicted first token a prompt is still expected in the cache."""


class PrefixIndex(Protocol):
    """The part of :class:`cluster.prefix_index.prefix_index.PrefixIndex` that the dispatcher needs."""

    def cached_tokens(self, worker_ids: Iterable[str], prompt: Sequence[int], salt: str) -> Mapping[str, int]:
        """Leading tokens of the prompt that each worker holds for requests with this salt."""
        ...

    def expect(self, worker_id: str, prompt: Sequence[int], until_s: float, salt: str) -> None:
        """Announces a prompt that is sent to a worker."""
        ...

    def forget_prompt(self, prompt: Sequence[int], salt: str) -> None:
        """Drops what is kept of a prompt for further decisions about it."""
        ...


class Placement:
    """A request's booking on its workers. Leaving its context or calling :meth:`release` ends it."""

    def __init__(
        self,
        prefill: Worker | None,
        decode: Worker,
        booking: Booking,
        predictions: RequestPredictions,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self._booking = booking
        self._predictions = predictions
        self._holds_prefill = prefill is not None
        self._is_released = False
        self._holds_decode = booking.decodes
        if prefill is not None:
            prefill.begin()
        if self._holds_decode:
            decode.begin()

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    def keep_prefill(self) -> Callable[[], None]:
        """Keeps the prefill worker booked beyond :meth:`release`, until the returned function is called once."""
        if self.prefill is None or not self._holds_prefill:
            raise RuntimeError("there is no prefill worker to keep, or it is already kept")
        self._holds_prefill = False
        return self.prefill.end

    def release(self) -> None:
        """Ends the booking. Idempotent."""
        if self._is_released:
            return
        self._is_released = True
        self._predictions.end(self._booking)
        if self._holds_decode:
            self.decode.end()
        if self.prefill is not None and self._holds_prefill:
            self.prefill.end()

    def __enter__(self) -> Placement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Dispatcher(RequestObserver):
    """Forecasts and books routes over the registered workers. As an observer, it drops what it keeps of a request.

    Args:
        prefix_index: ``None`` means that prefill workers are assumed to hold the usual part of a prompt, and decode
            workers nothing.
        metrics: ``None`` disables metrics.
        prefill_ordering: order of prompts on prefill workers, ``edf`` or ``fcfs``. Decode workers use ``edf``.
        clock: monotonic seconds; a simulation passes virtual time.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        predictions: RequestPredictions,
        chooser: RouteChooser,
        prefix_index: PrefixIndex | None = None,
        clock: Callable[[], float] = time.monotonic,
        metrics: RoutingMetrics | None = None,
        prefill_ordering: Literal["edf", "fcfs"] = "edf",
    ) -> None:
        self._registry = registry
        self._predictions = predictions
        self._chooser = chooser
        self._prefix_index = prefix_index
        self._clock = clock
        self._metrics = metrics
        self._prefill_ordering = prefill_ordering

    def forecast(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision | None:
        """The best route at present, without booking it; ``None`` if a pool has no worker for the request."""
        began_s = time.perf_counter()
        now_s = self._clock()
        request = _routing_request(record, now_s, self._predictions.habits.output_tokens.value)
        prefill, decode = self._registry.pool(PREFILL), self._registry.pool(DECODE)
        cached = self._cached_tokens([*prefill, *decode], record)
        decision = self._chooser.choose(
            [self._snapshot(worker, request, cached, now_s) for worker in prefill],
            [self._snapshot(worker, request, cached, now_s) for worker in decode],
            request,
            preferred,
        )
        if self._metrics is not None:
            self._metrics.decisions.observe(time.perf_counter() - began_s)
        return decision

    def book(self, record: RequestRecord, decision: RouteDecision) -> Placement:
        """Books the request on its route until the placement is released.

        Raises:
            NoWorkerError: a worker of the route has left since the forecast.
        """
        prefill = self._find(decision.prefill_id) if decision.prefill_id is not None else None
        decode = self._find(decision.decode_id)
        booking = self._predictions.begin(record, decision)
        if not record.token_ids:
            record.timeline.routing = decision.record
        if self._prefix_index is not None:
            until_s = record.received_s + decision.ttft_ms / 1e3 + _EXPECTED_FOR_S
            request = record.request
            self._prefix_index.expect(booking.computing_id, request.prompt_token_ids, until_s, request.cache_salt)
        if self._metrics is not None:
            self._metrics.observe_route(local=prefill is None)
        return Placement(prefill, decode, booking, self._predictions)

    def ended(self, record: RequestRecord) -> None:
        if self._prefix_index is not None:
            self._prefix_index.forget_prompt(record.request.prompt_token_ids, record.request.cache_salt)

    def workers_changed(self) -> asyncio.Event:
        """An event that is set at the next change of the workers."""
        return self._registry.changed

    def missing_pools(self) -> list[str]:
        """Pools without a worker that takes requests."""
        return [pool for pool in (PREFILL, DECODE) if not self._registry.has_accepting(pool)]

    def _find(self, worker_id: str) -> Worker:
        worker = self._registry.get(worker_id)
        if worker is None:
            raise NoWorkerError(f"The worker {worker_id} has left the cluster. Try again.")
        return worker

    def _cached_tokens(self, workers: Sequence[Worker], record: RequestRecord) -> Mapping[str, int]:
        prompt = record.request.prompt_token_ids
        if record.request.params.prompt_logprobs is not None and not record.token_ids:
            return {}  # they are computed without a cached prefix
        if self._prefix_index is not None:
            names = [worker.info.worker_id for worker in workers]
            return self._prefix_index.cached_tokens(names, prompt, record.request.cache_salt)
        usual = int(min(self._predictions.habits.cached_tokens.value, len(prompt) - 1))
        return {worker.info.worker_id: usual for worker in workers if worker.info.pool == PREFILL}

    def _snapshot(
        self, worker: Worker, request: RoutingRequest, cached: Mapping[str, int], now_s: float
    ) -> WorkerSnapshot:
        info, ledger = worker.info, self._predictions.ledger
        worker_id = info.worker_id
        by_priority = info.pool != PREFILL or self._prefill_ordering == "edf"
        queue = ledger.queue(worker_id, now_s, request.queue_priority if by_priority else None, info.chunk_tokens)
        return WorkerSnapshot(
            worker_id=worker_id,
            pool=info.pool,
            accepting=worker.is_accepting,
            in_flight=worker.in_flight,
            assigned=worker.assigned,
            queue=queue,
            batch=queue.decoding,
            context_tokens=queue.context_tokens,
            final_tokens=ledger.final_tokens(worker_id),
            cached_tokens=cached.get(worker_id, 0),
            kv_tokens=info.kv_blocks * info.block_size,
            max_num_seqs=info.max_num_seqs,
            chunk_tokens=info.chunk_tokens,
            kv_bytes_per_token=info.kv_bytes_per_token,
            device=info.device,
            node=info.node,
            backlog_tokens=ledger.backlog_tokens(worker_id),
            tpot_target_s=ledger.tpot_target_s(worker_id),
            last_assigned_s=worker.last_assigned_s,
            layout=info.kv_fingerprint,
        )


def _routing_request(record: RequestRecord, now_s: float, usual_output_tokens: float) -> RoutingRequest:
    request, num_generated = record.request, len(record.token_ids)
    max_tokens = max(1, request.params.max_tokens - num_generated)
    return RoutingRequest(
        request_id=request.request_id,
        num_prompt_tokens=len(request.prompt_token_ids) + num_generated,
        failed_on=frozenset(record.failed_on),
        slo=request.slo,
        max_tokens=max_tokens,
        elapsed_ms=(now_s - record.received_s) * 1e3,
        queue_priority=record.queue_priority,
        is_resumed=num_generated > 0,
        layout=record.layout,
        output_tokens=max(1.0, min(usual_output_tokens, max_tokens)),
    )

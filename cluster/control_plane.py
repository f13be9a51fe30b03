"""Assembles the decision-making parts of a router, for live clusters and for simulations in virtual time.

    router ── admission ── dispatcher ── routing ── predictions ◀── samples of workers
      │                        └─────── prefix index ◀───────────── events of their caches
      └── traffic ── autoscaler ── owner of the pools

Live and simulated clusters differ only in who starts the workers and what feeds the router.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from baton.core.roles import PREFILL
from baton.explain.timelines import TimelineStore
from cluster.admission.admission import Admission
from cluster.admission.admission_metrics import AdmissionMetrics
from cluster.admission.batching_delay import BatchingDelay
from cluster.autoscaling.autoscaler_loop import AutoscalerLoop, Offload, OtherTraffic, PoolControl, no_other_traffic
from cluster.autoscaling.traffic import TrafficMeter
from cluster.config.config import BatonConfig
from cluster.config.slo_config import SloConfig
from cluster.dispatch.router import Router
from cluster.latency.feed import StepCostFeed
from cluster.latency.latency_model import LatencyModel
from cluster.latency.other_bookings import OtherBookings, booking_streams
from cluster.latency.store import FitStore
from cluster.prefix_index.prefix_feed import PrefixFeed
from cluster.prefix_index.prefix_index import PrefixIndex
from cluster.registry.progress_watch import ProgressWatch
from cluster.registry.workers import WorkerRegistry
from cluster.requests.generation import ModelCard
from cluster.requests.request_observers import RequestObserver, RequestObservers
from cluster.routing.dispatcher import Dispatcher, Placement
from cluster.routing.request_predictions import RequestPredictions
from cluster.routing.routing_profile import build_profile
from cluster.telemetry.metrics import RouterMetrics
from cluster.telemetry.request_timelines import RequestTimelines
from cluster.telemetry.traffic_recorder import TrafficRecorder


class ControlPlane:
    """The router's decision-making parts, connected to each other.

    Args:
        registry: the workers, on the same clock.
        pools: sets the sizes of the pools.
        hash_key: key of the workers' block hashes.
        store: keeps latency fits across restarts; ``None`` disables that.
        clock: monotonic seconds; a simulation passes virtual time.
        offload: as in :class:`AutoscalerLoop`.
        router_id: unique among several routers; empty for a single one.
        other_traffic: as in :class:`AutoscalerLoop`.

    Attributes:
        step_costs, prefixes: follow workers. Their ``add`` and ``remove`` must be called when workers come and go.
        others: the same for the bookings of other routers; ``None`` for a single router.
        recorder: keeps the shape of the traffic; ``None`` if that is off.
        watch: the same for workers that are real or have a process of their own, since others cannot hang.
    """

    def __init__(
        self,
        config: BatonConfig,
        registry: WorkerRegistry,
        pools: PoolControl,
        *,
        hash_key: bytes = b"",
        store: FitStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        offload: Offload = asyncio.to_thread,
        router_id: str = "",
        other_traffic: OtherTraffic = no_other_traffic,
    ) -> None:
        self._config = config
        self._clock = clock
        self.registry = registry
        self.slo_classes = config.slo.to_classes()
        self.metrics = RouterMetrics(self.slo_classes.all, clock)
        capacity = config.telemetry.recorded_requests
        self.recorder = TrafficRecorder(capacity, hash_key, clock) if capacity else None
        model = LatencyModel(clock)
        self.predictions = RequestPredictions(model, self.metrics.prediction_errors, clock, router_id)
        self.step_costs = StepCostFeed(registry, model, store)
        index = PrefixIndex(config.engine.block_size, clock, hash_key)
        self.watch = ProgressWatch(config.liveness, registry.judged, clock)
        self.prefixes = PrefixFeed(index, self.metrics.prefixes)
        chooser = build_profile(config.routing, self.predictions.forecaster, self.metrics.routing.observe_scorer)
        known = index if config.engine.prefix_caching else None
        self._dispatcher = Dispatcher(
            registry, self.predictions, chooser, known, clock, self.metrics.routing, config.prefill.ordering
        )
        bookings = OtherBookings(self.predictions.ledger, lambda: self.admission.poke(), clock)
        self.admission = create_admission(
            config, self._dispatcher, registry, model, self.metrics.admission, clock, lambda: bookings.has_any
        )
        self.others = booking_streams(router_id, bookings) if router_id else None
        self._traffic = TrafficMeter(clock)
        self.autoscaler = AutoscalerLoop(
            pools,
            registry,
            model,
            self.predictions.ledger,
            self._traffic,
            config.autoscaler.to_limits(is_local=config.ray.is_local),
            self.metrics.autoscaler,
            num_waiting=lambda: self.admission.num_queued,
            is_enabled=config.autoscaler.enabled,
            clock=clock,
            offload=offload,
            other_traffic=other_traffic,
        )

    def change_slo_classes(self, config: SloConfig) -> None:
        """Uses other SLO classes for requests to come. Those in progress keep theirs."""
        self.slo_classes.become(config.to_classes())
        for holder in (self.metrics.slo, self.metrics.admission, self.admission):
            holder.set_classes(self.slo_classes.all)

    def create_router(self, model: ModelCard, timelines: TimelineStore, more: Sequence[RequestObserver] = ()) -> Router:
        """Creates the router. Must be called once. ``more`` observers are called last."""
        observers = request_observers(
            self.metrics,
            timelines,
            self.predictions,
            self.admission,
            self._traffic,
            self._clock,
            more=[self._dispatcher, *([self.recorder] if self.recorder else []), *more],
        )
        return Router(
            model,
            self.registry,
            self._config.router,
            self.admission,
            observers,
            self.watch.check,
            self._clock,
        )


def request_observers(
    metrics: RouterMetrics,
    timelines: TimelineStore,
    predictions: RequestPredictions,
    admission: Admission[Placement],
    traffic: TrafficMeter,
    clock: Callable[[], float] = time.monotonic,
    more: Sequence[RequestObserver] = (),
) -> RequestObservers:
    """All observers of requests, in the order in which events are reported; ``more`` comes last."""
    recorder = RequestTimelines(timelines, clock)
    return RequestObservers([recorder, predictions, traffic, admission, metrics, metrics.slo, *more])


def create_admission(
    config: BatonConfig,
    dispatcher: Dispatcher,
    registry: WorkerRegistry,
    model: LatencyModel,
    metrics: AdmissionMetrics,
    clock: Callable[[], float] = time.monotonic,
    others_work: Callable[[], bool] = lambda: False,
) -> Admission[Placement]:
    """Builds the configured admission control.

    Args:
        dispatcher: chooses among the workers of ``registry``.
        model: predicts the latency of these workers.
        clock: monotonic seconds; a simulation passes virtual time.
        others_work: as in :class:`Admission`.
    """

    def prefill_chunk_tokens() -> dict[str, int]:
        workers = (worker.info for worker in registry.pool(PREFILL) if worker.is_accepting)
        return {info.worker_id: info.chunk_tokens for info in workers}

    return Admission(
        dispatcher,
        config.admission,
        metrics,
        config.slo.to_classes().all,
        worker_wait_s=config.router.worker_wait_s,
        batching_delay=BatchingDelay(model, prefill_chunk_tokens, config.admission),
        others_work=others_work,
        clock=clock,
        waking_pools=config.autoscaler.waking_pools,
    )

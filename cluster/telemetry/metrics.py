"""Prometheus metrics of the whole cluster, served by the router. Names begin with ``baton_``; units are base units.

Every label value is known beforehand or is the id of a present worker, never text from a client. Series with known
labels begin at zero, so that their first increase is visible.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.errors import BatonError, RequestCancelledError, error_classes
from baton.core.histogram_buckets import FAST_SECONDS, SECONDS, TOKENS
from baton.core.outcomes import CANCELLED, FINISHED, REJECTED
from baton.core.slo import BUILTIN_CLASSES, SloClass
from baton.core.timeline import Event
from baton.core.version import package_version
from baton.rpc.wire import worker_pb2
from cluster.admission.admission_metrics import AdmissionMetrics
from cluster.autoscaling.autoscaling_metrics import AutoscalerMetrics
from cluster.latency.calibration import PredictionErrors
from cluster.prefix_index.prefix_metrics import PrefixMetrics
from cluster.requests.request_observers import RequestObserver
from cluster.requests.request_record import RequestRecord
from cluster.routing.dispatcher import RoutingMetrics
from cluster.telemetry.cluster_metrics import ClusterCollector, ClusterFigures
from cluster.telemetry.slo_metrics import SloMetrics

GENERATION_ENDPOINTS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
UNKNOWN_ENDPOINT = "other"


class HttpMetrics:
    """Metrics of HTTP requests. :class:`RouterMetrics` counts sequences."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "baton_http_requests",
            "Finished HTTP requests, by route and status; 499 means that the client disconnected.",
            ["endpoint", "status"],
            registry=registry,
        )
        self._rejections = Counter(
            "baton_rejections",
            "Generation requests that were answered with an error, by error code.",
            ["reason"],
            registry=registry,
        )
        for code in error_classes():
            if code != RequestCancelledError.code:
                self._rejections.labels(code)

    def observe(self, endpoint: str, status: int, error_code: str | None) -> None:
        """Counts a finished request.

        Args:
            endpoint: the route's path template, or ``UNKNOWN_ENDPOINT``; never the path from the client.
            error_code: code of the error in the response's body; ``None`` means no error.
        """
        self._requests.labels(endpoint, str(status)).inc()
        if error_code is not None and error_code != RequestCancelledError.code and endpoint in GENERATION_ENDPOINTS:
            self._rejections.labels(error_code).inc()

    def observe_refusal(self, status: int) -> None:
        """Counts an answer to data that is not valid HTTP."""
        self.observe(UNKNOWN_ENDPOINT, status, None)


CHOSEN = "chosen"
RECOVERY = "recovery"
LOCAL_PREFILL_REASONS = (CHOSEN, RECOVERY)
"""Routing preferred local prefill, or a worker was lost and a decode worker continues alone."""


class RouterMetrics(RequestObserver):
    """All metrics, in a registry of their own. As an observer, it counts requests.

    Args:
        slo_classes: the SLO classes of the configuration.
        clock: monotonic seconds, for timelines and sliding windows.

    Attributes:
        http: metrics of the gateway.
        cluster: the last polled figures of workers and pools, which are in no registry.
        slo: metrics by SLO class.
        prediction_errors: errors of the latency model.
        prefixes: metrics of the prefix index.
        routing: metrics of routing decisions.
        admission: metrics of admission control.
        autoscaler: metrics of the autoscaler.
    """

    def __init__(
        self, slo_classes: Iterable[SloClass] = BUILTIN_CLASSES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        classes = tuple(slo_classes)
        self.registry = CollectorRegistry()
        self.http = HttpMetrics(self.registry)
        self.cluster = ClusterCollector()
        ProcessCollector("baton_router", registry=self.registry)
        self._add_build_info()
        codes = tuple(error_classes())
        self.requests = self._labelled(
            "baton_requests",
            "Finished sequences, by outcome: a finish reason, cancelled by the client, rejected, or an error code.",
            "outcome",
            (*FINISHED, CANCELLED, REJECTED, *codes),
        )
        self.in_flight = Gauge("baton_requests_in_flight", "Sequences in flight.", registry=self.registry)
        self.retries = self._labelled(
            "baton_retries", "Failed attempts that were repeated on other workers, by error code.", "reason", codes
        )
        self.local_prefills = self._labelled(
            "baton_local_prefills",
            "Prompts that a decode worker computed itself, by reason.",
            "reason",
            LOCAL_PREFILL_REASONS,
        )
        self._add_token_metrics()
        self._add_transfer_metrics()
        self.slo = SloMetrics(self.registry, classes, clock)
        self._add_latency_metrics()
        self.prediction_errors = PredictionErrors()
        self.registry.register(self.prediction_errors)
        self.prefixes = PrefixMetrics(self.registry)
        self.routing = RoutingMetrics(self.registry)
        self.admission = AdmissionMetrics(self.registry, classes)
        self.autoscaler = AutoscalerMetrics(self.registry)

    def _add_build_info(self) -> None:
        info = Gauge(
            "baton_build_info",
            "Versions of baton and Python; the value is 1.",
            ["version", "python"],
            registry=self.registry,
        )
        info.labels(package_version(), platform.python_version()).set(1)

    def _add_token_metrics(self) -> None:
        counter, histogram = self._counter, self._histogram
        self.prompt_tokens = counter("baton_prompt_tokens", "Prompt tokens of admitted sequences.")
        self.cached_tokens = counter("baton_cached_prompt_tokens", "Prompt tokens found in a prefix cache.")
        self.drafted_tokens = counter("baton_drafted_tokens", "Draft tokens that were verified.")
        self.accepted_tokens = counter("baton_accepted_tokens", "Draft tokens that the model accepted.")
        self.output_tokens = counter("baton_output_tokens", "Tokens sent to clients.")
        self._prompt_size = histogram("baton_request_prompt_tokens", "Prompt tokens per sequence.", TOKENS)
        self._output_size = histogram("baton_request_output_tokens", "Tokens sent to the client per sequence.", TOKENS)

    def _add_transfer_metrics(self) -> None:
        counter = self._counter
        self.transfers = self._labelled("baton_kv_transfers", "KV hand-offs, by outcome.", "outcome", ("ok", "failed"))
        self.transfer_bytes = counter("baton_kv_transfer_bytes", "KV bytes sent from prefill to decode workers.")
        self.transfer_shared_bytes = counter(
            "baton_kv_transfer_shared_bytes", "KV bytes that the receiver read directly from the sender's memory."
        )
        self.transfer_spared_bytes = counter(
            "baton_kv_transfer_spared_bytes", "KV bytes saved by kv_transfer.encoding."
        )
        self.transfer_tokens = counter("baton_kv_transfer_tokens", "Prompt tokens whose KV was sent.")
        self.transfer_saved_tokens = counter(
            "baton_kv_transfer_saved_tokens", "Prompt tokens whose KV the decode worker already held."
        )
        self.transfer_seconds = self._histogram(
            "baton_kv_transfer_seconds", "Time of a KV transfer, from the reservation to the acknowledgement.", SECONDS
        )

    def _add_latency_metrics(self) -> None:
        histogram = self._histogram
        self._itl = histogram(
            "baton_inter_token_latency_seconds",
            "Time between two deliveries of a sequence's tokens; with speculation, one may contain several.",
            FAST_SECONDS,
        )
        self._queue = histogram("baton_queue_seconds", "Time in the prefill worker's queue.", SECONDS)
        self._prefill = histogram("baton_prefill_seconds", "Time to compute the prompt.", SECONDS)
        self._decode_queue = histogram("baton_decode_queue_seconds", "Time in the decode worker's queue.", SECONDS)
        self._decode = histogram(
            "baton_decode_seconds", "Time from the first token to the end of the sequence.", SECONDS
        )
        self._duration = histogram("baton_request_seconds", "Time from receipt to the end of the sequence.", SECONDS)

    def accepted(self, record: RequestRecord) -> None:
        self.in_flight.inc()

    def placed(self, record: RequestRecord) -> None:
        if record.attempt == 1:
            num_prompt_tokens = len(record.request.prompt_token_ids)
            self.prompt_tokens.inc(num_prompt_tokens)
            self._prompt_size.observe(num_prompt_tokens)
        if record.booking is not None and not record.booking.prefill_id:
            self.local_prefills.labels(RECOVERY if record.token_ids else CHOSEN).inc()

    def tokens(self, record: RequestRecord, num_tokens: int) -> None:
        """Observes the time to the first token, and the gaps between later deliveries."""
        arrived_s, before_s = record.last_tokens_s, record.previous_tokens_s
        if arrived_s is None:
            return
        if before_s is not None:
            self._itl.observe(arrived_s - before_s)
        elif (received_s := record.timeline.events.get(Event.RECEIVED)) is not None:
            self.slo.ttft(record.request.slo).observe(arrived_s - received_s)

    def attempt_failed(self, record: RequestRecord, error: BatonError) -> None:
        self.retries.labels(error.code).inc()

    def ended(self, record: RequestRecord) -> None:
        """Counts the end of a sequence. Only finished sequences count towards the durations."""
        timeline, outcome, num_output_tokens = record.timeline, str(record.outcome), len(record.token_ids)
        if record.was_accepted:
            self.in_flight.dec()
        self.requests.labels(outcome).inc()
        self.cached_tokens.inc(record.num_cached_tokens)
        self.output_tokens.inc(num_output_tokens)
        self.drafted_tokens.inc(record.num_drafted)
        self.accepted_tokens.inc(record.num_accepted)
        if outcome not in FINISHED:
            return
        self._output_size.observe(num_output_tokens)
        for metric, value_ms in (
            (self.slo.tpot(record.request.slo), timeline.tpot_ms(num_output_tokens)),
            (self._queue, timeline.queue_ms),
            (self._prefill, timeline.prefill_ms),
            (self._decode_queue, timeline.between_ms(Event.DECODE_QUEUED, Event.DECODE_STARTED)),
            (self._decode, timeline.between_ms(Event.FIRST_TOKEN, Event.FINISHED)),
            (self._duration, timeline.total_ms),
        ):
            if value_ms is not None:
                metric.observe(value_ms / 1e3)

    def handed_off(self, record: RequestRecord, result: worker_pb2.HandoffResult) -> None:
        self.transfers.labels("failed" if result.error_code else "ok").inc()
        self.transfer_bytes.inc(result.num_bytes)
        self.transfer_shared_bytes.inc(result.num_shared_bytes)
        self.transfer_spared_bytes.inc(result.num_spared_bytes)
        if not result.error_code:
            self.transfer_tokens.inc(result.num_tokens)
            self.transfer_saved_tokens.inc(result.num_cached_tokens)
            self.transfer_seconds.observe(result.seconds)

    def own_families(self) -> list[Metric]:
        """The metrics of this router, without those of workers and pools."""
        return list(_WithoutCreated(self.registry).collect())

    def render(self, index: int = 0, others: Mapping[int, Iterable[Metric]] | None = None) -> bytes:
        """Renders Prometheus' text format, which takes milliseconds with many workers. Thread-safe.

        Args:
            index: of this router.
            others: :meth:`own_families` of the other routers by index. If there are any, the metrics of routers have
                the label ``router``.
        """
        own = self.own_families()
        families = _of_several_routers({index: own, **others}) if others else own
        return generate_latest(_Families([*families, *self.cluster.collect()]))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _labelled(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        counter = Counter(name, text, [label], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)


class _WithoutCreated(Collector):
    """Omits the ``_created`` samples, which double the counters and which Prometheus does not need."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class _Families(Collector):
    """Metrics that have been collected already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _of_several_routers(routers: Mapping[int, Iterable[Metric]]) -> Iterable[Metric]:
    """The metrics of all routers, by index, with the label ``router``."""
    merged: dict[str, Metric] = {}
    for index, families in sorted(routers.items()):
        label = {"router": str(index)}
        for family in families:
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]
    return merged.values()


async def no_other_routers() -> Mapping[int, Iterable[Metric]]:
    """The metrics of the other routers where there is one router."""
    return {}


class MetricsPage:
    """Renders the metrics page. Concurrent scrapes share one page, which bounds the load on workers and router.

    Args:
        poll_cluster: polls workers and controller for their figures.
        poll_routers: polls the other routers for their metrics.
        index: of this router.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
        poll_cluster: Callable[[], Awaitable[ClusterFigures]],
        poll_routers: Callable[[], Awaitable[Mapping[int, Iterable[Metric]]]] = no_other_routers,
        index: int = 0,
    ) -> None:
        self._metrics = metrics
        self._poll_cluster = poll_cluster
        self._poll_routers = poll_routers
        self._index = index
        self._task: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        """The page in Prometheus' text format."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._make())
        return await asyncio.shield(self._task)  # other scrapes may wait for it if this one is cancelled

    async def _make(self) -> bytes:
        self._metrics.cluster.figures, others = await asyncio.gather(self._poll_cluster(), self._poll_routers())
        # In a thread, because it takes milliseconds with many workers and would delay tokens.
        return await asyncio.to_thread(self._metrics.render, self._index, others)

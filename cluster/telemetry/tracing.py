"""Finished requests as OpenTelemetry traces, sent to an OTLP endpoint in the background.

There is one span per HTTP request, with the stages of ``critical_path`` and the KV hand-off below it. Several sequences
each have a span in between, up to a bound. Attributes follow OpenTelemetry's conventions for generative AI. Traces
contain no prompts and no answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from baton.core.errors import ConfigError
from baton.core.timeline import Event, Timeline
from baton.core.version import package_version
from baton.explain.critical_path import critical_path, stage_times
from cluster.requests.generation import FinishedRequest, GenerationRequest
from cluster.telemetry.telemetry_config import TelemetryConfig

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

_EXPORT_LOGGERS = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
_QUIET_S = 300.0
"""Shortest time between two log lines of an exporter about an unreachable collector."""
_SETTLE_S = 1.0
"""Delay of an export, since a hand-off may be reported after the answer."""
_SHUTDOWN_S = 2.0
_MAX_SEQUENCES = 16
"""Sequences of a request that have spans, as many as have timelines: each takes a millisecond of the event loop."""
_TRACES_PATH = "/v1/traces"
_STREAMED = "gen_ai.request.stream"


class RequestTracer(Protocol):
    """Receives finished requests. Submitting never raises and never waits."""

    def submit(self, request: FinishedRequest) -> None: ...

    async def stop(self) -> None:
        """Sends the remaining spans, within a short time limit."""
        ...


class NoTracer:
    """Discards requests, for clusters without a trace collector."""

    def submit(self, request: FinishedRequest) -> None:
        return

    async def stop(self) -> None:
        return


def create_tracer(config: TelemetryConfig) -> RequestTracer:
    """Creates the configured tracer. Raises :class:`ConfigError` if it needs OpenTelemetry and that is missing."""
    if config.otlp_endpoint is None:
        return NoTracer()
    try:
        return OtlpTracer(_create_provider(config, config.otlp_endpoint))
    except ImportError as error:
        raise ConfigError(
            f"telemetry.otlp_endpoint is set, but OpenTelemetry is not installed ({error.name} is missing). Install "
            "baton with its extra otel, as in `pip install 'baton-serve[otel]'`, or set it to null."
        ) from error


def _create_provider(config: TelemetryConfig, endpoint: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    for name in _EXPORT_LOGGERS:
        speaker = logging.getLogger(name)
        if not any(isinstance(one, SeldomFilter) for one in speaker.filters):
            speaker.addFilter(SeldomFilter(_QUIET_S))
    url = endpoint if endpoint.endswith(_TRACES_PATH) else endpoint.rstrip("/") + _TRACES_PATH
    resource = Resource.create({"service.name": config.service_name, "service.version": package_version()})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=config.otlp_timeout_s)))
    return provider


class SeldomFilter(logging.Filter):
    """Passes at most one log record per ``pause_s``, since the exporter logs the failure of every batch."""

    def __init__(self, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._pause_s = pause_s
        self._clock = clock
        self._last_s = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        if now_s - self._last_s < self._pause_s:
            return False
        self._last_s = now_s
        return True


class OtlpTracer:
    """Implements :class:`RequestTracer`. Spans go through a bounded queue to a thread of their own. Spans that a slow
    or unreachable collector does not accept are dropped."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("baton", package_version())
        self._propagator = TraceContextTextMapPropagator()
        self._settling: dict[asyncio.TimerHandle, FinishedRequest] = {}

    def submit(self, request: FinishedRequest) -> None:
        """Exports a request a moment later. Must be called in the event loop."""

        def export() -> None:
            del self._settling[handle]
            self._export(request)

        handle = asyncio.get_running_loop().call_later(_SETTLE_S, export)
        self._settling[handle] = request

    async def stop(self) -> None:
        for handle, request in list(self._settling.items()):
            handle.cancel()
            self._export(request)
        self._settling.clear()
        # The provider's own shutdown waits much longer for an unreachable collector.
        flushing = asyncio.create_task(asyncio.to_thread(self._provider.force_flush, int(_SHUTDOWN_S * 1e3)))
        await asyncio.wait({flushing}, timeout=_SHUTDOWN_S)

    def _export(self, request: FinishedRequest) -> None:
        try:
            self._write(request, time.time() - time.monotonic())
        except Exception:
            logger.exception("the trace of request %s could not be built", request.request_id)

    def _write(self, request: FinishedRequest, unix_shift_s: float) -> None:
        """Writes the spans of a request. ``unix_shift_s`` converts the monotonic clock to Unix time."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        timelines = [sequence.timeline for sequence in request.sequences]
        start_s = min(timeline.origin_s for timeline in timelines)
        root = self._tracer.start_span(
            f"{request.operation} {request.model}",
            context=self._propagator.extract(dict(request.trace_context)),
            kind=SpanKind.SERVER,
            attributes=request_attributes(request),
            start_time=_unix_ns(start_s + unix_shift_s),
        )
        _mark_failure(root, timelines)
        below = set_span_in_context(root)
        for index, timeline in enumerate(timelines[:_MAX_SEQUENCES]):
            if len(timelines) == 1:
                self._write_stages(timeline, below, unix_shift_s)
                continue
            attributes = {"baton.sequence.index": index, "baton.sequence.id": timeline.request_id}
            span = self._span("sequence", below, timeline.origin_s, _end_s(timeline), unix_shift_s, attributes)
            self._write_stages(timeline, set_span_in_context(span), unix_shift_s)
        root.end(_unix_ns(max(map(_end_s, timelines)) + unix_shift_s))

    def _write_stages(self, timeline: Timeline, parent: Context, shift_s: float) -> None:
        segments = critical_path(timeline)
        ends = {segment.stage: segment.end_s for segment in segments}
        for stage in stage_times(segments):
            # There are hundreds of decode steps and waits, so each stage gets one span and its busy time.
            attributes = {"baton.stage.busy_ms": stage.seconds * 1e3, "baton.stage.count": stage.num_segments}
            self._span(str(stage.stage), parent, stage.start_s, ends[stage.stage], shift_s, attributes)
        started_s = timeline.events.get(Event.TRANSFER_STARTED)
        committed_s = timeline.events.get(Event.KV_COMMITTED, timeline.events.get(Event.TRANSFER_ACKNOWLEDGED))
        if started_s is not None and committed_s is not None:
            names = {"kv_bytes": "baton.kv.bytes", "kv_parts": "baton.kv.parts", "kv_tokens": "baton.kv.tokens"}
            moved = {names[key]: value for key, value in timeline.attributes.items() if key in names}
            self._span("kv_transfer", parent, started_s, committed_s, shift_s, moved)

    def _span(
        self, name: str, parent: Context, start_s: float, end_s: float, shift_s: float, attributes: Mapping[str, Any]
    ) -> Span:
        span = self._tracer.start_span(
            name, context=parent, attributes=dict(attributes), start_time=_unix_ns(start_s + shift_s)
        )
        span.end(_unix_ns(max(start_s, end_s) + shift_s))
        return span


def request_attributes(request: FinishedRequest) -> dict[str, Any]:
    """Attributes from OpenTelemetry's conventions for generative AI, and baton's own."""
    first = request.sequences[0]
    timelines = [sequence.timeline for sequence in request.sequences]
    values: dict[str, Any] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.request_id,
        _STREAMED: request.streamed,
        **_sampling_attributes(first),
        "gen_ai.usage.input_tokens": _prompt_tokens(request.sequences),
        "gen_ai.usage.output_tokens": _total(timelines, "output_tokens"),
        "gen_ai.usage.cache_read.input_tokens": _total(timelines[:1], "cached_tokens"),
        "gen_ai.response.finish_reasons": [str(timeline.attributes.get("outcome", "")) for timeline in timelines],
        "baton.drafted_tokens": _total(timelines, "drafted_tokens"),
        "baton.accepted_tokens": _total(timelines, "accepted_tokens"),
        "baton.attempts": max(int(timeline.attributes.get("attempts", 0)) for timeline in timelines),
    }
    if len(timelines) > 1:
        values["gen_ai.request.choice.count"] = len(timelines)
    for key in ("prefill_worker", "decode_worker", "slo_class", "slo_result"):
        if key in timelines[0].attributes:
            values[f"baton.{key}"] = timelines[0].attributes[key]
    times_ms = [timeline.ttft_ms for timeline in timelines if timeline.ttft_ms is not None]
    if times_ms:
        values["gen_ai.response.time_to_first_chunk"] = min(times_ms) / 1e3
    return values


def _sampling_attributes(sequence: GenerationRequest) -> dict[str, Any]:
    params = sequence.params
    values: dict[str, Any] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
    }
    if params.top_k > 0:
        values["gen_ai.request.top_k"] = params.top_k
    if params.frequency_penalty:
        values["gen_ai.request.frequency_penalty"] = params.frequency_penalty
    if params.presence_penalty:
        values["gen_ai.request.presence_penalty"] = params.presence_penalty
    return values


def _prompt_tokens(sequences: tuple[GenerationRequest, ...]) -> int:
    """Prompt tokens of all sequences. A prompt counts once, since its choices are adjacent and share it."""
    total, before = 0, None
    for sequence in sequences:
        if sequence.prompt_token_ids is not before:
            total += len(sequence.prompt_token_ids)
        before = sequence.prompt_token_ids
    return total


def _total(timelines: list[Timeline], attribute: str) -> int:
    return sum(int(timeline.attributes.get(attribute, 0)) for timeline in timelines)


def _mark_failure(span: Span, timelines: list[Timeline]) -> None:
    from opentelemetry.trace import Status, StatusCode

    outcomes = [str(timeline.attributes.get("outcome", "cancelled")) for timeline in timelines]
    failed = next((outcome for outcome in outcomes if outcome not in ("stop", "length", "cancelled")), None)
    if failed is not None:
        span.set_attribute("error.type", failed)
        span.set_status(Status(StatusCode.ERROR, failed))
    elif any(Event.SENT not in timeline.events for timeline in timelines):
        span.set_attribute("baton.client_left", True)


def _end_s(timeline: Timeline) -> float:
    return timeline.events.get(Event.SENT, max(timeline.events.values(), default=timeline.origin_s))


def _unix_ns(seconds: float) -> int:
    return int(seconds * 1e9)

"""Traces of finished requests; an unreachable collector affects no request."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from baton.core.errors import ConfigError
from baton.core.request import SamplingParams
from baton.core.timeline import Event, Timeline
from cluster.config.config import BatonConfig
from cluster.requests.generation import FinishedRequest, GenerationRequest
from cluster.telemetry.telemetry_config import TelemetryConfig
from cluster.telemetry.tracing import NoTracer, OtlpTracer, SeldomFilter, create_tracer
from tests.unit.baton.explain.test_critical_path import served

PROMPT = (11, 12, 13, 14)
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
_TIMEOUT_S = 20.0


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP on loopback."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: list[str] = []
        self.messages: list[ExportTraceServiceRequest] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Any]:
        return [
            span
            for message in self.messages
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.messages.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def finished(*timelines: Timeline, headers: dict[str, str] | None = None) -> FinishedRequest:
    sequences = []
    for timeline in timelines:
        timeline.attributes = {
            "output_tokens": 3, "cached_tokens": 2, "outcome": "length", "attempts": 1, "kv_bytes": 4096,
            "prefill_worker": "prefill-0", "decode_worker": "decode-1", **timeline.attributes,
        }  # fmt: skip
        params = SamplingParams(max_tokens=3, temperature=0.5, seed=9)
        sequences.append(GenerationRequest(timeline.request_id, PROMPT, params, timeline))
    return FinishedRequest("cmpl-1", "text_completion", "tiny", tuple(sequences), True, headers or {})


async def exported(collector: Collector, request: FinishedRequest) -> list[Any]:
    """What the collector has of one request."""
    tracer = create_tracer(TelemetryConfig(otlp_endpoint=collector.endpoint, service_name="test"))
    tracer.submit(request)
    await tracer.stop()
    return collector.spans()


def values(span: Any) -> dict[str, Any]:
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [entry.string_value for entry in value.values] if kind == "array_value" else value
    return found


async def test_a_request_is_one_trace_with_a_span_for_each_stage(collector: Collector) -> None:
    spans = await exported(collector, finished(served()))
    assert collector.paths == ["/v1/traces"]
    root = next(span for span in spans if not span.parent_span_id)
    assert root.name == "text_completion tiny"
    children = {span.name: span for span in spans if span is not root}
    assert {span.parent_span_id for span in children.values()} == {root.span_id}
    assert {"prefill_queue", "prefill", "kv_wait", "kv_transfer", "decode", "send"} <= set(children)
    assert root.end_time_unix_nano - root.start_time_unix_nano == pytest.approx(89e9)
    queue = children["prefill_queue"]
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == pytest.approx(7e9)
    assert queue.start_time_unix_nano - root.start_time_unix_nano == pytest.approx(21e9)
    resource = values(collector.messages[0].resource_spans[0].resource)
    assert resource["service.name"] == "test"


async def test_times_are_unix_time(collector: Collector) -> None:
    timeline = Timeline("r")
    for event in (Event.RECEIVED, Event.FINISHED, Event.SENT):
        timeline.record(event)
    spans = await exported(collector, finished(timeline))
    assert all(abs(span.start_time_unix_nano / 1e9 - time.time()) < 60 for span in spans)


async def test_attributes_follow_the_conventions_and_hold_no_prompt(collector: Collector) -> None:
    spans = await exported(collector, finished(served()))
    found = values(next(span for span in spans if not span.parent_span_id))
    expected = {
        "gen_ai.operation.name": "text_completion", "gen_ai.request.model": "tiny", "gen_ai.response.id": "cmpl-1",
        "gen_ai.request.max_tokens": 3, "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 9,
        "gen_ai.usage.input_tokens": 4, "gen_ai.usage.output_tokens": 3, "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ["length"], "baton.prefill_worker": "prefill-0",
    }  # fmt: skip
    assert found | expected == found
    assert found["gen_ai.response.time_to_first_chunk"] == 50.0
    assert all("prompt" not in key and "message" not in key for span in spans for key in values(span))


async def test_the_trace_of_the_client_continues(collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    spans = await exported(collector, finished(served(), headers=headers))
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    assert next(span for span in spans if span.name == "text_completion tiny").parent_span_id.hex() == PARENT_ID


async def test_an_unsampled_client_gets_no_trace(collector: Collector) -> None:
    assert await exported(collector, finished(served(), headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})) == []


async def test_an_invalid_traceparent_is_ignored(collector: Collector) -> None:
    spans = await exported(collector, finished(served(), headers={"traceparent": "nonsense"}))
    assert next(span for span in spans if span.name == "text_completion tiny").parent_span_id == b""


async def test_each_of_several_sequences_has_a_span(collector: Collector) -> None:
    first, second = served(), served()
    second.request_id = "r-1"
    spans = await exported(collector, finished(first, second))
    root = next(span for span in spans if not span.parent_span_id)
    sequences = [span for span in spans if span.name == "sequence"]
    assert [span.parent_span_id for span in sequences] == [root.span_id] * 2
    below = [span for span in spans if span.name == "prefill"]
    assert {span.parent_span_id for span in below} == {span.span_id for span in sequences}
    assert values(root)["gen_ai.usage.input_tokens"] == 4, "one prompt, two choices"
    assert values(root)["gen_ai.usage.output_tokens"] == 6


async def test_the_first_sequences_of_many_have_spans(collector: Collector) -> None:
    spans = await exported(collector, finished(*(served() for _ in range(40))))
    assert len([span for span in spans if span.name == "sequence"]) == 16
    root = next(span for span in spans if not span.parent_span_id)
    assert values(root)["gen_ai.usage.output_tokens"] == 120


async def test_a_failure_is_an_error_span(collector: Collector) -> None:
    timeline = served()
    timeline.attributes["outcome"] = "worker_lost"
    root = next(s for s in await exported(collector, finished(timeline)) if not s.parent_span_id)
    assert values(root)["error.type"] == "worker_lost"
    assert root.status.code == 2


async def test_an_unreachable_collector_is_harmless() -> None:
    dead = Collector()
    endpoint = dead.endpoint
    dead.server_close()
    tracer = create_tracer(TelemetryConfig(otlp_endpoint=endpoint, otlp_timeout_s=0.2))
    began_s = time.monotonic()
    for _ in range(50):
        tracer.submit(finished(served()))
    submitted_s = time.monotonic() - began_s
    await tracer.stop()
    assert submitted_s < _TIMEOUT_S
    assert time.monotonic() - began_s < _TIMEOUT_S


async def test_a_trace_that_cannot_be_built_is_harmless(collector: Collector, caplog: Any) -> None:
    broken = FinishedRequest("cmpl-2", "chat", "tiny", (), False, {})
    assert await exported(collector, broken) == []
    assert "cmpl-2" in caplog.text


def test_without_an_endpoint_there_is_no_tracer() -> None:
    assert isinstance(create_tracer(TelemetryConfig()), NoTracer)


def test_an_endpoint_without_the_extra_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.sdk")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[otel\]'"):
        create_tracer(TelemetryConfig(otlp_endpoint="http://127.0.0.1:1"))


def test_an_endpoint_must_be_a_url() -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.otlp_endpoint.*not an http:// or https:// URL"):
        BatonConfig.from_dict({"telemetry": {"otlp_endpoint": "127.0.0.1:4318"}})


@pytest.mark.parametrize("suffix", ["", "/", "/v1/traces"])
async def test_the_endpoint_can_include_the_path(collector: Collector, suffix: str) -> None:
    tracer = create_tracer(TelemetryConfig(otlp_endpoint=collector.endpoint + suffix))
    assert isinstance(tracer, OtlpTracer)
    tracer.submit(finished(served()))
    await tracer.stop()
    assert collector.paths == ["/v1/traces"]


def test_an_unreachable_collector_is_reported_periodically() -> None:
    now_s = [0.0]
    seldom = SeldomFilter(300.0, lambda: now_s[0])
    record = logging.LogRecord("exporter", logging.WARNING, "", 0, "gone", None, None)
    passed = []
    for now_s[0] in (5.0, 6.0, 304.0, 305.0, 400.0):
        passed.append(seldom.filter(record))
    assert passed == [True, False, False, True, False]

"""Prometheus metrics of the whole cluster, served by the router. Names begin with ``baton_``; units are base units."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.wire import worker_pb2
from engine.timeline import Timeline

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_FAST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)

_WORKER_GAUGES: dict[str, tuple[str, str]] = {
    "baton_worker_running_requests": ("num_running", "Requests in the worker's batch."),
    "baton_worker_waiting_requests": ("num_waiting", "Requests that wait in the worker's queue."),
    "baton_worker_transfers": ("num_transfers", "KV hand-offs under way."),
    "baton_worker_kv_blocks": ("kv_blocks_total", "KV blocks of the worker."),
    "baton_worker_kv_blocks_used": ("kv_blocks_used", "KV blocks held by requests and hand-offs."),
    "baton_worker_kv_blocks_cached": ("kv_blocks_cached", "Free KV blocks whose content can be reused."),
    "baton_worker_kv_blocks_leaked": ("num_leaked_blocks", "KV blocks that nobody owns and nobody gave back: a bug."),
    "baton_worker_preemptions": ("num_preemptions", "Requests that lost their blocks and were computed again."),
    "baton_worker_steps": ("num_steps", "Engine steps since the worker started."),
    "baton_worker_prefill_tokens": ("prefill_tokens", "Prompt tokens computed since the worker started."),
    "baton_worker_generated_tokens": ("generated_tokens", "Tokens sampled since the worker started."),
    "baton_worker_draft_failures": (
        "num_draft_failures",
        "Times that a speculation method broke and was switched off. Its requests went on without it.",
    ),
    "baton_worker_kv_bytes_sent": ("kv_bytes_sent", "KV bytes sent since the worker started."),
    "baton_worker_kv_bytes_received": ("kv_bytes_received", "KV bytes received since the worker started."),
}

_METHOD_GAUGES = {
    "baton_worker_drafts": (
        "num_drafts",
        "Drafts of a method that were verified since the worker started.",
    ),
    "baton_worker_drafted_tokens": ("num_drafted_tokens", "Tokens in these drafts."),
    "baton_worker_accepted_tokens": ("num_accepted_tokens", "Of these tokens, the ones that the model agreed with."),
}


class RouterMetrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = self._counter, self._histogram
        self.requests = counter("baton_requests", "Sequences that ended, by outcome.", "outcome")
        self.in_flight = Gauge("baton_requests_in_flight", "Sequences accepted and not over.", registry=self.registry)
        self.retries = counter("baton_retries", "Attempts that failed and were repeated elsewhere.", "reason")
        self.prompt_tokens = counter("baton_prompt_tokens", "Prompt tokens of accepted sequences.")
        self.cached_tokens = counter("baton_cached_prompt_tokens", "Prompt tokens that a prefix cache held.")
        self.drafted_tokens = counter("baton_drafted_tokens", "Tokens that speculation guessed and verified.")
        self.accepted_tokens = counter("baton_accepted_tokens", "Guessed tokens that the model agreed with.")
        self.output_tokens = counter("baton_output_tokens", "Tokens sent to clients.")
        self.transfers = counter("baton_kv_transfers", "KV hand-offs by outcome.", "outcome")
        self.transfer_bytes = counter("baton_kv_transfer_bytes", "KV bytes that crossed from prefill to decode.")
        self.transfer_tokens = counter("baton_kv_transfer_tokens", "Prompt tokens whose KV crossed.")
        self.transfer_saved_tokens = counter(
            "baton_kv_transfer_saved_tokens", "Prompt tokens whose KV the decode worker held already."
        )
        self.transfer_seconds = histogram(
            "baton_kv_transfer_seconds", "From asking for room to the acknowledgement.", _SECONDS
        )
        self.ttft = histogram("baton_time_to_first_token_seconds", "From receipt to the first token.", _SECONDS)
        self.tpot = histogram("baton_time_per_output_token_seconds", "Mean after the first token.", _FAST_SECONDS)
        self.queue = histogram("baton_queue_seconds", "In the prefill worker's queue.", _SECONDS)
        self.prefill = histogram("baton_prefill_seconds", "Computing the prompt.", _SECONDS)
        self.duration = histogram("baton_request_seconds", "From receipt to the end.", _SECONDS)
        self._methods = {
            name: Gauge(name, text, ["worker", "method"], registry=self.registry)
            for name, (_, text) in _METHOD_GAUGES.items()
        }
        self._workers = {
            name: Gauge(name, text, ["pool", "worker"], registry=self.registry)
            for name, (_, text) in _WORKER_GAUGES.items()
        }

    def observe_end(self, timeline: Timeline, outcome: str, num_output_tokens: int, num_cached_tokens: int = 0) -> None:
        """Books a sequence that is over."""
        self.requests.labels(outcome).inc()
        self.cached_tokens.inc(num_cached_tokens)
        self.output_tokens.inc(num_output_tokens)
        for metric, value_ms in (
            (self.ttft, timeline.ttft_ms),
            (self.tpot, timeline.tpot_ms(num_output_tokens)),
            (self.queue, timeline.queue_ms),
            (self.prefill, timeline.prefill_ms),
            (self.duration, timeline.total_ms),
        ):
            if value_ms is not None and outcome in ("stop", "length"):
                metric.observe(value_ms / 1e3)

    def observe_handoff(self, result: worker_pb2.HandoffResult) -> None:
        """Books a hand-off that is over."""
        self.transfers.labels("failed" if result.error_code else "ok").inc()
        self.transfer_bytes.inc(result.num_bytes)
        if not result.error_code:
            self.transfer_tokens.inc(result.num_tokens)
            self.transfer_saved_tokens.inc(result.num_cached_tokens)
            self.transfer_seconds.observe(result.seconds)

    def set_workers(self, workers: Mapping[tuple[str, str], worker_pb2.WorkerStats]) -> None:
        """Replaces the worker gauges; keys are (pool, worker id). Workers that are gone lose their series."""
        for name, (field_name, _) in _WORKER_GAUGES.items():
            gauge = self._workers[name]
            gauge.clear()
            for (pool, worker_id), stats in workers.items():
                gauge.labels(pool, worker_id).set(getattr(stats, field_name))
        for name, (field_name, _) in _METHOD_GAUGES.items():
            gauge = self._methods[name]
            gauge.clear()
            for (_, worker_id), stats in workers.items():
                for method in stats.methods:
                    gauge.labels(worker_id, method.method).set(getattr(method, field_name))

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

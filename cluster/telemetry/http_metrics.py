"""Metrics of the gateway: what was answered, and what was turned away."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from baton.core.errors import RequestCancelledError, error_classes

GENERATION_ENDPOINTS = frozenset({"/v1/completions", "/v1/chat/completions"})
UNKNOWN_ENDPOINT = "other"


class HttpMetrics:
    """HTTP requests as the gateway saw them; sequences are the router's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "baton_http_requests",
            "HTTP requests that are over, by route and status; 499: the client went away.",
            ["endpoint", "status"],
            registry=registry,
        )
        self._rejections = Counter(
            "baton_rejections",
            "Requests for tokens that were answered with an error instead, by its code.",
            ["reason"],
            registry=registry,
        )
        for code in error_classes():
            if code != RequestCancelledError.code:
                self._rejections.labels(code)

    def observe(self, endpoint: str, status: int, error_code: str | None) -> None:
        """Books a request that is over.

        Args:
            endpoint: the route's own path, or ``UNKNOWN_ENDPOINT``; never the path as it was sent.
            error_code: of the error that is the response's body, if one is.
        """
        self._requests.labels(endpoint, str(status)).inc()
        if error_code is not None and error_code != RequestCancelledError.code and endpoint in GENERATION_ENDPOINTS:
            self._rejections.labels(error_code).inc()

    def observe_refusal(self, status: int) -> None:
        """Counts an answer to data that is not valid HTTP."""
        self.observe(UNKNOWN_ENDPOINT, status, None)

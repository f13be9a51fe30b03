"""Metrics of routing: which way requests went, and what choosing it took."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from cluster.routing.policies import SCORERS

PAIR = "pair"
LOCAL = "local"
_DECISION_SECONDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)


class RoutingMetrics:
    """
    Attributes:
        decisions: seconds that looking at all workers and choosing among their routes took.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        scorers = Summary(
            "baton_routing_scorer_seconds",
            "What a scorer took, for all candidates of a request.",
            ["scorer"],
            registry=registry,
        )
        self._scorers = {name: scorers.labels(name) for name in SCORERS}
        self.decisions = Histogram(
            "baton_routing_decision_seconds",
            "What choosing a route took; a request that waits in the router may be looked at several times.",
            buckets=_DECISION_SECONDS,
            registry=registry,
        )
        self._routes = Counter(
            "baton_routes", "Routes that were taken: a pair of workers, or local prefill.", ["kind"], registry=registry
        )
        for kind in (PAIR, LOCAL):
            self._routes.labels(kind)

    def observe_scorer(self, name: str, seconds: float) -> None:
        """Books what one of the known scorers took."""
        self._scorers[name].observe(seconds)

    def observe_route(self, *, local: bool) -> None:
        """Books a route that is taken."""
        self._routes.labels(LOCAL if local else PAIR).inc()

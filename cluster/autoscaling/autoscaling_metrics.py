"""Prometheus series of the autoscaler's plans and actions."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.core.roles import POOLS
from cluster.autoscaling.autoscaler import ScalingPlan
from cluster.autoscaling.pool_rules import Reason

_DIRECTIONS = ("up", "down")


class AutoscalerMetrics:
    """Metrics of the autoscaler. Gauges follow every plan, even while it is off, and are NaN before the first one.
    Counters count applied changes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            created = Gauge(f"baton_autoscaler_{name}", text, ["pool"], registry=registry)
            for pool in POOLS:
                created.labels(pool).set(math.nan)
            return created

        self._wanted = gauge("wanted_workers", "Workers that the load needs, regardless of limits and placement.")
        self._utilisation = gauge("utilisation_ratio", "Load as a share of the pool's capacity within the targets.")
        self._attainment = gauge(
            "predicted_attainment_ratio", "Predicted share of requests that meet the pool's target, in the worst class."
        )
        self._decisions = Counter(
            "baton_autoscaler_decisions",
            "Changes of a pool's size by the autoscaler.",
            ["pool", "direction", "reason"],
            registry=registry,
        )
        for pool in POOLS:
            for direction in _DIRECTIONS:
                for reason in Reason:
                    self._decisions.labels(pool, direction, str(reason))

    def observe(self, plan: ScalingPlan) -> None:
        """Sets the gauges to the figures of a plan."""
        for name, pool in plan.pools.items():
            self._wanted.labels(name).set(pool.wanted)
            self._utilisation.labels(name).set(pool.predicted.utilisation)
            self._attainment.labels(name).set(pool.predicted.lowest_attainment)

    def applied(self, plan: ScalingPlan) -> None:
        """Counts an applied plan."""
        for name, pool in plan.pools.items():
            if pool.direction in _DIRECTIONS:
                self._decisions.labels(name, pool.direction, str(pool.reason)).inc()

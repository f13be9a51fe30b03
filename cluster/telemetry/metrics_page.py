"""``GET /metrics``: one round of questions to the cluster, and its rendering beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cluster.telemetry.cluster_metrics import ClusterFigures
from cluster.telemetry.metrics import RouterMetrics


class MetricsPage:
    """Scrapes that come at once share one page, so that many of them cost workers and router no more than one.

    Args:
        ask_cluster: asks workers and controller for their figures.
    """

    def __init__(self, metrics: RouterMetrics, ask_cluster: Callable[[], Awaitable[ClusterFigures]]) -> None:
        self._metrics = metrics
        self._ask_cluster = ask_cluster
        self._task: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        """Prometheus' text format."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._make())
        return await asyncio.shield(self._task)  # others may wait for it when this scrape is given up

    async def _make(self) -> bytes:
        self._metrics.cluster.figures = await self._ask_cluster()
        # A thread: with many workers the text takes milliseconds, in which no token would go out.
        return await asyncio.to_thread(self._metrics.render)

"""Where Ray could place the workers of a pool, and why it has not."""

from __future__ import annotations

import time

import ray

from cluster.config.config import BatonConfig
from cluster.controller.placement import Node, explain_pending, fits_somewhere, live_nodes, pool_resources

_NODES_KNOWN_S = 1.0


class Places:
    """The nodes of the cluster as places for the workers of a pool."""

    def __init__(self, pool: str, config: BatonConfig) -> None:
        self._pool = pool
        self._is_local = config.ray.is_local
        self._resources = pool_resources(config, pool)
        self._nodes: list[Node] = []
        self._nodes_until_s = 0.0

    def has_large_enough(self) -> bool:
        """Whether some node has the resources of a worker, free or not."""
        return fits_somewhere(self._resources, self._live_nodes())

    def explain(self) -> str:
        """Why a worker may be waiting for a place, node by node, and what to do."""
        num_cpus = ray.available_resources().get("CPU", 0.0) if self._is_local else 0.0
        return explain_pending(
            self._pool, self._resources, self._live_nodes(), is_local=self._is_local, num_free_cpus=num_cpus
        )

    def _live_nodes(self) -> list[Node]:
        """The live nodes, cached: thousands of workers may ask at once, and each query blocks the event loop."""
        now_s = time.monotonic()
        if now_s >= self._nodes_until_s:
            self._nodes, self._nodes_until_s = live_nodes(ray.nodes()), now_s + _NODES_KNOWN_S
        return self._nodes

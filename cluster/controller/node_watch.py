"""Follows the nodes of a Ray cluster that are about to leave or are reserved for a pool.

Ray marks a node as draining when ``baton node join`` is told to end, and when its autoscaler or a cloud announces the
node's end. It places nothing there any more, and ends the node once the node's actors are gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import ray

from cluster.nodes.node_labels import POOL_LABEL

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
"""Ray has no event for this."""


class NodeWatch:
    """Looks at the nodes until it is cancelled.

    Args:
        on_leaving: called with the id of each node that is draining, again and again until the node is gone.
    """

    def __init__(self, on_leaving: Callable[[str], None]) -> None:
        self._on_leaving = on_leaving
        self.has_reserved_nodes = False
        """Whether a node runs the workers of a single pool."""

    async def run(self) -> None:
        while True:
            try:
                leaving, self.has_reserved_nodes = await asyncio.to_thread(_look)
            except Exception:  # Ray raises several classes while its head is away
                logger.warning("Ray's nodes cannot be listed; trying again", exc_info=True)
            else:
                for node_id in leaving:
                    self._on_leaving(node_id)
            await asyncio.sleep(_LOOK_EVERY_S)


def _look() -> tuple[list[str], bool]:
    live = [node for node in ray.nodes() if node["Alive"]]
    is_reserved = any(POOL_LABEL in node["Labels"] for node in live)
    draining = ray._private.state.state.get_draining_nodes()  # Ray has no public API for this
    return [node["NodeID"] for node in live if node["NodeID"] in draining], is_reserved

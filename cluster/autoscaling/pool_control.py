"""The autoscaler's access to the pools through the controller actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.autoscaling.observation import PoolCounts


class RayPoolControl:
    """Implements :class:`cluster.autoscaling.autoscaler_loop.PoolControl`.

    Args:
        controller: handle of the controller actor.
    """

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    async def pool_counts(self) -> tuple[Mapping[str, PoolCounts], str]:
        counts: tuple[Mapping[str, PoolCounts], str] = await self._controller.pool_counts.remote()
        return counts

    async def autoscale(self, targets: dict[str, int], role_change: tuple[str, str] | None) -> None:
        await self._controller.autoscale.remote(targets, role_change)

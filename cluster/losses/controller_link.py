"""The way from a router to its controller, which may be lost and replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError

from baton.core.errors import ControllerLostError
from cluster.autoscaling.observation import PoolCounts

_ANSWER_S = 5.0
"""The controller answers within milliseconds unless it hangs."""


class ControllerLink:
    """Implements :class:`cluster.autoscaling.autoscaler_loop.PoolControl`.

    Args:
        controller: handle of the controller actor.
    """

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def follow(self, controller: Any) -> None:
        """Calls another controller from now on."""
        self._controller = controller

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the controller.

        Raises:
            ControllerLostError: there is no controller, or it does not answer.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await getattr(self._controller, method).remote(*arguments)
        except TimeoutError as error:
            raise ControllerLostError(
                f"The cluster's controller has not answered for {_ANSWER_S:g} s. Requests are served, but workers are "
                "neither replaced nor started, and what it was asked may still be done later. `baton up` says whether "
                "the controller hangs or waits for Ray; it replaces one that hangs."
            ) from error
        except RayActorError as error:
            raise ControllerLostError(
                "The cluster has lost its controller. It serves requests, but neither replaces workers nor changes "
                "their number. `baton up` starts another one in seconds, unless it is stopped; if it has ended, run it "
                "again with the same configuration, and it takes the cluster over."
            ) from error

    async def pool_counts(self) -> tuple[Mapping[str, PoolCounts], str]:
        counts: tuple[Mapping[str, PoolCounts], str] = await self.call("pool_counts")
        return counts

    async def autoscale(self, targets: dict[str, int], role_change: tuple[str, str] | None) -> None:
        await self.call("autoscale", targets, role_change)

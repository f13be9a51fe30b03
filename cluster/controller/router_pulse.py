"""Shows the controller whether a router answers."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayError

from baton.core.errors import DeadlineError
from baton.core.steps import StepProgress


class RouterPulse:
    """Implements :class:`cluster.registry.progress_watch.Watched`: each answer of the router counts as a step.

    Args:
        router: handle of the router actor.

    Attributes:
        pid: the router's process id, once it has answered.
    """

    def __init__(self, router: Any) -> None:
        self._router = router
        self._num_answers = 0
        self.pid: int | None = None

    async def ping(self, timeout_s: float) -> StepProgress:
        """Raises :class:`DeadlineError` if the router does not answer; whether its process lives is known elsewhere."""
        try:
            async with asyncio.timeout(timeout_s):
                self.pid = await self._router.beat.remote()
        except (RayError, TimeoutError) as error:
            raise DeadlineError("The router did not answer.") from error
        self._num_answers += 1
        return StepProgress(self._num_answers)

    async def probe(self, timeout_s: float) -> None:
        await self.ping(timeout_s)

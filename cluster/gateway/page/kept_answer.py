"""The answer to a costly question, for many readers at the cost of one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any


class KeptAnswer:
    """Asks again only when the last answer is older than a caller accepts. Callers that wait share one question.

    Args:
        clock: seconds.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[dict[str, Any]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = asyncio.Lock()
        self._answer: dict[str, Any] = {}
        self._asked_s = float("-inf")

    async def get(self, max_age_s: float) -> dict[str, Any]:
        """An answer of at most this age, in seconds; of age 0, a new one. Raises what the question raises."""
        async with self._lock:
            asked_s = self._clock()
            if not max_age_s or asked_s - self._asked_s > max_age_s:
                self._answer = await self._ask()
                self._asked_s = asked_s
            return self._answer

"""Waits for the state of other tasks and processes, which have no events to wait for."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

TIMEOUT_S = 120.0
"""Limit for what never happens; what happens takes far less."""
_PERIOD_S = 0.005


async def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S, period_s: float = _PERIOD_S) -> None:
    """Returns when ``condition`` holds, which may be a coroutine function. Raises ``TimeoutError`` if it never does."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if inspect.isawaitable(holds):
                holds = await holds
            if holds:
                return
            await asyncio.sleep(period_s)

"""Calls with which a controller notices the end of routers and workers, and which it may leave open when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from baton.process.background import race


class OpenCall:
    """A call that stays open for as long as its process has something to do.

    Ray keeps the connection of a caller that has died open until the call ends: one file for each lost controller. So
    the call of the next controller ends that of the one before.
    """

    def __init__(self) -> None:
        self._is_superseded = asyncio.Event()

    async def run(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs ``work`` until it ends or there is another call. Raises what ``work`` raises."""
        self._is_superseded.set()
        self._is_superseded = superseded = asyncio.Event()
        await race(work, superseded.wait())

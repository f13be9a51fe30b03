"""A cap on bandwidth, for links that others share, and for showing what a slow link does."""

from __future__ import annotations

import asyncio
import time


class Throttle:
    """Token bucket over bytes; callers pass in turn. Holds at most a tenth of a second's worth of burst."""

    def __init__(self, bytes_per_second: float) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"bytes_per_second must be positive, got {bytes_per_second}")
        self._rate = bytes_per_second
        self._free_at_s = 0.0
        self._lock = asyncio.Lock()

    async def take(self, num_bytes: int) -> None:
        """Returns when ``num_bytes`` may go out."""
        async with self._lock:
            now = time.monotonic()
            self._free_at_s = max(self._free_at_s, now - 0.1) + num_bytes / self._rate
            if self._free_at_s > now:
                await asyncio.sleep(self._free_at_s - now)

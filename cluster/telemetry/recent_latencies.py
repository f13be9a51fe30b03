"""Percentiles of the latencies of recent requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

_MAX_REQUESTS = 512
_MAX_AGE_S = 300.0
_PERCENTILES = (50, 95, 99)


class RecentLatencies:
    """TTFT and TPOT of the last 512 finished requests, as far as they ended in the last five minutes.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: deque[tuple[float, float | None, float | None]] = deque(maxlen=_MAX_REQUESTS)

    def add(self, ttft_ms: float | None, tpot_ms: float | None) -> None:
        """Counts a request that ends now; ``None`` where it has no such time."""
        self._requests.append((self._clock(), ttft_ms, tpot_ms))

    def status(self) -> dict[str, Any]:
        """The number of requests, and percentiles in milliseconds, ``None`` without any; JSON-ready."""
        oldest_s = self._clock() - _MAX_AGE_S
        recent = [entry for entry in self._requests if entry[0] >= oldest_s]
        return {
            "requests": len(recent),
            "ttft_ms": _percentiles([ttft_ms for _, ttft_ms, _ in recent if ttft_ms is not None]),
            "tpot_ms": _percentiles([tpot_ms for _, _, tpot_ms in recent if tpot_ms is not None]),
        }


def _percentiles(values: list[float]) -> dict[str, float | None]:
    """Nearest ranks, which are times that a request had."""
    values.sort()
    return {
        f"p{percent}": round(values[-(-len(values) * percent // 100) - 1], 3) if values else None
        for percent in _PERCENTILES
    }

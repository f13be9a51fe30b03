"""How long ``/health`` takes while a router is busy, asked from another process on new connections."""

from __future__ import annotations

import asyncio
import time
from typing import Any

_INTERVAL_S = 0.02
_TIMEOUT_S = 30.0
_REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

Address = tuple[str, int]


def probe_until(address: Address, stop: Any) -> list[float | None]:
    """Probes every 20 ms until the event ``stop`` of another process is set. Runs in a process of its own.

    Returns:
        Seconds that each ``/health`` took; ``None`` without status 200.
    """
    return asyncio.run(probe_at_a_constant_rate(address, stop))


async def probe_at_a_constant_rate(address: Address, stop: Any) -> list[float | None]:
    """Like :func:`probe_until`, within an event loop."""
    tasks = [asyncio.create_task(_probe(address))]
    while not stop.is_set():
        await asyncio.sleep(_INTERVAL_S)
        tasks.append(asyncio.create_task(_probe(address)))
    return await asyncio.gather(*tasks)


async def _probe(address: Address) -> float | None:
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(_REQUEST)
            answer = await reader.read()
            writer.close()
    except (OSError, TimeoutError):
        return None
    return time.perf_counter() - began_s if answer.startswith(b"HTTP/1.1 200") else None

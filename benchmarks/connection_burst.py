"""Many streams at once, and ``/health`` meanwhile: ``python -m benchmarks.connection_burst [--help]``.

Starts a router without Ray and simulated workers, all on this machine. Each stream has a connection of its own, and all
of them are opened at the same time. Another process asks for ``/health`` on a new connection every 20 ms.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

import typer
import uvloop

from baton.bench.latency import Summary
from baton.process.descriptors import raise_descriptor_limit
from benchmarks.health_probes import Address, probe_until
from benchmarks.options import run_command
from benchmarks.router_load.processes import router_under_test
from benchmarks.router_load.setup import Workers

_STEP_MS = 50.0
_KV_BLOCKS = 200_000


@dataclass(frozen=True, slots=True)
class Burst:
    """The result of one burst.

    Attributes:
        outcomes: number of streams by how they ended: ``complete``, status and code of an error, or how a stream
            without either ended.
        health: latencies of ``/health`` in milliseconds, from connecting to the answer.
        failed_probes: probes without status 200.
    """

    outcomes: dict[str, int]
    health: Summary
    failed_probes: int
    seconds: float

    @property
    def num_untyped(self) -> int:
        """Streams that ended neither with their last token nor with a typed error."""
        return sum(count for name, count in self.outcomes.items() if name.startswith("cut"))


class _Stream(asyncio.Protocol):
    """Sends one request and reads until the connection ends."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._head = b""
        self._tail = b""
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._head += data[: 2048 - len(self._head)]
        self._tail = (self._tail + data)[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(self._name(exc))

    def _name(self, error: Exception | None) -> str:
        head, _, body = self._head.partition(b"\r\n\r\n")
        status = head.split(b" ")[1].decode() if head.startswith(b"HTTP/1.1 ") else ""
        if status == "200" and b"data: [DONE]" in self._tail:
            return "complete"
        try:
            return f"{status} {json.loads(body)['error']['code']}"
        except (ValueError, KeyError, TypeError):
            return f"cut {'in the answer' if head else 'without an answer'} ({type(error).__name__})"


async def measure(num_streams: int, num_tokens: int, max_files: int | None, overrides: dict[str, Any]) -> Burst:
    """Opens all streams at once and waits for their ends. Those that take two minutes count as cut.

    Args:
        max_files: soft and hard limit of the router's open files; ``None`` leaves them as they are.
        overrides: sections of the router's configuration.

    Raises:
        InternalError: a process did not start.
    """
    raise_descriptor_limit()
    workers = Workers(decode=2, decode_step_ms=_STEP_MS, kv_blocks=_KV_BLOCKS)
    config = {"router": {"max_inflight": 1024}, **overrides}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool, context.Manager() as manager:
        async with router_under_test(workers, config, max_files=max_files) as target:
            parts = urlsplit(target.endpoint)
            address = str(parts.hostname), int(parts.port or 0)
            stop = manager.Event()
            await asyncio.wrap_future(pool.submit(abs, 0))  # starts the process
            probes = asyncio.wrap_future(pool.submit(probe_until, address, stop))
            began_s = time.perf_counter()
            try:
                ends = await asyncio.gather(
                    *(_stream(address, target.model, number, num_tokens) for number in range(num_streams))
                )
                seconds = time.perf_counter() - began_s
            finally:
                stop.set()
            latencies = await probes
    good = [latency for latency in latencies if latency is not None]
    return Burst(dict(Counter(ends)), Summary.of_seconds(good), len(latencies) - len(good), seconds)


async def _stream(address: Address, model: str, number: int, num_tokens: int) -> str:
    body = {"model": model, "prompt": f"{number} streams at once", "max_tokens": num_tokens, "ignore_eos": True}
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: application/json\r\n"
    request = f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    try:
        _, stream = await asyncio.get_running_loop().create_connection(lambda: _Stream(request), *address)
        async with asyncio.timeout(120.0):
            return await stream.outcome
    except (OSError, TimeoutError) as error:
        return f"cut ({type(error).__name__})"


def command(
    streams: Annotated[int, typer.Option(min=1, max=20_000, help="Number of streams.")] = 1500,
    tokens: Annotated[int, typer.Option(min=1, max=1000, help="Tokens of each stream.")] = 20,
    max_files: Annotated[
        int | None, typer.Option(min=256, help="Soft and hard limit of the router's open files. Default: as it is.")
    ] = 1024,
) -> None:
    """Open many streams at once, and show how each ended and how long /health took meanwhile."""
    burst = uvloop.run(measure(streams, tokens, max_files, {}))
    lines = [f"{count:6} streams: {name}" for name, count in sorted(burst.outcomes.items())]
    health = burst.health
    lines.append(
        f"/health: {health.count} probes, p50 {health.p50:.0f} ms, p99 {health.p99:.0f} ms, max {health.max:.0f} ms, "
        f"{burst.failed_probes} failed"
    )
    lines.append(f"{burst.seconds:.1f} s")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(run_command(command, "benchmarks.connection_burst"))

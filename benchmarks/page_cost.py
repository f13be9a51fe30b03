"""What open pages cost the router: ``python -m benchmarks.page_cost [--help]``.

Starts a router without Ray and simulated workers on this machine, sends one-token requests at a steady rate, and reads
``GET /admin/live`` as often as pages are open, in several turns.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Annotated

import aiohttp
import typer
import uvloop

from benchmarks.options import run_command
from benchmarks.router_load.client import http_load, open_loop
from benchmarks.router_load.processes import RouterUnderTest, router_under_test
from benchmarks.router_load.setup import Workers

_COUNTS = (0, 1, 10)
_SETTLE_S = 0.5


def command(
    rate: Annotated[float, typer.Option(min=1, max=1000, help="One-token requests per second.")] = 100.0,
    seconds: Annotated[float, typer.Option(min=2, help="Duration of each measurement.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns with each number of pages; medians are shown.")] = 3,
    size: Annotated[int, typer.Option(min=1, help="Workers in each pool.")] = 1,
) -> None:
    """Measure the router's CPU time with 0, 1 and 10 open pages under load."""
    sys.stdout.write(uvloop.run(_measure(rate, seconds, rounds, size)))


async def _measure(rate: float, seconds: float, rounds: int, size: int) -> str:
    shares: dict[int, list[float]] = {count: [] for count in _COUNTS}
    num_bytes: list[float] = []
    async with (
        router_under_test(Workers(prefill=size, decode=size)) as target,
        http_load(target) as load,
    ):
        number = int(rate * seconds)
        await open_loop(load.one_token, rate, number)
        for turn in range(1, rounds + 1):
            for position, count in enumerate(_COUNTS):
                async with _open_pages(target, count) as read:
                    cpu_s, began_s = target.router.cpu_s, time.perf_counter()
                    first = number * (turn * len(_COUNTS) + position)
                    await open_loop(load.one_token, rate, number, first)
                    passed_s = time.perf_counter() - began_s
                    shares[count].append((target.router.cpu_s - cpu_s) / passed_s)
                if count:
                    num_bytes.append(sum(read) / count / passed_s)
    none = median(shares[0])
    lines = [f"{rate:g} requests/s, {size}+{size} workers, medians of {rounds} x {seconds:g} s, share of a core:"]
    for count in _COUNTS:
        share = median(shares[count])
        lines.append(f"{count:3} pages {share:7.2%}   more than without {share - none:+.2%}")
    lines.append(f"bytes per page and second: {median(num_bytes):.0f}")
    return "\n".join(lines) + "\n"


@asynccontextmanager
async def _open_pages(target: RouterUnderTest, count: int) -> AsyncIterator[list[int]]:
    """Reads the stream of figures ``count`` times within the context. Yields the bytes that each has read so far."""
    read = [0] * count

    async def page(session: aiohttp.ClientSession, index: int) -> None:
        async with session.get(f"{target.endpoint}/admin/live") as response:
            response.raise_for_status()
            async for data in response.content.iter_any():
                read[index] += len(data)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        tasks = [group.create_task(page(session, index)) for index in range(count)]
        await asyncio.sleep(_SETTLE_S)
        yield read
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    sys.exit(run_command(command, "benchmarks.page_cost"))

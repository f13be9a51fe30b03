"""How soon a refused client hears of it: ``python -m benchmarks.refusal_times [--help]``.

The real gateway and router, over HTTP, in front of simulated workers over gRPC, with more requests of the class
``interactive`` than there are seats. Processes of its own on 127.0.0.1; no Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

from baton.bench.latency import Summary
from baton.core.errors import InternalError
from baton.core.slo import INTERACTIVE, SLO_CLASS_HEADER
from benchmarks.router_load.processes import RouterUnderTest, router_under_test
from benchmarks.router_load.setup import Workers

_STEP_MS = 20.0
_NUM_TOKENS = 50
_SEATS = 16
_DECODE_WORKERS = 2
_CAPACITY = _DECODE_WORKERS * _SEATS / (_NUM_TOKENS * _STEP_MS / 1e3)
"""Requests per second: that many seats, each taken for as long as an answer lasts."""
_WARMUP_S = 5.0
_TIMEOUT_S = 60.0
_OK, _REFUSED = 200, 429


@dataclass(frozen=True, slots=True)
class Answer:
    """
    Attributes:
        status: of HTTP.
        seconds: from when the request was due to the end of the answer.
    """

    status: int
    seconds: float


async def measure(overload: float, seconds: float) -> list[Answer]:
    """Open loop; what became of the requests behind the warm-up.

    Args:
        overload: how many times the requests that the seats can bear.
    """
    workers = Workers(2, _DECODE_WORKERS, step_ms=_STEP_MS, tokens_per_message=8)
    decode = {"workers": _DECODE_WORKERS, "max_num_seqs": _SEATS, "chunk_tokens": 512, "kv_blocks": workers.kv_blocks}
    rate = overload * _CAPACITY
    num_warmup, count = int(rate * _WARMUP_S), int(rate * seconds)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with (
        router_under_test(workers, {"decode": decode}) as target,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        began_s, tasks = time.perf_counter(), []
        for number in range(num_warmup + count):
            due_s = began_s + number / rate
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(_ask(session, target, number, due_s)))
        answers = await asyncio.gather(*tasks)
    return answers[num_warmup:]


async def _ask(session: aiohttp.ClientSession, target: RouterUnderTest, number: int, due_s: float) -> Answer:
    body = {
        "model": target.model,
        "prompt": f"{number} Tell me something.",
        "max_tokens": _NUM_TOKENS,
        "ignore_eos": True,
    }
    headers = {SLO_CLASS_HEADER: INTERACTIVE.name}
    async with session.post(f"{target.endpoint}/v1/completions", json=body, headers=headers) as response:
        text = await response.read()
        if response.status not in (_OK, _REFUSED):
            raise InternalError(f"the router answered {response.status}: {text[:300]!r}")
        return Answer(response.status, time.perf_counter() - due_s)


def render(overload: float, answers: Sequence[Answer]) -> Table:
    """A row for those that were served and one for those that were refused."""
    rate = overload * _CAPACITY
    shown = Table(title=f"{rate:.0f} requests/s, {overload:g} times as many as {_CAPACITY:.0f} requests/s of seats")
    for column in ("", "requests", "p50 ms", "p95 ms", "p99 ms", "longest ms"):
        shown.add_column(column, justify="right" if column else "left")
    for name, status in (("served", _OK), ("refused", _REFUSED)):
        times = Summary.of_seconds(answer.seconds for answer in answers if answer.status == status)
        row = [f"{value:.1f}" for value in (times.p50, times.p95, times.p99, times.max)]
        shown.add_row(f"{name} ({status})", str(times.count), *row)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overload", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="that count")
    arguments = parser.parse_args()
    answers = uvloop.run(measure(arguments.overload, arguments.seconds))
    Console().print(render(arguments.overload, answers))


if __name__ == "__main__":
    main()

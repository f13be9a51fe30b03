"""Requests made to hold up a router, beside a stream and ``/health``: ``python -m benchmarks.heavy_requests [--help]``.

Starts a router without Ray and simulated workers, all on this machine. Each kind of request is sent by several clients
at once, again and again. Meanwhile another process reads one stream, and asks for ``/health`` on a new connection every
20 ms. The usual gap is the stream's largest one without other requests. Exits with 1 if a kind delays ``/health`` by
100 ms (p99) or more, or makes a gap of the stream more than twice the usual one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import httpx
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from baton.bench.latency import Summary
from baton.core.errors import InternalError
from benchmarks.health_probes import Address, probe_at_a_constant_rate
from benchmarks.options import run_command
from benchmarks.router_load.processes import router_under_test
from benchmarks.router_load.setup import Workers

_STEP_MS = 50.0
_KV_BLOCKS = 200_000
_PROBE_LIMIT_MS = 100.0
_GAP_LIMIT = 2.0
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_STREAM_TOKENS = 8000
_TIMEOUT_S = 120.0
_WARM_UP_PIECES = 3


class Event(Protocol):
    """An event that another process can see."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


@dataclass(frozen=True, slots=True)
class Observed:
    """What the other process saw during one kind of request.

    Attributes:
        health: latencies of ``/health`` in milliseconds.
        failed_probes: probes without status 200.
        largest_gap_ms: longest time between two pieces of the stream.
    """

    health: Summary
    failed_probes: int
    largest_gap_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """One kind of request. ``statuses`` counts the answers by status."""

    name: str
    statuses: dict[int, int]
    observed: Observed

    def holds(self, usual_gap_ms: float) -> bool:
        seen = self.observed
        is_quick = seen.health.p99 < _PROBE_LIMIT_MS and seen.failed_probes == 0
        return is_quick and seen.largest_gap_ms <= _GAP_LIMIT * usual_gap_ms


def heavy_bodies(vocab_size: int) -> dict[str, tuple[str, bytes]]:
    """Path and body of each kind of request, for a context of 8,192 tokens. Most are refused."""
    message = {"role": "user", "content": ""}
    part = {"type": "text", "text": "a"}

    def chat(**values: Any) -> tuple[str, bytes]:
        return _CHAT, json.dumps({"max_tokens": 4, **values}, separators=(",", ":")).encode()

    def completion(**values: Any) -> tuple[str, bytes]:
        return _COMPLETIONS, json.dumps({"max_tokens": 4, **values}, separators=(",", ":")).encode()

    return {
        "280,000 empty messages": chat(messages=[message] * 280_000),
        "20,000 empty messages": chat(messages=[message] * 20_000),
        "8,000 empty messages": chat(messages=[message] * 8_000),
        "130,000 short messages": chat(messages=[{"role": "user", "content": "a"}] * 130_000),
        "200,000 text parts": chat(messages=[{"role": "user", "content": [part] * 200_000}]),
        "8 MB of text": completion(prompt="a" * 8_000_000),
        "2.6 MB of one letter": completion(prompt="a" * 2_600_000),
        "2.6 MB, truncated": completion(prompt="a" * 2_600_000, truncate_prompt_tokens=16),
        "1.5 MB of words": chat(messages=[{"role": "user", "content": "hello world " * 125_000}]),
        "500 kB of digits": completion(prompt="7" * 500_000),
        "250 kB of words": completion(prompt="hello world " * 21_000),
        "49,152 biases": completion(prompt="a", logit_bias={str(token): 1 for token in range(vocab_size)}),
        "1,024 biases": completion(prompt="a", logit_bias={str(token): 1 for token in range(1024)}),
        "49,052 stop tokens": completion(prompt="a", stop_token_ids=list(range(100, vocab_size)), min_tokens=2),
        "8 MB of {}": (_COMPLETIONS, b'{"prompt":[' + b",".join([b"{}"] * 2_700_000) + b"]}"),
        "550,000 keys": completion(prompt="a", metadata=dict.fromkeys(map(str, range(550_000)), 1)),
        "4.1 million token ids": completion(prompt=[7] * 4_100_000),
        "260,000 token ids": completion(prompt=[7] * 260_000),
        "1,024 prompts": completion(prompt=["hello world " * 100] * 1024),
        "1,024 streamed prompts": completion(
            prompt=["hello world " * 100] * 1024, stream=True, stream_options={"continuous_usage_stats": True}
        ),
        "10,000 stop strings": completion(prompt="a", stop=["x"] * 10_000),
    }


async def measure(num_clients: int, seconds: float, names: Sequence[str] = ()) -> tuple[float, list[Result]]:
    """Sends every kind of request and returns the usual gap in milliseconds, and the results.

    Args:
        seconds: how long each kind is sent.
        names: the kinds; empty for all.

    Raises:
        InternalError: a process did not start, or the stream ended.
    """
    workers = Workers(decode=2, decode_step_ms=_STEP_MS, kv_blocks=_KV_BLOCKS)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool, context.Manager() as manager:
        async with router_under_test(workers, {"router": {"max_inflight": 2048}}) as target:
            parts = urlsplit(target.endpoint)
            address = str(parts.hostname), int(parts.port or 0)
            events = manager.Event(), manager.Event()
            bodies = heavy_bodies(target.infos[0].vocab_size)
            async with httpx.AsyncClient(base_url=target.endpoint, timeout=_TIMEOUT_S) as http:
                await _during(pool, address, events, _wait(1.0))  # starts the process, and warms the router up
                usual = await _during(pool, address, events, _wait(seconds))
                results = []
                for name in names or bodies:
                    statuses: Counter[int] = Counter()
                    sending = _send(http, *bodies[name], num_clients, seconds, statuses)
                    results.append(Result(name, {}, await _during(pool, address, events, sending)))
                    results[-1].statuses.update(statuses)
    return usual.largest_gap_ms, results


async def _wait(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def _send(
    http: httpx.AsyncClient, path: str, body: bytes, num_clients: int, seconds: float, statuses: Counter[int]
) -> None:
    end_s = time.monotonic() + seconds
    headers = {"Content-Type": "application/json"}

    async def repeat() -> None:
        while True:
            answer = await http.post(path, content=body, headers=headers)
            statuses[answer.status_code] += 1
            if time.monotonic() > end_s:
                return

    await asyncio.gather(*(repeat() for _ in range(num_clients)))


async def _during(
    pool: Executor, address: Address, events: tuple[Event, Event], work: Coroutine[Any, Any, None]
) -> Observed:
    begun, stop = events
    begun.clear()
    stop.clear()
    observing = asyncio.wrap_future(pool.submit(_observe, address, begun, stop))
    try:
        await asyncio.to_thread(begun.wait, _TIMEOUT_S)
        await work
    finally:
        stop.set()
    return await observing


def _observe(address: Address, begun: Event, stop: Event) -> Observed:
    async def observe() -> Observed:
        latencies, gaps = await asyncio.gather(
            probe_at_a_constant_rate(address, stop), _read_stream(address, begun, stop)
        )
        good = [latency for latency in latencies if latency is not None]
        return Observed(Summary.of_seconds(good), len(latencies) - len(good), max(gaps) * 1e3)

    return asyncio.run(observe())


async def _read_stream(address: Address, begun: Event, stop: Event) -> list[float]:
    """Seconds between the pieces of a stream from ``begun``, which it sets, until ``stop``."""
    body = {"prompt": "a stream", "max_tokens": _STREAM_TOKENS, "ignore_eos": True, "stream": True}
    times_s: list[float] = []
    async with (
        httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", timeout=_TIMEOUT_S) as http,
        http.stream("POST", _COMPLETIONS, json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times_s.append(time.perf_counter())
                if len(times_s) == _WARM_UP_PIECES:
                    begun.set()
            if stop.is_set():
                break
    if len(times_s) < _WARM_UP_PIECES + 2:
        raise InternalError(f"the stream ended early with status {answer.status_code}")
    return [after - before for before, after in itertools.pairwise(times_s[_WARM_UP_PIECES:])]


def show(usual_gap_ms: float, results: Sequence[Result]) -> Table:
    """A row for each kind of request."""
    table = Table("kind", "answers", "/health p99", "largest gap", "", box=None)
    for result in results:
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(result.statuses.items()))
        seen = result.observed
        verdict = "" if result.holds(usual_gap_ms) else "too slow"
        table.add_row(result.name, statuses, f"{seen.health.p99:.0f} ms", f"{seen.largest_gap_ms:.0f} ms", verdict)
    return table


def command(
    clients: Annotated[int, typer.Option(min=1, max=64, help="Clients that send at the same time.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long each kind is sent.")] = 4.0,
    kind: Annotated[list[str] | None, typer.Option(help="A kind of request by name. Default: all.")] = None,
) -> None:
    """Send requests that are made to hold up a router, and show what a stream and /health notice."""
    usual_gap_ms, results = uvloop.run(measure(clients, seconds, kind or ()))
    console = Console(width=110)
    console.print(show(usual_gap_ms, results))
    console.print(f"usual gap of the stream: {usual_gap_ms:.0f} ms")
    if not all(result.holds(usual_gap_ms) for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    sys.exit(run_command(command, "benchmarks.heavy_requests"))

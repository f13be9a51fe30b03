"""The measurements, each with a new router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton.bench.latency import Summary
from benchmarks.router_load.client import DirectLoad, StreamOutcome, http_load, open_loop
from benchmarks.router_load.figures import added_latency, mib
from benchmarks.router_load.processes import RouterUnderTest, router_under_test
from benchmarks.router_load.setup import BLOCK_SIZE, Workers

Figures = dict[str, Any]
Report = Callable[[str], None]

_DIRECT_RATE = 20.0
_WARMUP_SHARE = 0.5
"""Warm-up requests per measured request; enough to fill the kept timelines."""
_LONG_EVERY = 15
"""Measured requests per long prompt; long prompts come first and fill the router's records of prompts and caches."""
_SLOW_STEP_MS = 1000.0
_CPU_TICK_S = 0.01
"""The kernel's unit of CPU time."""
_FEW_BLOCKS = 512
"""Blocks of a cache that is soon full, because the router's records of a cache grow with it."""
_PROMPT_TOKENS = 256
"""An upper bound of the load's prompt tokens with any tokenizer."""
_OPENED_PER_S = 150.0


@dataclass(frozen=True, slots=True)
class LatencySettings:
    """The settings of the latency measurement.

    Attributes:
        rate: requests per second of the open loop.
        count: number of measured requests, after half as many for warm-up.
        sizes: prefill and decode workers of each run.
    """

    rate: float = 200.0
    count: int = 3000
    sizes: tuple[tuple[int, int], ...] = ((1, 1), (16, 48))


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The settings of a measurement with streams.

    Attributes:
        streams: number of concurrent streams.
        tokens: number of tokens of each stream.
    """

    streams: int
    tokens: int
    tokens_per_message: int = 1


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The settings of the router.

    Attributes:
        overrides: sections of the configuration.
        profile: file for cProfile's output.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    profile: Path | None = None


async def measure_latency(size: tuple[int, int], settings: LatencySettings, router: RouterSettings) -> Figures:
    """Measures the latency that the router adds to one-token requests, and the growth of its memory."""
    workers = Workers(prefill=size[0], decode=size[1], kv_blocks=_FEW_BLOCKS)
    num_warmup = max(10, int(_WARMUP_SHARE * settings.count))
    async with _under_test(workers, router) as target, http_load(target) as load:
        direct = DirectLoad(target)
        try:
            for number in range(settings.count // _LONG_EVERY):
                await load.long_prompt(number)
            await open_loop(load.one_token, settings.rate, num_warmup)
            await open_loop(direct.one_token, _DIRECT_RATE, max(5, num_warmup // 20))
            before, cpu_s = await target.figures(), target.router.cpu_s
            num_direct = max(5, int(settings.count * _DIRECT_RATE / settings.rate))
            through, directly = await asyncio.gather(
                open_loop(load.one_token, settings.rate, settings.count, num_warmup),
                open_loop(direct.one_token, _DIRECT_RATE, num_direct, num_warmup),
            )
            cpu_s = target.router.cpu_s - cpu_s
            after = await target.figures()
        finally:
            await direct.close()
    whole, worker = Summary.of_seconds(through), Summary.of_seconds(directly)
    return {
        "workers": f"{size[0]}+{size[1]}",
        "rate": settings.rate,
        "through_router_ms": asdict(whole),
        "directly_ms": asdict(worker),
        "added_ms": added_latency(whole, worker),
        "router_cpu_ms_per_request": cpu_s * 1e3 / settings.count,
        "rss_mib": [mib(before["rss_bytes"]), mib(after["rss_bytes"])],
        "python_blocks": [before["num_blocks"], after["num_blocks"]],
        "stages_ms": after["stages"],
    }


async def measure_relay(settings: StreamSettings, router: RouterSettings) -> Figures:
    """Measures the tokens per second that the router relays when workers produce them instantly."""
    workers = Workers(tokens_per_message=settings.tokens_per_message, kv_blocks=_blocks(settings))
    async with _under_test(workers, router) as target, http_load(target) as load:
        await asyncio.gather(*(load.stream(number, 16) for number in range(8)))
        busy_s = _busy_s(target)
        began_s = time.perf_counter()
        outcomes = await asyncio.gather(
            *(load.stream(100 + number, settings.tokens) for number in range(settings.streams))
        )
        seconds = time.perf_counter() - began_s
        router_s, workers_s = (after - before for after, before in zip(_busy_s(target), busy_s, strict=True))
    num_tokens = settings.streams * settings.tokens
    return {
        **asdict(settings),
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_router_cpu_s": num_tokens / max(router_s, _CPU_TICK_S),
        "router_cores": router_s / seconds,
        "workers_cores": workers_s / seconds,
        "events_per_stream": sum(outcome.num_events for outcome in outcomes) / settings.streams,
    }


async def measure_open_streams(settings: StreamSettings, router: RouterSettings) -> Figures:
    """Measures many streams with one token per second each: gaps between tokens, and the router's CPU and memory."""
    async with (
        _under_test(Workers(decode=2, decode_step_ms=_SLOW_STEP_MS, kv_blocks=_blocks(settings)), router) as target,
        http_load(target) as load,
    ):
        before = target.router.rss_bytes
        began_s = time.perf_counter()
        tasks: list[asyncio.Task[StreamOutcome]] = []
        for number in range(settings.streams):
            await asyncio.sleep(max(0.0, began_s + number / _OPENED_PER_S - time.perf_counter()))
            tasks.append(asyncio.create_task(load.stream(number, settings.tokens)))
        opened_cpu_s, opened_s = target.router.cpu_s, time.perf_counter()
        load.settled_s = opened_s
        num_open = sum(not task.done() for task in tasks)
        peak = target.router.rss_bytes
        outcomes = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - opened_s
        cpu_s = target.router.cpu_s - opened_cpu_s
    return {
        **asdict(settings),
        "open_at_once": num_open,
        "finished": len(outcomes),
        "first_token_ms": asdict(Summary.of_seconds(outcome.first_s for outcome in outcomes)),
        "longest_gap_ms": asdict(Summary.of_seconds(outcome.longest_gap_s for outcome in outcomes)),
        "settled_gap_ms": asdict(Summary.of_seconds(outcome.settled_gap_s for outcome in outcomes)),
        "step_ms": _SLOW_STEP_MS,
        "router_cores": cpu_s / seconds,
        "rss_mib": [mib(before), mib(peak)],
    }


def _under_test(workers: Workers, router: RouterSettings) -> AbstractAsyncContextManager[RouterUnderTest]:
    return router_under_test(workers, router.overrides, router.profile)


def _blocks(settings: StreamSettings) -> int:
    """The number of blocks that hold all streams, with some reserve."""
    return settings.streams * (_PROMPT_TOKENS + settings.tokens) // BLOCK_SIZE + _FEW_BLOCKS


def _busy_s(target: RouterUnderTest) -> tuple[float, float]:
    return target.router.cpu_s, target.workers.cpu_s

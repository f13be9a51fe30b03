"""Does the router's memory grow with the requests it has served? ``python -m benchmarks.memory_growth``.

The real router serves more than an hour of virtual requests on simulated workers, in virtual time. Every thousand
requests the Python heap is measured, as ``tracemalloc`` counts it: what grows after the warm-up is a leak. Caches of
simulated workers are in the same heap, so that they are small here, and full before growth counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from baton.core.errors import BatonError
from baton.core.request import SamplingParams
from baton.core.slo import SloClass
from baton.process.background import BackgroundTasks
from benchmarks.router_load.figures import growth_per_thousand, mib
from cluster.config.config import BatonConfig
from cluster.simulation.control_plane import VirtualControlPlane
from cluster.simulation.profile import DEFAULT_PROFILE, TimingProfile, load_profile
from cluster.simulation.sending import send
from cluster.simulation.virtual_loop import run_virtually

_FIRST_TOKEN = 1024
_PROMPT_TOKENS = (64, 192, 640)
_SHARED_TOKENS = 48
_OUTPUT_TOKENS = (1, 24, 80)
_POLL_S = 5.0


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """
    Attributes:
        requests: in all.
        rate: per virtual second; a little over an hour for the defaults.
        warmup: requests before the growth is counted.
        every: requests between two looks at the heap.
        traced: measure the Python heap exactly, which makes it slow; else only resident memory.
    """

    requests: int = 13_000
    rate: float = 3.5
    warmup: int = 6000
    every: int = 1000
    traced: bool = True


@dataclass(slots=True)
class _Samples:
    heap: list[tuple[float, float]] = field(default_factory=list)
    rss: list[tuple[float, float]] = field(default_factory=list)

    def take(self, num_requests: int) -> None:
        gc.collect()
        self.heap.append((num_requests, float(tracemalloc.get_traced_memory()[0])))
        self.rss.append((num_requests, float(psutil.Process().memory_info().rss)))


def measure(settings: MemorySettings, config: BatonConfig | None = None) -> dict[str, Any]:
    """JSON-ready. Growth is in KiB per thousand requests, by least squares over the samples behind the warm-up.

    Raises:
        BatonError: a request failed.
    """
    config = config or small_cluster()
    profile = load_profile(DEFAULT_PROFILE)
    samples = _Samples()
    began_s = time.monotonic()
    if settings.traced:
        tracemalloc.start()
    try:
        virtual_s = run_virtually(lambda: _serve(config, profile, settings, samples))
    finally:
        tracemalloc.stop()
    return {
        "requests": settings.requests,
        "virtual_s": round(virtual_s, 1),
        "wall_s": round(time.monotonic() - began_s, 1),
        "samples": [
            {"requests": int(number), "heap_mib": round(mib(heap), 3), "rss_mib": round(mib(rss), 1)}
            for (number, heap), (_, rss) in zip(samples.heap, samples.rss, strict=True)
        ],
        "heap_kib_per_1000": _growth_kib(samples.heap, settings.warmup),
        "rss_kib_per_1000": _growth_kib(samples.rss, settings.warmup),
    }


def small_cluster() -> BatonConfig:
    """2+2 workers whose caches are full within the warm-up."""
    pool = {"workers": 2, "kv_blocks": 512}
    return BatonConfig.from_dict({"prefill": pool, "decode": pool, "max_model_len": 4096})


def _growth_kib(samples: list[tuple[float, float]], warmup: int) -> float:
    return round(growth_per_thousand(point for point in samples if point[0] >= warmup) / 1024, 2)


async def _serve(config: BatonConfig, profile: TimingProfile, settings: MemorySettings, samples: _Samples) -> float:
    """Virtual seconds that it took."""
    loop = asyncio.get_running_loop()
    plane, tasks = VirtualControlPlane(config, profile, _POLL_S), BackgroundTasks()
    await plane.start()
    slo = config.slo.to_classes().all[0]
    began_s = loop.time()
    failures: list[BatonError] = []
    for number in range(1, settings.requests + 1):
        await asyncio.sleep(max(0.0, began_s + number / settings.rate - loop.time()))
        if failures:
            raise failures[0]
        tasks.spawn(_send(plane, number, slo, failures))
        if number % settings.every == 0:
            samples.take(number)
    await asyncio.sleep(60.0)
    if failures:
        raise failures[0]
    seconds = loop.time() - began_s
    await plane.stop()
    return seconds


async def _send(plane: VirtualControlPlane, number: int, slo: SloClass, failures: list[BatonError]) -> None:
    params = SamplingParams(max_tokens=_OUTPUT_TOKENS[number % len(_OUTPUT_TOKENS)], ignore_eos=True, seed=number)
    answer = await send(plane.router, f"request-{number}", _prompt(number), params, slo)
    if answer.error is not None:
        failures.append(answer.error)


def _prompt(number: int) -> tuple[int, ...]:
    """A beginning that every seventh prompt has, and tokens of its own."""
    num_own = _PROMPT_TOKENS[number % len(_PROMPT_TOKENS)]
    shared = [_FIRST_TOKEN + number % 7] * _SHARED_TOKENS
    return (*shared, *((_FIRST_TOKEN + (number * 31 + index * 7) % 16_000) for index in range(num_own)))


def main(arguments: Sequence[str] | None = None) -> int:
    defaults = MemorySettings()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_growth", description=__doc__)
    parser.add_argument("--requests", type=int, default=defaults.requests)
    parser.add_argument("--rate", type=float, default=defaults.rate, help="per virtual second")
    parser.add_argument("--warmup", type=int, default=defaults.warmup, help="requests before growth counts")
    parser.add_argument("--every", type=int, default=defaults.every, help="requests between two looks")
    parser.add_argument("--rss-only", action="store_true", help="without tracemalloc: faster")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    settings = MemorySettings(options.requests, options.rate, options.warmup, options.every, not options.rss_only)
    found = measure(settings)
    sys.stdout.write("requests   heap MiB   RSS MiB\n")
    for sample in found["samples"]:
        sys.stdout.write(f"{sample['requests']:>8}{sample['heap_mib']:>11.2f}{sample['rss_mib']:>10.1f}\n")
    sys.stdout.write(
        f"{found['virtual_s']:g} virtual seconds in {found['wall_s']:g} s; behind {settings.warmup} requests the heap "
        f"grows by {found['heap_kib_per_1000']:g} KiB and resident memory by {found['rss_kib_per_1000']:g} KiB "
        "per 1,000 requests\n"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

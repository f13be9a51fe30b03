"""All measurements, one after the other, as tables and as JSON."""

from __future__ import annotations

import json
import os
import platform
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvloop
from rich.console import RenderableType

from baton.bench.document import check_writable
from baton.core.errors import ConfigError
from baton.core.version import package_version
from benchmarks.router_load.figures import median_figures
from benchmarks.router_load.measure import (
    Figures,
    LatencySettings,
    Report,
    RouterSettings,
    StreamSettings,
    measure_latency,
    measure_open_streams,
    measure_relay,
)
from benchmarks.router_load.tables import render


class NeighbourWatch:
    """Measures the CPU use of other processes since its creation. Own child processes must have ended before."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._machine_s, self._own_s = _machine_s(), _own_s()

    def cores(self) -> float:
        """The mean number of cores that other processes have used."""
        others_s = (_machine_s() - self._machine_s) - (_own_s() - self._own_s)
        return max(0.0, others_s / max(time.monotonic() - self._began_s, 1e-9))


def _machine_s() -> float:
    """CPU seconds of all processes, without the time that a hypervisor gave to other machines."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def _own_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


FORMAT = "baton-router-load"
VERSION = 1
_BATCH_TOKENS = 8
_SLOW_TOKENS = 30


@dataclass(frozen=True, slots=True)
class RouterLoadSettings:
    """The settings of all measurements.

    Attributes:
        runs: number of runs of every measurement; the median of each figure is shown.
        overrides: sections of the router's and the workers' configuration.
        relay_streams, relay_tokens: streams of the relay measurements, and tokens of each with one token per message.
        relay_batches: tokens per message of each relay measurement.
        open_streams: number of streams with one token per second.
        profile: folder for cProfile's output of the router, which slows it down; ``None`` disables profiling.
    """

    latency: LatencySettings = field(default_factory=LatencySettings)
    relay_streams: int = 64
    relay_tokens: int = 800
    relay_batches: tuple[int, ...] = (1, _BATCH_TOKENS)
    open_streams: int = 2000
    open_tokens: int = _SLOW_TOKENS
    runs: int = 1
    overrides: Mapping[str, Any] = field(default_factory=dict)
    profile: Path | None = None


def run(settings: RouterLoadSettings, report: Report, json_file: Path | None = None) -> RenderableType:
    """Measures with local processes that listen only on 127.0.0.1, and returns the tables to show.

    Raises:
        ConfigError: a file cannot be written.
        BatonError: a process did not start, or a request failed.
    """
    if json_file is not None:
        check_writable("--json", json_file)
    if settings.profile is not None:
        _make_folder(settings.profile)
    document = uvloop.run(_measure(settings, report))
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return render(document)


async def _measure(settings: RouterLoadSettings, report: Report) -> dict[str, Any]:
    neighbours, latencies, relays = NeighbourWatch(), [], []
    for size in settings.latency.sizes:
        name = f"{size[0]}+{size[1]}"
        report(f"latency at {settings.latency.rate:g} requests/s, {name} workers")
        measure = partial(measure_latency, size, settings.latency, _router(settings, f"latency-{name}"))
        latencies.append(await _repeated(settings.runs, measure))
    for per_message in settings.relay_batches:
        report(f"relaying {settings.relay_streams} streams, {per_message} tokens per message")
        streams = StreamSettings(settings.relay_streams, settings.relay_tokens * per_message, per_message)
        measure = partial(measure_relay, streams, _router(settings, f"relay-{per_message}"))
        relays.append(await _repeated(settings.runs, measure))
    report(f"{settings.open_streams} open streams")
    slow = StreamSettings(settings.open_streams, settings.open_tokens)
    open_streams = await _repeated(
        settings.runs, partial(measure_open_streams, slow, _router(settings, "open-streams"))
    )
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "baton": package_version()},
        "runs": settings.runs,
        "latency": latencies,
        "relay": relays,
        "open_streams": open_streams,
        "neighbour_cores": neighbours.cores(),
    }


async def _repeated(runs: int, measure: Callable[[], Awaitable[Figures]]) -> Figures:
    return median_figures([await measure() for _ in range(runs)])


def _router(settings: RouterLoadSettings, name: str) -> RouterSettings:
    return RouterSettings(settings.overrides, settings.profile and settings.profile / f"{name}.prof")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--profile {folder} cannot be created: {error.strerror}. Give a writable folder.") from error

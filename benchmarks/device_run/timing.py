"""Measures work on a device: by events on CUDA, by the host's clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from baton.engine.runner.graph_recorder import CudaGraphRecorder
from benchmarks.device_run.part import Row

_MAX_ROWS = 25
_SHOWN = 5
_NAME_LENGTH = 70


def synchronize(device: torch.device) -> None:
    """Waits until all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def medians(work: Callable[[], Sequence[float]], budget_s: float, max_runs: int = 20) -> list[float]:
    """The medians of the results of ``work`` over as many runs as the budget allows, at least one, after a warm-up."""
    work()
    found: list[Sequence[float]] = []
    ends_s = time.perf_counter() + budget_s
    while not found or (len(found) < max_runs and time.perf_counter() < ends_s):
        found.append(work())
    return [statistics.median(column) for column in zip(*found, strict=True)]


def median_ms(work: Callable[[], float], budget_s: float, max_runs: int = 20) -> float:
    """The median of a single number; see :func:`medians`."""
    return medians(lambda: (work(),), budget_s, max_runs)[0]


def device_ms(work: Callable[[], object], device: torch.device) -> float:
    """The device's milliseconds for ``work``, starting on an idle device, including waits for the host."""
    synchronize(device)
    if device.type != "cuda":
        return host_ms(work)
    cuda: Any = torch.cuda  # its events are untyped
    started, ended = (cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    work()
    ended.record()
    ended.synchronize()
    return float(started.elapsed_time(ended))


def host_ms(work: Callable[[], object]) -> float:
    """Milliseconds until ``work`` returns."""
    started_s = time.perf_counter()
    work()
    return (time.perf_counter() - started_s) * 1e3


def graphed(work: Callable[[], object], device: torch.device, times: int = 10) -> Callable[[], float]:
    """A function that measures the device's milliseconds for ``work``, repeated in a graph, without host overhead."""
    if device.type != "cuda":
        return lambda: host_ms(work)

    def repeat() -> None:
        for _ in range(times):
            work()

    replay = CudaGraphRecorder().record(repeat)
    return lambda: device_ms(replay, device) / times


class WatchedRecorder(CudaGraphRecorder):
    """Records CUDA graphs and remembers the one that was replayed last.

    Attributes:
        last_replay: replays that graph alone.
    """

    last_replay: Callable[[], None] | None = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records a graph and tracks its replays."""
        replay = super().record(run)

        def watched() -> None:
            self.last_replay = replay
            replay()

        return watched


def kernel_rows(work: Callable[[], object], of: str, device: torch.device) -> Iterator[Row]:
    """Yields rows of the longest kernels, and a row for all kernels; on the CPU, of torch's operations.

    The report has 25 of them, the printed table the first five. The host's calls to launch kernels, which the profiler
    also lists, take no device time and do not count.
    """
    work()
    synchronize(device)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        work()
        synchronize(device)
    events = [(str(each.key), int(each.count), _own_us(each, device)) for each in profiler.key_averages()]
    found = [event for event in events if event[2] > 0]
    found.sort(key=lambda each: each[2], reverse=True)
    total = sum(us for _, _, us in found)
    yield {"name": f"kernels of {of}", "count": sum(count for _, count, _ in found), "us": total, "share": 1.0}
    for place, (name, count, us) in enumerate(found[:_MAX_ROWS]):
        row = {"name": f"  {name[:_NAME_LENGTH]}", "count": count, "us": us, "share": us / total}
        yield {**row, "hidden": True} if place >= _SHOWN else row


def _own_us(event: Any, device: torch.device) -> float:
    """The event's own time, without that of its callees, in microseconds."""
    return float(event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total)

"""Kernels by the time they take, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.device_run.part import Row
from benchmarks.device_run.timing import synchronize

_MOST = 25
_SHOWN = 5
_NAME_LENGTH = 70


def kernel_rows(work: Callable[[], object], of: str, device: torch.device) -> Iterator[Row]:
    """The kernels that take longest, and a row for all of them; on the CPU, torch's operations.

    The report has 25 of them, the table on the screen the first five. What the host calls to launch them, which the
    profiler lists as well, takes no time of the device and does not count.
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
    for place, (name, count, us) in enumerate(found[:_MOST]):
        row = {"name": f"  {name[:_NAME_LENGTH]}", "count": count, "us": us, "share": us / total}
        yield {**row, "hidden": True} if place >= _SHOWN else row


def _own_us(event: Any, device: torch.device) -> float:
    """Without what it called."""
    return float(event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total)

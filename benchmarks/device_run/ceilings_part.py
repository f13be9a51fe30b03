"""What the device reads and multiplies per second: the ceilings that every other figure is compared with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.ceilings import measure_ceilings
from benchmarks.device_run.part import Row, Setting


def run(setting: Setting) -> Iterator[Row]:
    """Bandwidth and matrix rate."""
    dtype = torch.float32 if setting.is_tiny else torch.bfloat16
    ceilings = measure_ceilings(dtype, setting.device)
    yield {"name": "read", "gb_per_s": ceilings.bytes_per_second / 1e9}
    yield {"name": f"multiply {ceilings.multiplied}", "tflop_per_s": ceilings.flops_per_second / 1e12}

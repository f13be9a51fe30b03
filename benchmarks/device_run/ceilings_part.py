"""The device's rates of copying, reading and multiplying, with which other figures are compared."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.ceilings import Ceilings, MemoryReader, fp8_matrix_rate, matrix_rate, measure_ceilings
from benchmarks.device_run.part import Row, Setting
from benchmarks.device_run.random_model import DTYPES

_TINY_BYTES = 64 * 2**20
_TINY_SIZES = (256,)


def ceilings_of(setting: Setting) -> Ceilings:
    """Measures the device's ceilings, for parts that compare steps with them."""
    num_bytes, sizes = (_TINY_BYTES, _TINY_SIZES) if setting.is_tiny else (None, None)
    return measure_ceilings(getattr(torch, DTYPES[setting.shape]), setting.device, num_bytes, sizes)


def run(setting: Setting) -> Iterator[Row]:
    """Measures the bandwidth of reading and copying, and the matrix rates, on random data."""
    memory = MemoryReader(setting.device, _TINY_BYTES if setting.is_tiny else None)
    yield {"name": "read", "gb_per_s": memory.bytes_per_second() / 1e9}
    yield {"name": "copy, reads and writes counted", "gb_per_s": memory.copied_bytes_per_second() / 1e9}
    del memory
    sizes = _TINY_SIZES if setting.is_tiny else None
    rate, multiplied = matrix_rate(getattr(torch, DTYPES[setting.shape]), setting.device, sizes)
    yield {"name": f"multiply {multiplied}", "tflop_per_s": rate / 1e12}
    fp8_rate = fp8_matrix_rate(setting.device)
    if fp8_rate is None:
        yield {"name": "multiply fp8", "note": "this device has no matrix products of fp8"}
    else:
        yield {"name": "multiply fp8", "tflop_per_s": fp8_rate / 1e12}

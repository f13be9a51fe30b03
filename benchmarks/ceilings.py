"""The machine's ceilings: memory bandwidth and matrix rate, measured by the simplest code."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import ScalingType, scaled_mm

from baton.engine.models.float32_products import has_bfloat16

_READ_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
# Larger products reach higher rates, up to a size that differs between machines.
_PRODUCT_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
_REPEATS = 5
_WARM_UPS = 2
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The highest rates that this machine reaches.

    Attributes:
        bytes_per_second: the higher of the rate of reading and that of copying, which counts reads and writes.
        flops_per_second: rate of a matrix product, where a multiplication and an addition count as two.
        multiplied: dtype of the product: the model's, or float32 where the CPU has no instructions for bfloat16.
    """

    bytes_per_second: float
    flops_per_second: float
    multiplied: str

    def least_ms(self, num_bytes: float, num_flops: float) -> float:
        """The shortest possible duration of a step that reads and computes this much, in milliseconds."""
        return 1e3 * max(num_bytes / self.bytes_per_second, num_flops / self.flops_per_second)


class MemoryReader:
    """Memory to be read and copied, by default 0.5 GiB on a CPU and 4 GiB on a GPU. It holds random numbers, because
    some GPUs are faster with zeros."""

    def __init__(self, device: torch.device, num_bytes: int | None = None) -> None:
        self._memory = torch.rand((num_bytes or _READ_BYTES[device.type]) // 4, dtype=torch.float32, device=device)

    def bytes_per_second(self) -> float:
        """The rate of reading."""
        return self._memory.nbytes / _seconds(self._memory.sum, self._memory.device)

    def copied_bytes_per_second(self) -> float:
        """The rate of copying one half into the other, counting reads and writes."""
        source, target = self._memory.chunk(2)
        return 2 * source.nbytes / _seconds(partial(target.copy_, source), self._memory.device)


def measure_ceilings(
    dtype: torch.dtype, device: torch.device, num_bytes: int | None = None, sizes: Sequence[int] | None = None
) -> Ceilings:
    """Measures the ceilings, which takes about two seconds on a small CPU.

    Args:
        num_bytes: see :class:`MemoryReader`.
        sizes: see :func:`matrix_rate`.
    """
    memory = MemoryReader(device, num_bytes)
    bandwidth = max(memory.bytes_per_second(), memory.copied_bytes_per_second())
    del memory
    return Ceilings(bandwidth, *matrix_rate(dtype, device, sizes))


def matrix_rate(dtype: torch.dtype, device: torch.device, sizes: Sequence[int] | None = None) -> tuple[float, str]:
    """Operations per second of a product of random matrices, where an addition and a multiplication count as two, and
    the dtype of the product, which is float32 instead of bfloat16 on CPUs without instructions for bfloat16."""
    # There, torch multiplies bfloat16 one by one: widening is faster, and the fused decoder widens too.
    computed = torch.float32 if dtype == torch.bfloat16 and not has_bfloat16(device) else dtype
    rates = []
    for size in sizes or _PRODUCT_SIZES[device.type]:
        left, right = (torch.randn(size, size, device=device).to(computed) for _ in range(2))
        rates.append(2 * size**3 / _seconds(partial(torch.matmul, left, right), device))
    return max(rates), str(computed).removeprefix("torch.")


def fp8_matrix_rate(device: torch.device) -> float | None:
    """Operations per second of e4m3 products with one scale per matrix; ``None`` if the device has none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        return None
    rates = []
    scale = torch.ones((), device=device)
    for size in _PRODUCT_SIZES[device.type]:
        left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        recipe = ScalingType.TensorWise
        product = partial(
            scaled_mm,
            left,
            right.t(),
            scale,
            recipe,
            scale,
            recipe,
            output_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        rates.append(2 * size**3 / _seconds(product, device))
    return max(rates)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The best of several runs, because a ceiling is what the machine can reach."""
    times = []
    for _ in range(_REPEATS + 1):
        started_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started_s)
    return min(times[1:])


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median of the ratios of neighbouring runs."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def in_turn(works: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Runs the works in turn (``A B A B``), so that a machine that slows down slows all of them.

    Returns:
        The results of each work in ``repeats`` rounds, after two rounds of warm-up.
    """
    results: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repeats + _WARM_UPS):
        for name, work in works.items():
            value = work()
            if number >= _WARM_UPS:
                results[name].append(value)
    return results

"""Checks rows quantized to fp8 and to int8 on a device against the rounding bounds, computed in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache import kv_int8
from benchmarks.device_run.attention_world import decoded
from benchmarks.device_run.part import Row

_HALF_STEP = 1 / 16
"""Largest relative rounding error of e4m3. For subnormal numbers it is absolute."""
_MIN_HALF_STEP = 2.0**-10
_SOME = 1 + 1e-4
"""Tolerance for the rounding of scales and quotients to float32, and for inexact division on devices."""
_WIDTHS = (5, 576, 4096, 14336)
_INT8_DIMS = (64, 128, 256)


def _rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows of growing magnitude; the second row is zero, and the third has one dominating number."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(num_rows, width, generator=generator) * 2.0 ** torch.linspace(-10, 10, num_rows)[:, None]
    rows[1] = 0
    rows[2, 0] = 5e4
    return rows.to(dtype).to(device)


def check_fp8_rows(device: torch.device) -> Iterator[Row]:
    """Checks rows of several widths, dtypes and strides, with the Triton kernel on CUDA and with torch on the CPU."""
    from baton.engine.models.fp8_linear import quantize_rows  # imports transformers
    from baton.engine.models.fp8_range import LARGEST, LEAST

    quantize = quantize_rows
    if device.type == "cuda":
        from baton.engine.models.fp8_kernels import quantize_rows_by_kernel  # imports Triton

        quantize = quantize_rows_by_kernel
    for dtype_name, dtype in TORCH_DTYPES.items():
        worst, scales_are_right = 0.0, True
        for width in _WIDTHS:
            rows = _rows(9, 2 * width, dtype, device)
            for taken in (rows[:, :width], rows[:, ::2], rows[::3, :width]):
                items, scales = quantize(taken)
                exact, scale = taken.double().cpu(), scales.double().cpu()
                expected = exact.abs().amax(-1, keepdim=True).clamp_min(LEAST) / LARGEST
                scales_are_right &= bool(((scale / expected - 1).abs() < 1e-6).all())
                bound = (exact.abs() * _HALF_STEP + scale * _MIN_HALF_STEP) * _SOME
                worst = max(worst, _worst_ratio(items.cpu().double() * scale - exact, bound))
        yield {"name": f"{dtype_name} rows to fp8", "ok": scales_are_right and worst <= 1, "of_tolerance": worst}
    items, scales = quantize(_broken_rows(device))
    back = items.cpu().float() * scales.cpu()
    is_right = bool(back[0].isfinite().all()) and not any(bool(row.isfinite().all()) for row in back[1:])
    yield {"name": "rows that are not finite stay so in fp8", "ok": is_right}


def check_int8_rows(device: torch.device) -> Iterator[Row]:
    """Checks rows in the cache's encoding. The error of a number may be half a scale."""
    for dtype_name, dtype in TORCH_DTYPES.items():
        worst = 0.0
        for dim in _INT8_DIMS:
            vectors = _rows(9, dim, dtype, device)
            exact = vectors.double().cpu()
            bound = exact.abs().amax(-1, keepdim=True) / 254 * _SOME + 1e-35
            worst = max(worst, _worst_ratio(decoded(kv_int8.encode_rows(vectors).cpu()) - exact, bound))
        yield {"name": f"{dtype_name} rows to int8", "ok": worst <= 1, "of_tolerance": worst}
    back = decoded(kv_int8.encode_rows(_broken_rows(device)).cpu())
    is_right = bool(back[0].isfinite().all()) and not bool(back[1:].isfinite().any())
    yield {"name": "rows that are not finite stay so in int8", "ok": is_right}


def _broken_rows(device: torch.device) -> torch.Tensor:
    rows = torch.ones(3, 64, device=device)
    rows[1, 3], rows[2, 5] = torch.nan, torch.inf
    return rows


def _worst_ratio(error: torch.Tensor, bound: torch.Tensor) -> float:
    return float((torch.where(torch.isfinite(error), error.abs(), torch.inf) / bound).max())

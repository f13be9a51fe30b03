"""Quantizes activations to fp8 in one Triton kernel; torch would launch five per linear layer, which slows decoding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.engine.models.fp8_range import LARGEST, LEAST

_LARGEST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(LEAST)
_NUMBERS_PER_WARP = 512
_MAX_WARPS = 16


@triton.jit
def quantize_row(
    rows,  # [num_rows, width]
    items,  # [num_rows, width], e4m3, contiguous
    scales,  # [num_rows], float32
    width,
    row_stride,
    block: tl.constexpr,  # a power of two, not below width
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    mask = columns < width
    numbers = tl.load(rows + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), axis=0), _LEAST) / _LARGEST
    tl.store(scales + row, scale)
    tl.store(items + row * width + columns, (numbers / scale).to(items.dtype.element_ty), mask=mask)


def quantize_rows_by_kernel(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows like :func:`baton.engine.models.fp8_linear.quantize_rows`."""
    num_rows, width = rows.shape
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    items = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=rows.device)
    block = 1 << (width - 1).bit_length()
    warps = min(_MAX_WARPS, max(1, block // _NUMBERS_PER_WARP))
    quantize_row[(num_rows,)](rows, items, scales, width, rows.stride(0), block=block, num_warps=warps)
    return items, scales

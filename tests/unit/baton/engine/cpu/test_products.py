"""Products of weight bands, whatever the sizes; a row's result does not depend on the rows beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from baton.engine.cpu.products import BAND, MANY_ROWS, band_product, band_scratch_bytes
from baton.engine.cpu.quantization import quantize_linear_int4
from baton.engine.cpu.structure import Linear
from baton.engine.cpu.subnormals import ignore_subnormals, restore_subnormals
from tests.rounded_weights import numbers_of

KINDS: dict[torch.dtype, Any] = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}
DTYPES = (torch.bfloat16, torch.float32)


@njit(error_model="numpy")
def _product(kind, x, ldx, num_rows, w, scales, grouped, num_columns, k, out, ldo, scratch):
    for first in range(0, num_columns, BAND):
        count = min(BAND, num_columns - first)
        band_product(kind, x, ldx, num_rows, w, scales, grouped, first, count, k, out + 4 * first, ldo, scratch)


def product(
    x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor | None = None, num_columns: int | None = None
) -> torch.Tensor:
    """Of int4 when ``num_columns`` says how many rows of the last band are the weight's."""
    grouped, num_columns = num_columns is not None, num_columns or len(w)
    out = torch.full((len(x), num_columns), torch.nan)
    size = band_scratch_bytes(x.shape[1], x.element_size(), is_quantized=True)
    scratch = torch.full((size,), 0xFF, dtype=torch.uint8)
    _product(
        KINDS[x.dtype], x.data_ptr(), x.element_size() * x.shape[1], len(x), w.data_ptr(),
        0 if scales is None else scales.data_ptr(), grouped, num_columns, x.shape[1], out.data_ptr(), 4 * num_columns,
        scratch.data_ptr(),
    )  # fmt: skip
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 8, 31, 32, 40, 64, 200])
def test_products_are_correct_and_rows_are_independent(k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(k)
    for num_columns in (1, 15, 16, 17, 64):
        w = torch.randn(num_columns, k, generator=generator).to(dtype)
        for num_rows in (1, 2, 3, 4, 5, 7, 9, 17):
            x = torch.randn(num_rows, k, generator=generator).to(dtype)
            result = product(x, w)
            torch.testing.assert_close(result.double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-4)
            for row in range(num_rows):
                assert torch.equal(product(x[row : row + 1], w)[0], result[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [600, 1160, 2350])
def test_a_split_row_is_bit_identical_to_a_whole_one(k: int, dtype: torch.dtype) -> None:
    """Of many tokens, rows that do not fit into the first cache are multiplied part by part; a lone one is not."""
    generator = torch.Generator().manual_seed(k)
    w = torch.randn(32, k, generator=generator).to(dtype)
    x = torch.randn(MANY_ROWS + 7, k, generator=generator).to(dtype)
    result = product(x, w)
    torch.testing.assert_close(result.double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-3)
    for row in range(len(x)):
        assert torch.equal(product(x[row : row + 1], w)[0], result[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 8, 31, 32, 40, 64, 200])
def test_int8_is_bit_identical_to_its_dequantized_operands(k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(k)
    for num_columns in (1, 15, 16, 17, 64):
        whole = torch.randint(-127, 128, (num_columns, k), generator=generator).to(torch.int8)
        scales = torch.rand(num_columns, generator=generator)
        for num_rows in (1, 2, 3, 4, 5, 7, 9, 17, MANY_ROWS + 1):
            x = torch.randn(num_rows, k, generator=generator).to(dtype)
            assert torch.equal(product(x, whole, scales), product(x, whole.to(dtype)) * scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 8, 31, 32, 40, 64, 200])
def test_int4_is_bit_identical_to_its_dequantized_operands(k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(k)
    for num_columns in (1, 15, 16, 17, 64):
        int4 = quantize_linear_int4(Linear(torch.randn(num_columns, k, generator=generator), None))
        same = numbers_of(int4, num_columns, k).to(dtype)
        for num_rows in (1, 2, 3, 4, 5, 7, 9, 17, MANY_ROWS + 1):
            x = torch.randn(num_rows, k, generator=generator).to(dtype)
            assert torch.equal(product(x, int4.weight, int4.scales, num_columns), product(x, same))


@njit
def _begin_forward():
    return ignore_subnormals()


@njit
def _end_forward(before):
    restore_subnormals(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_independent_with_numbers_too_small_for_float32(dtype: torch.dtype) -> None:
    """The instruction for pairs of bfloat16 takes subnormal numbers for zero; what replaces it must, too."""
    generator = torch.Generator().manual_seed(0)
    k = 96
    w = (torch.randn(32, k, generator=generator) * 1e-19).to(dtype)
    x = (torch.randn(MANY_ROWS + 7, k, generator=generator) * 1e-19).to(dtype)
    x[::2] = (x[::2].float() * 1e-19).to(dtype)
    subnormal = torch.tensor(1e-39)

    def multiplied(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous()
        before = _begin_forward()
        try:
            assert subnormal * 1.0 == 0
            return product(rows, w)
        finally:
            _end_forward(before)

    alone = torch.cat([multiplied(row[None]) for row in x])
    assert (alone[1::2] != 0).any()
    for num_rows in (2, 3, 4, 5, 17, len(x)):
        assert torch.equal(multiplied(x[:num_rows]), alone[:num_rows])
    assert subnormal * 1.0 != 0  # the thread is as it was before

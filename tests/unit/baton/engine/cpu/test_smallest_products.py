"""The smallest products that use a CPU's instructions for them, which take no more than a moment to compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from baton.engine.cpu.nibbles import GROUP, dot_band_int4
from baton.engine.cpu.tiles import (
    PAIRS_BYTES,
    TILE,
    configure_tiles,
    has_tiles,
    multiply,
    pack_tokens,
    release_tiles,
    tile_configurations,
)
from baton.engine.cpu.vectors import dot_tile

KINDS: dict[torch.dtype, Any] = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}
ROWS = 4


@njit(error_model="numpy")
def _dot(kind, x, w, row_bytes, k, out):
    dot_tile(kind, kind, 4, 4, 0, 0, x, row_bytes, w, row_bytes, 0, 0, k, out, 16)


@njit(error_model="numpy")
def _dot_int4(kind, x, band, worth, k, out):
    dot_band_int4(kind, x, band, worth, k, out)


@njit(error_model="numpy")
def _multiply(kind, configuration, x, packed, w, k, out):
    configure_tiles(configuration)
    pack_tokens(x, 2 * k, 16, k, packed)
    multiply(kind, 1, 1, 0, w, w, 2 * k, 0, 0, packed, PAIRS_BYTES, 0, k, out, 64, 0, 0)
    release_tiles()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_row_products_match_torch(dtype: torch.dtype) -> None:
    for k in (1, 5, 31, 32, 64, 83):
        generator = torch.Generator().manual_seed(k)
        x, w = (torch.randn(ROWS, k, generator=generator).to(dtype) for _ in range(2))
        out = torch.full((ROWS, ROWS), torch.nan)
        _dot(KINDS[dtype], x.data_ptr(), w.data_ptr(), x.element_size() * k, k, out.data_ptr())
        torch.testing.assert_close(out.double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_an_int4_band_is_multiplied_correctly(dtype: torch.dtype) -> None:
    """A row's four bits are its own number: word ``j`` of four rows holds those of rows 0, 1, 2 and 3, lowest first."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 16, (TILE, GROUP), generator=generator)
    fours = bits.reshape(4, 4, GROUP) << torch.tensor([0, 4, 8, 12])[:, None]
    band = fours.sum(1).to(torch.int32).to(torch.int16).contiguous()
    x = torch.randn(GROUP, generator=generator).to(dtype)
    worth = torch.stack([torch.full((TILE,), 0.5), torch.arange(TILE) / 4 - 2])
    out = torch.full((TILE,), torch.nan)
    _dot_int4(KINDS[dtype], x.data_ptr(), band.data_ptr(), worth.data_ptr(), GROUP, out.data_ptr())
    weights = (bits * worth[0][:, None] + worth[1][:, None]).to(dtype)
    torch.testing.assert_close(out.double(), weights.double() @ x.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no matrix unit")
@pytest.mark.parametrize("k", [32, 96])
def test_a_matrix_unit_tile_is_multiplied_correctly(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x, w = (torch.randn(TILE, k, generator=generator).bfloat16() for _ in range(2))
    packed, out = torch.zeros(TILE * k, dtype=torch.bfloat16), torch.full((TILE, TILE), torch.nan)
    configuration = tile_configurations()
    places = (x.data_ptr(), packed.data_ptr(), w.data_ptr(), k, out.data_ptr())
    _multiply(KINDS[torch.bfloat16], configuration.ctypes.data, *places)
    torch.testing.assert_close(out.double(), w.double() @ x.double().T, rtol=1e-5, atol=1e-5)

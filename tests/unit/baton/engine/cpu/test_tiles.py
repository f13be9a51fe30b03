"""Products by the matrix unit: right, and the same for a token whatever it shares a tile with."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from numba import njit

from baton.engine.cpu import tiles
from baton.engine.cpu.quantization import quantize_linear, quantize_linear_int4
from baton.engine.cpu.structure import Linear
from baton.engine.cpu.tile_products import tile_product, tile_product_bytes
from baton.engine.cpu.tiles import (
    CONFIGURATION_BYTES,
    PAIR_BYTES,
    PAIRS_BYTES,
    TILE,
    configure_tiles,
    has_tiles,
    pack_tokens,
    release_tiles,
    tile_configurations,
)
from tests.rounded_weights import numbers_of

KIND = np.uint16(0)


@njit(error_model="numpy")
def _product(configuration, adds, x, packed, ldp, num_tokens, weights, num_bands, k, out, ldo, scratch):
    configure_tiles(configuration)
    if ldp == PAIR_BYTES:
        packed = x
    else:
        for token in range(0, num_tokens, TILE):
            pack_tokens(x + 2 * token * k, 2 * k, min(TILE, num_tokens - token), k, packed + 2 * token * k)
    for band in range(0, num_bands, 2):
        at_once, place = min(2, num_bands - band), out + 4 * TILE * band
        tile_product(KIND, adds, packed, ldp, num_tokens, weights, TILE * band, at_once, k, place, ldo, scratch)
    release_tiles()


def product(
    x: torch.Tensor, w: torch.Tensor | Linear, *, alone: bool = False, start: torch.Tensor | None = None
) -> torch.Tensor:
    """With operands, or with the weight of a layer of int8 or int4, whose rows fill whole bands."""
    num_tokens, k = x.shape
    linear = w if isinstance(w, Linear) else Linear(w, None)
    is_int4 = linear.weight.dtype == torch.int16
    num_columns = TILE * len(linear.weight) if is_int4 else len(linear.weight)
    weights = (linear.weight.data_ptr(), 0 if linear.scales is None else linear.scales.data_ptr(), int(is_int4))
    configurations = tile_configurations()
    packed = torch.zeros(-(-num_tokens // TILE) * TILE, k, dtype=torch.bfloat16)
    scratch = torch.full((tile_product_bytes(k),), 0xFF, dtype=torch.uint8)
    out = torch.full((num_tokens, num_columns), torch.nan) if start is None else start.clone()
    _product(
        configurations.ctypes.data + (CONFIGURATION_BYTES if alone else 0),
        start is not None, x.data_ptr(), packed.data_ptr(),
        PAIR_BYTES if alone else PAIRS_BYTES, num_tokens, weights, num_columns // TILE, k, out.data_ptr(),
        4 * num_columns, scratch.data_ptr(),
    )  # fmt: skip
    return out


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no matrix unit")
@pytest.mark.parametrize("k", [32, 64, 160])
@pytest.mark.parametrize("num_columns", [16, 32, 48])
def test_products_are_correct_and_tokens_are_independent(num_columns: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    w = torch.randn(num_columns, k, generator=generator).bfloat16()
    for num_tokens in (1, 2, 15, 16, 17, 33, 70):
        x = torch.randn(num_tokens, k, generator=generator).bfloat16()
        result = product(x, w)
        torch.testing.assert_close(result.double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-4)
        for token in range(num_tokens):
            assert torch.equal(product(x[token : token + 1], w, alone=True)[0], result[token])


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no matrix unit")
@pytest.mark.parametrize("num_tokens", [1, 16, 21, 32, 50, 64])
def test_products_accumulate(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x, w = (torch.randn(rows, 96, generator=generator).bfloat16() for rows in (num_tokens, 48))
    start = torch.randn(num_tokens, 48, generator=generator)
    assert torch.equal(product(x, w, start=start), start + product(x, w))
    assert torch.equal(product(x[:1], w, start=start[:1], alone=True), start[:1] + product(x[:1], w, alone=True))


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no matrix unit")
@pytest.mark.parametrize("num_tokens", [1, 20, 70])
def test_weights_can_have_any_alignment(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x, w = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (num_tokens, 32))
    moved = torch.empty(w.numel() + 4, dtype=torch.bfloat16)[4:].view_as(w).copy_(w)
    assert moved.data_ptr() % 64 == 8
    assert torch.equal(product(x, moved), product(x, w))


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no matrix unit")
@pytest.mark.parametrize("k", [64, 192])
def test_int8_and_int4_are_bit_identical_to_their_dequantized_operands(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    linear = Linear(torch.randn(48, k, generator=generator), None)
    int8, int4 = quantize_linear(linear), quantize_linear_int4(linear)
    assert int8.scales is not None
    for num_tokens in (1, 16, 21, 70):
        x = torch.randn(num_tokens, k, generator=generator).bfloat16()
        for alone in (False, True) if num_tokens == 1 else (False,):
            whole, levels = int8.weight.bfloat16(), numbers_of(int4, 48, k).bfloat16()
            assert torch.equal(product(x, int8, alone=alone), product(x, whole, alone=alone) * int8.scales)
            assert torch.equal(product(x, int4, alone=alone), product(x, levels, alone=alone))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What a kernel that refuses was asked for, on a CPU that has a matrix unit."""
    found: list[tuple[int, ...]] = []

    class Refusing:
        def __init__(self, *arguments: object, **options: object) -> None: ...

        def syscall(self, *numbers: int) -> int:
            found.append(numbers)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", Refusing)
    present: dict[str, object] = {
        "sys.platform": "linux",
        "platform.machine": lambda: "x86_64",
        "lanes": lambda: TILE,
        "has_features": lambda *names: True,
    }
    for name, value in present.items():
        monkeypatch.setattr(f"baton.engine.cpu.tiles.{name}", value)
    return found


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("sys.platform", "darwin"),
        ("platform.machine", lambda: "aarch64"),
        ("lanes", lambda: TILE // 2),
        ("has_features", lambda *names: False),
    ],
)
def test_a_cpu_without_tiles_does_not_request_them_from_the_kernel(
    name: str, lacking: object, asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"baton.engine.cpu.tiles.{name}", lacking)
    assert not tiles.has_tiles.__wrapped__()
    assert asked == []


def test_tiles_are_off_if_the_kernel_refuses_them(asked: list[tuple[int, ...]]) -> None:
    assert not tiles.has_tiles.__wrapped__()
    assert len(asked) == 1

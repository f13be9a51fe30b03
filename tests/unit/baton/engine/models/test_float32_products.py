"""Linear layers in bfloat16 that multiply as float32: the same numbers, whatever else is done with the layers."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from baton.engine.models import float32_products
from baton.engine.models.float32_products import LEAST_ROWS, has_bfloat16, speed_up_products

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_products, "has_bfloat16", lambda device: False)


def network(dtype: torch.dtype, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 10, bias=bias), nn.SiLU()).to(dtype)


@pytest.mark.parametrize("shape", [(1,), (LEAST_ROWS,), (2, LEAST_ROWS), (0,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_rounded_once(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    layer = network(dtype, bias=bias)[0]
    speed_up_products(layer, CPU)
    states = torch.randn(*shape, 24).to(dtype)
    found = layer(states)
    assert found.dtype is dtype
    exact = states.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0.0)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def test_only_many_rows_of_bfloat16_are_cast(multiplied: list[torch.dtype]) -> None:
    half, whole = network(torch.bfloat16), network(torch.float32)
    for module in (half, whole, half):
        speed_up_products(module, CPU)
    half(torch.randn(LEAST_ROWS - 1, 24).to(torch.bfloat16))
    half(torch.randn(LEAST_ROWS, 24).to(torch.bfloat16))
    whole(torch.randn(LEAST_ROWS, 24))
    assert multiplied == [torch.bfloat16, torch.float32, torch.float32]


def test_a_copy_and_a_cast_use_their_own_weights() -> None:
    original = network(torch.bfloat16)
    speed_up_products(original, CPU)
    copied = deepcopy(original)
    nn.init.zeros_(copied[0].weight)
    nn.init.zeros_(copied[0].bias)
    states = torch.randn(LEAST_ROWS, 24)
    assert not copied(states.to(torch.bfloat16)).any()
    assert original(states.to(torch.bfloat16)).any()
    torch.testing.assert_close(original.float()(states), network(torch.bfloat16).float()(states))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("", True), ("avx512_core_bf16", True), ("avx512_core", False), ("AVX2", False)],
)
def test_instructions_disabled_in_onednn_do_not_count(
    limit: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert has_bfloat16(CPU) == expected
    assert has_bfloat16(torch.device("meta"))

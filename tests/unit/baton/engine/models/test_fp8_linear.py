"""fp8 weights: exact formulas, refusal of unsupported layers, and conversion of every weight."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.engine.models.fp8_linear import Fp8Linear, check_device, make_linears_fp8, quantize_rows
from baton.engine.models.fp8_range import LARGEST
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.self_check import check_model
from tests.interpreted_triton import interpreted_triton
from tests.tiny_models import tiny_model
from tests.triton_launches import Launches

BLOCK_SIZE = 4
HALF_STEP = 1 / 16
"""Half a step of normal e4m3 numbers, relative to them. Below the smallest normal number, steps are absolute."""
LEAST_HALF_STEP = 2.0**-10


def bfloat16_model(name: str = "llama") -> nn.Module:
    return tiny_model(name).to(torch.bfloat16)


def fp8_model(name: str = "llama") -> LoadedModel:
    return prepare_model(bfloat16_model(name), "bfloat16", "fp8")


def exact_rows(num_rows: int, width: int) -> torch.Tensor:
    """Rows that e4m3 with a scale holds without rounding, from very small ones to very large ones."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (num_rows, width), generator=generator, dtype=torch.uint8)
    bits[bits & 0x7F == 0x7F] = 0  # no numbers
    numbers = bits.view(torch.float8_e4m3fn).float()
    numbers[:, 0] = LARGEST
    return numbers * 2.0 ** torch.arange(-20, num_rows - 20)[:, None]


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(-30, 30))
def test_numbers_round_to_nearest(seed: int, width: int, exponent: int) -> None:
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    items, scales = quantize_rows(rows)
    error = (items.float() * scales - rows).abs()
    assert (error <= rows.abs() * HALF_STEP * 1.001 + scales * LEAST_HALF_STEP).all()


def test_zeros_stay_zeros_and_nan_propagates() -> None:
    rows = torch.zeros(3, 4)
    rows[1, 2] = float("nan")
    rows[2, 0] = float("inf")
    items, scales = quantize_rows(rows)
    back = items.float() * scales
    assert back[0].tolist() == [0.0] * 4
    assert back[1].isnan().any()
    assert not back[2].isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_with_its_rounded_numbers(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16)
    activations = torch.randn(2, 3, 64).to(torch.bfloat16)
    items, scales = quantize_rows(linear.weight.detach())
    rows, row_scales = quantize_rows(activations.view(-1, 64))
    expected = (rows.double() * row_scales) @ (items.double() * scales).t()
    if bias:
        expected += linear.bias.double()
    found = Fp8Linear(linear, quantize_rows)(activations)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.view(-1, 48).double(), expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_layer_that_was_divided_among_ranks_computes_its_part(dim: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    part = linear.weight.detach().narrow(dim, 0, 32).clone()
    linear.weight = nn.Parameter(part, requires_grad=False)  # as localise() leaves it, with the sizes of the whole
    activations = torch.randn(2, 3, part.shape[1]).to(torch.bfloat16)
    found = Fp8Linear(linear, quantize_rows)(activations)
    torch.testing.assert_close(found, activations @ part.t(), rtol=0.1, atol=0.1)


def test_a_large_row_does_not_reduce_the_precision_of_others() -> None:
    linear = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    layer = Fp8Linear(linear, quantize_rows)
    row = torch.randn(1, 64).to(torch.bfloat16)
    beside = layer(torch.cat((row, row * 1e4)))
    torch.testing.assert_close(layer(row)[0], beside[0])


def test_linear_layers_are_replaced_except_the_head() -> None:
    model = bfloat16_model()
    make_linears_fp8(model)
    decoder = model.get_decoder()
    assert not any(type(module) is nn.Linear for module in decoder.modules())
    assert sum(isinstance(module, Fp8Linear) for module in decoder.modules()) == 7 * len(decoder.layers)
    assert type(model.get_output_embeddings()) is nn.Linear
    held = [*decoder.layers.parameters(), *decoder.layers.buffers()]
    assert not any(tensor.dtype is torch.bfloat16 and tensor.ndim == 2 for tensor in held), "a weight is kept"


def test_layers_with_unsupported_sides_are_kept() -> None:
    model = bfloat16_model()
    model.get_decoder().layers[0].mlp.odd = nn.Linear(32, 1, dtype=torch.bfloat16)
    make_linears_fp8(model)
    assert type(model.get_decoder().layers[0].mlp.odd) is nn.Linear


def test_models_without_linear_layers_and_other_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel has no linear layers.*multiples of 16"):
        fp8_model("gpt2")
    with pytest.raises(ConfigError, match=r"fp8.*loaded as torch\.float32.*Set dtype: bfloat16"):
        prepare_model(tiny_model("llama"), "float32", "fp8")


def test_gpus_without_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError, match=r"8\.9.*some GPU has 8\.0"):
        check_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_device(torch.device("cuda"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("kv_cache", ["native", "int8"])
def test_a_model_passes_its_check_and_its_kv_is_incompatible_with_others(name: str, kv_cache: str) -> None:
    loaded = fp8_model(name)
    assert 0.001 < loaded.weights_error < 0.25
    runner = ModelRunner(loaded, 16, BLOCK_SIZE, RunnerOptions(weights="fp8", kv_cache=kv_cache))
    assert not runner.is_fused
    check_model(runner)
    native = ModelRunner(
        prepare_model(bfloat16_model(name), "bfloat16"),
        16,
        BLOCK_SIZE,
        RunnerOptions(decoder="transformers", kv_cache=kv_cache),
    )
    assert runner.spec.differences(native.spec) == ["weights: fp8 here, native there"]
    assert runner.spec.fingerprint() != native.spec.fingerprint()


@pytest.mark.parametrize("error", [0.3, float("nan")])
def test_a_model_that_loses_too_much_is_refused(error: float) -> None:
    runner = ModelRunner(replace(fp8_model(), weights_error=error), 16, BLOCK_SIZE, RunnerOptions(weights="fp8"))
    with pytest.raises(
        UnsupportedModelError, match=r"different logits with fp8 weights.*Set engine\.weights to native"
    ):
        check_model(runner)


def test_incompatible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.weights is fp8, which needs engine\.decoder: transformers or auto"):
        ModelRunner(fp8_model(), 16, BLOCK_SIZE, RunnerOptions(decoder="fused", weights="fp8"))
    with pytest.raises(ConfigError, match=r"is native, but the model was loaded with fp8 weights"):
        ModelRunner(fp8_model(), 16, BLOCK_SIZE)
    with pytest.raises(ConfigError, match=r"is fp8, but the model was loaded with native weights"):
        ModelRunner(prepare_model(bfloat16_model(), "bfloat16"), 16, BLOCK_SIZE, RunnerOptions(weights="fp8"))


def test_the_kernel_quantizes_rows() -> None:
    """The rows need no rounding, because the interpreter rounds differently from GPUs."""
    pytest.importorskip("triton")
    rows = exact_rows(9, 100)
    with interpreted_triton():
        from baton.engine.models.fp8_kernels import quantize_rows_by_kernel

        for taken in (rows, rows[:, ::3], rows[::2], torch.zeros(2, 5)):
            items, scales = quantize_rows_by_kernel(taken)
            expected, expected_scales = quantize_rows(taken)
            assert torch.equal(scales, expected_scales)
            assert torch.equal(items.float(), expected.float())


def test_the_kernel_compiles_to_hardware_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    fp8_kernels = import_module("baton.engine.models.fp8_kernels")
    launches = Launches(fp8_kernels.quantize_row)
    monkeypatch.setattr(fp8_kernels, "quantize_row", launches)
    for width in (576, 14336):
        fp8_kernels.quantize_rows_by_kernel(torch.zeros(2, width, dtype=torch.bfloat16))
        assert "cvt.rn.satfinite.e4m3x2.f32" in launches.compile(90).ptx

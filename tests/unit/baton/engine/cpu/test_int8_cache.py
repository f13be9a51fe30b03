"""The fused decoder over a cache of int8: rows as torch writes them, and everything that it promises natively."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.core.drafts import Draft
from baton.core.errors import ConfigError, UnsupportedModelError
from baton.engine.cpu.int8_rows import pack_row, unpack_rows
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache import kv_int8
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.self_check import check_model
from tests.fused_dtypes import FUSED_DTYPES
from tests.tiny_models import tiny_model
from tests.unit.baton.engine.cpu.test_decoder import (
    BLOCK_SIZE,
    TREE,
    VARIANTS,
    Runners,
    assert_as_good,
    assert_same_in_company,
    assert_trees_are_chains,
    variant,
)

KINDS = {"bfloat16": np.uint16(0), "float32": np.float32(0)}
# Of float32: a number that lies between two whole ones may become either.
ROUNDED = 2e-3


def vectors() -> torch.Tensor:
    """Of all magnitudes, with zeros and what is no number."""
    found = torch.randn(40, 20, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-30, 10)[:, None]
    found[3], found[4, 7], found[5, 0], found[6, 19] = 0.0, torch.nan, torch.inf, -torch.inf
    found[7] = 1e-38
    return found


def test_written_rows_match_torch() -> None:
    exact = vectors()
    rows = torch.zeros(len(exact), 24, dtype=torch.int8)
    for vector, row in zip(exact, rows, strict=True):
        pack_row(vector.numpy(), row.data_ptr())
    expected = kv_int8.encode_rows(exact)
    whole = torch.isfinite(exact).all(-1)
    assert torch.equal(rows[whole], expected[whole])
    assert kv_int8.scales_of_rows(rows)[~whole].isnan().all()


@pytest.mark.parametrize("dtype", sorted(KINDS))
def test_read_rows_match_torch(dtype: str) -> None:
    rows = kv_int8.encode_rows(vectors())
    slots = torch.tensor([5, 0, 39, 8, 8, 30, 4])
    out = torch.empty(len(slots), 20, dtype=TORCH_DTYPES[dtype])
    unpack_rows(KINDS[dtype], rows.data_ptr(), 24, slots.data_ptr(), len(slots), 20, out.data_ptr())
    expected = kv_int8.decode_rows(rows[slots], out.dtype)
    assert torch.equal(out.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert torch.equal(out.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_logits_match_transformers_over_the_same_cache(name: str, dtype: str) -> None:
    runners = Runners(variant(name, dtype), "fused", "transformers", kv_cache="int8")
    assert runners.each[0].is_fused
    a, b, c = (runners.request("x" * index, length) for index, length in enumerate((23, 290, 9), start=1))
    runners.step((a, 22), (b, 270))
    for plan in ([(a, 1, TREE), (b, 13), (c, 5)], [(b, 6, Draft((4, 5))), (c, 4)]):
        fused, plain, exact = runners.step(*plan)
        if dtype == "float32":
            torch.testing.assert_close(fused, exact, rtol=0, atol=ROUNDED * float(exact.abs().max()))
        else:
            assert_as_good(fused, plain, exact)


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize("name", ["three_share", "heads_of_64"])
def test_a_token_is_bit_identical_in_any_batch(name: str, dtype: str) -> None:
    assert_same_in_company(variant(name, dtype), 300, kv_cache="int8")


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize("length", [7, 64, 300])
def test_tree_tokens_are_bit_identical_to_chain_tokens(length: int, dtype: str) -> None:
    assert_trees_are_chains(variant("heads_of_64", dtype), length, "int8")


def test_the_self_check_refuses_a_model_that_loses_too_much() -> None:
    """One number of each key dwarfs the others, as the biases of some models make it."""
    model = tiny_model("qwen2")
    for layer in model.get_decoder().layers:
        with torch.no_grad():
            layer.self_attn.k_proj.bias[::2] = 1e4
    runner = ModelRunner(prepare_model(model, "float32"), 16, BLOCK_SIZE, RunnerOptions(kv_cache="int8"))
    with pytest.raises(UnsupportedModelError, match=r"with an int8 KV cache.*Set engine\.kv_cache to native"):
        check_model(runner)
    check_model(
        ModelRunner(prepare_model(tiny_model("qwen2"), "float32"), 16, BLOCK_SIZE, RunnerOptions(kv_cache="int8"))
    )


def test_the_error_names_both_rounded_weights_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = prepare_model(tiny_model("qwen2"), "float32")
    runner = ModelRunner(loaded, 16, BLOCK_SIZE, RunnerOptions(weights="int8", kv_cache="int8"))
    check_model(runner)
    for name in ("_QUANTIZED_TOLERANCE", "_ENCODED_TOLERANCE"):
        monkeypatch.setattr(f"baton.engine.runner.self_check.{name}", 1e-5)
    with pytest.raises(
        UnsupportedModelError, match=r"int8 weights and an int8 KV cache.*engine\.weights or engine\.kv_cache"
    ):
        check_model(runner)


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_cache is 'int3'.*native, int8"):
        ModelRunner(prepare_model(tiny_model("llama"), "float32"), 16, BLOCK_SIZE, RunnerOptions(kv_cache="int3"))

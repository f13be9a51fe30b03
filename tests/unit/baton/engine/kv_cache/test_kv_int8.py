"""int8 KV: a bounded error, and exactly the size that the layout states."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.kv_spec import KVEncoding
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache import kv_int8

DTYPES = sorted(TORCH_DTYPES)
# Rounding errors of the dtypes, and numbers that are too small for a scale.
ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}
TOO_SMALL = {"float32": 1e-35, "bfloat16": 1e-35, "float16": 2.0**-24}

shapes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 2, 3, 5, 8, 17, 64]))
magnitudes = st.sampled_from([0.0, 1e-42, 1e-38, 1e-20, 1e-3, 1.0, 50.0, 6e4, 1e20, 3.3e38])


def passed(vectors: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Encoded, moved to any address, and decoded."""
    tokens, heads, dim = vectors.shape
    room = torch.empty(offset + tokens * heads * KVEncoding.INT8.vector_bytes(dim, 0), dtype=torch.uint8)
    kv_int8.encode(vectors[None], room[None, offset:])
    return kv_int8.decode(room[None, offset:], (tokens, heads, dim), vectors.dtype)[0]


def assert_near(vectors: torch.Tensor, dtype: str) -> None:
    found, true = passed(vectors).double(), vectors.double()
    largest = true.abs().amax(-1, keepdim=True)
    bound = largest / 254 * (1 + 1e-4) + found.abs() * ROUNDING[dtype] + TOO_SMALL[dtype]
    assert torch.isfinite(found).all()
    assert ((found - true).abs() <= bound).all()


@settings(deadline=None)
@given(st.sampled_from(DTYPES), shapes, st.lists(magnitudes, min_size=20, max_size=20), st.integers(0, 2**32))
def test_the_error_is_at_most_a_254th_of_the_largest_number_of_a_vector(
    dtype: str, shape: tuple[int, int, int], sizes: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    numbers *= torch.tensor(sizes, dtype=torch.float64)[: shape[0] * shape[1]].view(shape[0], shape[1], 1)
    limit = torch.finfo(TORCH_DTYPES[dtype]).max
    assert_near(numbers.clamp(-limit, limit).to(TORCH_DTYPES[dtype]), dtype)


@settings(deadline=None)
@given(st.data())
def test_the_error_bound_holds_for_any_numbers(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float32", "float16"]))
    floats = st.floats(width=32 if dtype == "float32" else 16, allow_nan=False, allow_infinity=False)
    numbers = data.draw(st.lists(floats, min_size=3, max_size=3))
    assert_near(torch.tensor(numbers, dtype=TORCH_DTYPES[dtype]).view(1, 1, 3), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_number_is_preserved(dtype: str) -> None:
    """It stays finite, and equal to within a millionth, which is finer than half precision."""
    limits = torch.finfo(TORCH_DTYPES[dtype])
    vectors = torch.tensor([[[limits.max, 0.0, -1.0]], [[-limits.max, 5.0, 5.0]], [[7.0, 1.0, 2.0]]])
    vectors = vectors.to(TORCH_DTYPES[dtype])
    torch.testing.assert_close(passed(vectors)[:, 0, 0], vectors[:, 0, 0], rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nan_spreads_only_within_its_vector(dtype: str, broken: float) -> None:
    vectors = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(3)).to(TORCH_DTYPES[dtype])
    vectors[2, 1, 4] = broken
    vectors[3, 2] = broken
    found = passed(vectors)
    hurt = torch.zeros(4, 3, dtype=torch.bool)
    hurt[2, 1] = hurt[3, 2] = True
    assert not torch.isfinite(found[hurt]).any()
    assert torch.isfinite(found[~hurt]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype: str) -> None:
    vectors = torch.ones(3, 2, 5, dtype=TORCH_DTYPES[dtype])
    vectors[1] = 0
    found = passed(vectors)
    assert not found[1].any()
    torch.testing.assert_close(found[0], vectors[0], rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_alignment_does_not_matter(dtype: str, offset: int) -> None:
    vectors = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(4)).to(TORCH_DTYPES[dtype])
    assert torch.equal(passed(vectors, offset), passed(vectors))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_rows_equal_transferred_rows(dtype: str) -> None:
    """Broken vectors and zeros included."""
    vectors = torch.randn(7, 3, 8, generator=torch.Generator().manual_seed(5)).to(TORCH_DTYPES[dtype])
    vectors[1, 1], vectors[2, 0, 3], vectors[3, 2, 1] = 0.0, math.nan, math.inf
    rows = kv_int8.encode_rows(vectors)
    assert rows.dtype == torch.int8
    assert rows.shape == (7, 3, 12)
    found = kv_int8.decode_rows(rows, vectors.dtype)
    assert torch.equal(found.nan_to_num(5.0), passed(vectors).nan_to_num(5.0))
    assert found.dtype == vectors.dtype
    assert not torch.isfinite(found[2, 0]).any()

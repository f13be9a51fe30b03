"""The softmax of whole splits against numpy's, and at its edges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from baton.engine.cpu.key_slots import KEY_CHUNK
from baton.engine.cpu.split_softmax import weigh_split
from baton.engine.cpu.subnormals import ignore_subnormals, restore_subnormals
from baton.engine.cpu.tiles import has_tiles

pytestmark = pytest.mark.skipif(not has_tiles(), reason="this CPU has no matrix unit")
Row = npt.NDArray[np.float32]


@njit(error_model="numpy")
def _weigh(scores, stride, num_rows, num_chunks, scaling, tops, sums):
    before = ignore_subnormals()
    weigh_split(scores, stride, num_rows, num_chunks, scaling, tops, sums)
    restore_subnormals(before)


def weigh(scores: Row, scaling: float = 1.0) -> tuple[Row, Row, Row]:
    """Weights, largest scores and sums of rows ``[num_rows, num_keys]``, each of which must not depend on others."""
    num_rows, num_keys = scores.shape
    together = _weights_of(scores, scaling)
    for number in range(num_rows):
        alone = _weights_of(scores[number : number + 1], scaling)
        for one, row in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], row[number])
    assert together[0].shape == (num_rows, num_keys)
    return together


def _weights_of(scores: Row, scaling: float) -> tuple[Row, Row, Row]:
    num_rows, num_keys = scores.shape
    padded = np.full((num_rows, num_keys + 16), 77.0, dtype=np.float32)
    padded[:, :num_keys] = scores
    tops, sums = np.empty(num_rows, dtype=np.float32), np.empty(num_rows, dtype=np.float32)
    places = (padded.ctypes.data, 4 * (num_keys + 16), num_rows, num_keys // KEY_CHUNK)
    _weigh(*places, np.float32(scaling), tops.ctypes.data, sums.ctypes.data)
    assert (padded[:, num_keys:] == 77.0).all()
    weights = torch.from_numpy(padded).view(torch.bfloat16)[:, :num_keys].float().numpy()
    return weights, tops, sums


@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.1, 1.0, 30.0]), st.integers(0, 2**32 - 1))
def test_weights_match_the_exponential_function(num_rows: int, num_chunks: int, spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal((num_rows, num_chunks * KEY_CHUNK)) * spread).astype(np.float32)
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    scores[rng.random(num_rows) < 0.2] = -np.inf
    weights, tops, sums = weigh(scores, 0.125)
    np.testing.assert_array_equal(tops, scores.max(axis=1))
    seen = tops > -np.inf
    assert (weights[~seen] == 0).all()
    assert (sums[~seen] == 0).all()
    exact = np.exp(0.125 * (scores[seen].astype(np.float64) - tops[seen, None]))
    np.testing.assert_allclose(weights[seen], exact, rtol=2**-8, atol=1e-37)
    np.testing.assert_allclose(sums[seen], exact.sum(axis=1), rtol=1e-5)
    assert (weights[scores == -np.inf] == 0).all()
    assert (weights[seen].max(axis=1) == 1.0).all()


def test_unseen_chunks_change_no_bit() -> None:
    scores = np.full((5, 4 * KEY_CHUNK), -np.inf, dtype=np.float32)
    scores[:, : KEY_CHUNK + 7] = np.random.default_rng(0).standard_normal((5, KEY_CHUNK + 7))
    few, many = weigh(scores[:, : 2 * KEY_CHUNK]), weigh(scores)
    np.testing.assert_array_equal(few[0], many[0][:, : 2 * KEY_CHUNK])
    np.testing.assert_array_equal(few[2], many[2])


def test_nan_propagates() -> None:
    scores = np.zeros((5, KEY_CHUNK), dtype=np.float32)
    scores[1, 3] = np.nan
    weights, _, sums = _weights_of(scores, 1.0)
    np.testing.assert_array_equal(np.isnan(sums), [False, True, False, False, False])
    assert np.isnan(weights[1, 3])

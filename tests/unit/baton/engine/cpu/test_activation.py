"""``silu(gate) * up`` against numpy's, in every length, and at its edges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from baton.engine.cpu.activation import gated_silu

Row = npt.NDArray[np.float32]


@njit(error_model="numpy")
def _gated_silu(kind, gate, up, count, out):
    gated_silu(kind, gate, up, count, out)


def gated(gate: Row, up: Row) -> Row:
    out = np.full(gate.size + 1, 77.0, dtype=np.float32)
    _gated_silu(np.float32(0), gate.ctypes.data, up.ctypes.data, gate.size, out.ctypes.data)
    assert out[-1] == 77.0
    return out[:-1]


@pytest.mark.parametrize("count", [1, 15, 16, 17, 64, 100])
@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
def test_the_activation_matches_numpy(count: int, spread: float) -> None:
    rng = np.random.default_rng(count)
    gate, up = (rng.standard_normal((2, count)) * spread).astype(np.float32)
    exact = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    # What a power of two is raised to is a float32: the error grows with it.
    assert (np.abs(gated(gate, up) - exact) <= 3e-7 * (1 + np.abs(gate)) * np.abs(exact)).all()


def test_large_gates_stay_finite_and_nan_propagates() -> None:
    gate = np.array([1e4, 3e38, -1e4, -3e38, -0.0, np.nan, np.inf] + [0.0] * 9, dtype=np.float32)
    result = gated(gate, np.full(16, 2.0, dtype=np.float32))
    np.testing.assert_array_equal(result[:5], np.array([2e4, np.inf, 0.0, 0.0, 0.0], dtype=np.float32))
    assert np.isnan(result[5])
    assert result[6] == np.inf


@pytest.mark.parametrize("count", [16, 21])
def test_bfloat16_rounds_the_same_result(count: int) -> None:
    gate, up = np.random.default_rng(1).standard_normal((2, count)).astype(np.float32)
    out = np.full(count + 1, 77, dtype=np.uint16)
    _gated_silu(np.uint16(0), gate.ctypes.data, up.ctypes.data, count, out.ctypes.data)
    assert out[-1] == 77
    wide = (out[:-1].astype(np.uint32) << 16).view(np.float32)
    exact = gated(gate, up)
    assert (np.abs(wide - exact) <= 2.0**-8 * np.abs(exact)).all()


def test_the_result_can_overwrite_its_input() -> None:
    gate, up = np.random.default_rng(2).standard_normal((2, 40)).astype(np.float32)
    expected = gated(gate, up)
    _gated_silu(np.float32(0), gate.ctypes.data, up.ctypes.data, 40, gate.ctypes.data)
    np.testing.assert_array_equal(gate, expected)

"""Scores of a few keys: right, and with the same bits for all heads together as for each alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core.dispatcher import Dispatcher

from baton.engine.cpu.attention import scratch_floats
from baton.engine.cpu.emitter import LONGEST_STEP
from baton.engine.cpu.key_slots import KEY_CHUNK
from baton.engine.cpu.scores import keys_at_once, score, score_heads, takes_heads
from baton.engine.cpu.widening import is_kept, whole_steps, widen_rows

NUM_SLOTS, NUM_HEADS = 40, 3
KINDS = {"bfloat16": np.uint16(0), "float32": np.float32(0)}


@njit(error_model="numpy")
def _scores(kind, q, num_rows, dim, keys, vector_bytes, slots, together, apart, widened):
    ld_head, ldq, ldk = num_rows * vector_bytes, vector_bytes, NUM_HEADS * vector_bytes
    if not is_kept(kind):
        ldw = 4 * whole_steps(kind, dim)
        widen_rows(kind, NUM_HEADS * num_rows, q, ldq, dim, widened, ldw)
        q, ld_head, ldq = widened, num_rows * ldw, ldw
    count = keys_at_once(num_rows)
    for head in range(NUM_HEADS):
        k, out = keys + head * vector_bytes, apart + 4 * KEY_CHUNK * num_rows * head
        score(kind, q + head * ld_head, ldq, num_rows, k, ldk, slots, count, dim, out)
    if takes_heads(num_rows, dim):
        heads, cache = (q, ld_head, ldq, NUM_HEADS), (keys, ldk, vector_bytes)
        score_heads(kind, num_rows, dim, heads, cache, slots, together, keys)


def operands(name: str, rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Them, and their values."""
    bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16 << 16
    values = bits.view(np.float32)
    return (bits >> 16).astype(np.uint16) if name == "bfloat16" else values, values


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [20, 40, 64, 80, 128])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7])
def test_heads_computed_together_are_bit_identical_to_single_heads(name: str, dim: int, num_rows: int) -> None:
    rng = np.random.default_rng(dim + num_rows)
    (q, q_values), (keys, key_values) = (
        operands(name, rng, NUM_HEADS, num_rows, dim),
        operands(name, rng, NUM_SLOTS, NUM_HEADS, dim),
    )
    slots, count = rng.permutation(NUM_SLOTS)[:16], int(keys_at_once.py_func(num_rows))
    widened: Any = np.zeros((NUM_HEADS * num_rows, dim + LONGEST_STEP), dtype=np.float32)
    together, apart = (np.full((NUM_HEADS, num_rows, KEY_CHUNK), 77.0, dtype=np.float32) for _ in range(2))
    _scores(
        KINDS[name], q.ctypes.data, num_rows, dim, keys.ctypes.data, q.itemsize * dim, slots.ctypes.data,
        together.ctypes.data, apart.ctypes.data, widened.ctypes.data,
    )  # fmt: skip
    expected = np.einsum("hrd,khd->hrk", q_values.astype(np.float64), key_values[slots[:count]].astype(np.float64))
    np.testing.assert_allclose(apart[..., :count], expected, rtol=1e-4, atol=1e-4)
    assert (apart[..., count:] == 77.0).all()
    if num_rows <= 4 and dim in (64, 128):
        np.testing.assert_array_equal(together, apart)
    else:
        assert (together == 77.0).all()


def test_the_required_memory_is_known_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a function was compiled, which takes half a second of every start")

    monkeypatch.setattr(Dispatcher, "compile", refuse)
    assert scratch_floats(64) > 0

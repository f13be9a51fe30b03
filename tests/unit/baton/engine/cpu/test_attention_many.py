"""Many rows against a chunk's keys: the bits of a few rows, whatever the CPU multiplies with."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from baton.engine.cpu.attention import MAX_ROWS
from baton.engine.cpu.attention_many import row_scratch_bytes, score_many, takes_many
from baton.engine.cpu.emitter import LONGEST_STEP, lanes
from baton.engine.cpu.key_slots import KEY_CHUNK, number_rows
from baton.engine.cpu.scores import score
from baton.engine.cpu.widening import is_kept, whole_steps, widen_rows

NUM_SLOTS, NUM_HEADS = 300, 3
KINDS = {"bfloat16": np.uint16(0), "float32": np.float32(0)}


@njit(error_model="numpy")
def _prepared(kind, q, ldq, num_rows, dim, widened):
    """Rows as tiles take them, and bytes from one to the next."""
    if is_kept(kind):
        return q, ldq
    ldw = 4 * whole_steps(kind, dim)
    widen_rows(kind, num_rows, q, ldq, dim, widened, ldw)
    return widened, ldw


@njit(error_model="numpy")
def _few(kind, q, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores, widened):
    q, ldq = _prepared(kind, q, ldq, num_rows, dim, widened)
    for i in range(num_rows):
        score(kind, q + i * ldq, ldq, 1, keys, ldk, slots, num_keys, dim, scores + 4 * KEY_CHUNK * i)


@njit(error_model="numpy")
def _many(kind, q, ldq, num_rows, keys, ldk, slots, num_keys, dim, lanes, scores, widened, memory):
    if not takes_many(kind, num_rows, dim, lanes):
        return -1
    number_rows(memory)
    q, ldq = _prepared(kind, q, ldq, num_rows, dim, widened)
    return score_many(kind, q, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores, memory)


def operands(name: str, rng: np.random.Generator, *shape: int) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if name == "bfloat16" else values


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("first", "num_rows"), [(0, 16), (0, 63), (5, 21)])
def test_many_rows_are_bit_identical_to_few(name: str, dim: int, first: int, num_rows: int) -> None:
    rng = np.random.default_rng(dim + num_rows)
    kind = KINDS[name]
    q, keys = operands(name, rng, MAX_ROWS, dim), operands(name, rng, NUM_SLOTS, NUM_HEADS, dim)
    item = keys.itemsize
    memory = np.zeros(int(row_scratch_bytes.py_func(dim)), dtype=np.uint8)
    widened = np.zeros((MAX_ROWS, dim + LONGEST_STEP), dtype=np.float32)
    key_at, ldk, ldq = keys.ctypes.data + item * dim, item * NUM_HEADS * dim, item * dim
    for num_keys in (16, 48, 64):
        slots = rng.permutation(NUM_SLOTS)[:KEY_CHUNK]
        few, many = (np.full((MAX_ROWS, KEY_CHUNK), 77.0, dtype=np.float32) for _ in range(2))
        places = (key_at, ldk, slots.ctypes.data, num_keys, dim)
        rows = (kind, q.ctypes.data + first * ldq, ldq, num_rows)
        _few(*rows, *places, few.ctypes.data, widened.ctypes.data)
        done = _many(*rows, *places, lanes(), many.ctypes.data, widened.ctypes.data, memory.ctypes.data)
        assert num_rows - 1 <= done <= num_rows
        np.testing.assert_array_equal(many[:done], few[:done])
        assert (many[done:] == 77.0).all()
        assert (many[:, num_keys:] == 77.0).all()


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_unsupported_heads_and_few_rows_are_left_alone(name: str) -> None:
    kind = KINDS[name]
    q, slots = operands(name, np.random.default_rng(0), MAX_ROWS, 72), np.zeros(KEY_CHUNK, dtype=np.int64)
    memory, scores = np.zeros(100_000, dtype=np.uint8), np.zeros((MAX_ROWS, KEY_CHUNK), dtype=np.float32)
    for dim, num_rows in ((64, 15), (72, 32)):
        places = (q.ctypes.data, 0, slots.ctypes.data, 64, dim, lanes(), scores.ctypes.data, 0, memory.ctypes.data)
        assert _many(kind, q.ctypes.data, 2 * dim, num_rows, *places) == -1

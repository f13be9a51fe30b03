"""Intel AMX in compiled Python: a thread's eight tiles, and the fused decoder's instructions on them.

A thread's tiles are memory that ``ldtilecfg`` allocates and ``tilerelease`` frees. As on the real unit, an instruction
without a configuration ends the process, and so does a product of tiles with incompatible sizes.
"""

from __future__ import annotations

import ctypes

import llvmlite.binding
import numpy as np
from numba import cfunc, njit, types

from baton.engine.cpu.vectors import float_of_bits, pointer_to

_CONFIGURATION, _TILE, _ROW = 64, 1024, 64
_STATE = _CONFIGURATION + 8 * _TILE
_BYTE, _PAIR, _FLOAT = np.uint8(0), np.uint16(0), np.float32(0)
_calloc = types.ExternalFunction("calloc", types.int64(types.int64, types.int64))
_free = types.ExternalFunction("free", types.void(types.int64))
_memcpy = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
_memset = types.ExternalFunction("memset", types.int64(types.int64, types.int32, types.int64))
_abort = types.ExternalFunction("abort", types.void())
_get = types.ExternalFunction("pthread_getspecific", types.int64(types.uint32))
_set = types.ExternalFunction("pthread_setspecific", types.int32(types.uint32, types.int64))


def _new_key() -> int:
    """Creates the thread-local key under which a thread stores the address of its tiles."""
    key = ctypes.c_uint32()
    if ctypes.CDLL(None).pthread_key_create(ctypes.byref(key), None):
        raise RuntimeError("this process has no thread-local key left for the tiles of an emulated matrix unit")
    return key.value


@njit
def _rows(state, tile):
    return np.int64(pointer_to(_BYTE, state)[48 + tile])


@njit
def _row_bytes(state, tile):
    return np.int64(pointer_to(_BYTE, state)[16 + 2 * tile])


@njit
def _row(state, tile, row):
    return state + _CONFIGURATION + tile * _TILE + row * _ROW


@njit
def _widened(bits):
    return float_of_bits(np.int32(np.int64(bits) << 16))


def define_symbols() -> None:
    """Defines ``emulated.NAME`` for the unit's instructions, for code that is compiled or loaded in this process."""
    key = np.uint32(_new_key())

    @njit
    def state_of_thread():
        state = _get(key)
        if state == 0:
            _abort()
        return state

    def ldtilecfg(configuration):
        state = _get(key)
        if state == 0:
            state = _calloc(1, _STATE)
            _set(key, state)
        _memset(state, 0, _STATE)
        _memcpy(state, configuration, _CONFIGURATION)

    def tilerelease():
        _free(_get(key))
        _set(key, 0)

    def tilezero(tile):
        _memset(_row(state_of_thread(), tile, 0), 0, _TILE)

    def tileloadd64(tile, memory, stride):
        state = state_of_thread()
        _memset(_row(state, tile, 0), 0, _TILE)
        for row in range(_rows(state, tile)):
            _memcpy(_row(state, tile, row), memory + row * stride, _row_bytes(state, tile))

    def tilestored64(tile, memory, stride):
        state = state_of_thread()
        for row in range(_rows(state, tile)):
            _memcpy(memory + row * stride, _row(state, tile, row), _row_bytes(state, tile))

    def tdpbf16ps(sums, first, second):
        state = state_of_thread()
        num_rows, num_columns, num_pairs = _rows(state, sums), _row_bytes(state, sums) // 4, _rows(state, second)
        if (
            num_rows != _rows(state, first)
            or num_columns != _row_bytes(state, second) // 4
            or num_pairs != _row_bytes(state, first) // 4
        ):
            _abort()
        for row in range(num_rows):
            totals = pointer_to(_FLOAT, _row(state, sums, row))
            left = pointer_to(_PAIR, _row(state, first, row))
            for pair in range(num_pairs):
                right = pointer_to(_PAIR, _row(state, second, pair))
                for number in range(2):
                    factor = np.float64(_widened(left[2 * pair + number]))
                    for column in range(num_columns):
                        product = factor * np.float64(_widened(right[2 * column + number]))
                        totals[column] = np.float32(np.float64(totals[column]) + product)

    byte, address = types.int8, types.int64
    signatures = {
        ldtilecfg: (address,),
        tilerelease: (),
        tilezero: (byte,),
        tileloadd64: (byte, address, address),
        tilestored64: (byte, address, address),
        tdpbf16ps: (byte, byte, byte),
    }
    for instruction, arguments in signatures.items():
        compiled = cfunc(types.void(*arguments))(instruction)
        _KEPT.append(compiled)
        llvmlite.binding.add_symbol(f"emulated.{instruction.__name__}", compiled.address)


_KEPT: list[object] = []
"""Keeps the targets of symbols alive."""

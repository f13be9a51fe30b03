"""Locates a chunk's keys and values in the paged cache: a list of slots, in whole tiles."""

from __future__ import annotations

from numba import njit

from baton.engine.cpu.arithmetic import numbers
from baton.engine.cpu.emitter import LINE_BYTES
from baton.engine.cpu.tables import Span
from baton.engine.cpu.vectors import prefetch

KEY_CHUNK = 64
"""Keys that are attended to together."""
SPLIT_KEYS = 4 * KEY_CHUNK
"""Keys that are summed separately, so that several threads can share a long context."""
_TILE_KEYS = 16


@njit(error_model="numpy")
def _slot(blocks, block_size, place):
    return blocks[place // block_size] * block_size + place % block_size


@njit(error_model="numpy")
def fill_slots(span, blocks, block_size, first, count, slots_at):
    """Writes the slots of places ``[first, first + count)``; fills the tile up with the last one.

    Returns:
        Their number, in whole tiles.
    """
    out = numbers(slots_at, KEY_CHUNK)
    place = first
    end = first + count
    while place < end:
        block = place // block_size
        base = blocks[block] * block_size - block * block_size
        stop = min(end, (block + 1) * block_size)
        for p in range(place, stop):
            out[p - first] = base + p
        place = stop
    return _complete(span, blocks, block_size, first, count, out)


@njit(error_model="numpy")
def fill_path(span, token, blocks, block_size, first, count, slots_at):
    """Like :func:`fill_slots`, for a token of a tree: after the tree's start come its ancestors and itself."""
    out = numbers(slots_at, KEY_CHUNK)
    tree_start, size = span[Span.TREE_START], span[Span.PATH_SIZE]
    path = numbers(span[Span.PATHS] + 8 * token * size, size)
    for p in range(first, first + count):
        out[p - first] = _slot(blocks, block_size, p if p < tree_start else path[p - tree_start])
    return _complete(span, blocks, block_size, first, count, out)


@njit(error_model="numpy")
def _complete(span, blocks, block_size, first, count, out):
    """Replaces slots outside of what may be read: before the first key, and after the last one."""
    # Such memory may hold values that are not finite, and weight zero does not remove them from a sum.
    for j in range(min(count, span[Span.FIRST_KEY] - first)):
        out[j] = _slot(blocks, block_size, span[Span.FIRST_KEY])
    j = count
    while j % _TILE_KEYS:
        out[j] = out[count - 1]
        j += 1
    return j


@njit(error_model="numpy")
def ask_for(address, num_bytes):
    """Prefetches ``num_bytes`` at an address that need not exist."""
    for place in range(0, num_bytes, LINE_BYTES):
        prefetch(address + place)


@njit(error_model="numpy")
def ask_for_rows(base, ld, slots_at, first, last, num_bytes):
    """Prefetches the rows at slots ``[first, last)`` of a list."""
    slots = numbers(slots_at, last)
    for j in range(first, last):
        ask_for(base + slots[j] * ld, num_bytes)


@njit(error_model="numpy")
def number_rows(memory):
    """Writes the numbers from 0 on, which are the slots of rows that lie one after the other."""
    in_order = numbers(memory, KEY_CHUNK)
    for j in range(KEY_CHUNK):
        in_order[j] = j

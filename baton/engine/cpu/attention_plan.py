"""Divides a batch's attention into work items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.core.drafts import ROOT, depths_of
from baton.engine.batch.attention_groups import Span as AttentionSpan
from baton.engine.cpu.attention_state import STATE_ROWS, state_floats, whole_rows
from baton.engine.cpu.key_slots import SPLIT_KEYS
from baton.engine.cpu.tables import Item

Table = npt.NDArray[np.int64]
_NEVER = 1 << 62
# With fewer items per thread than the first number, long ones are split so that all threads have work. With fewer
# splits per thread than the second, heads are computed separately, although only all of them together read memory in
# order.
_ITEMS_PER_THREAD = 4
_SPLITS_PER_THREAD = 2


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """The tables that the program reads; ``memory`` keeps alive what the tables point to.

    Attributes:
        spans, items, joins: ``[number, columns]``, see :mod:`baton.engine.cpu.tables`.
    """

    spans: Table
    items: Table
    joins: Table
    memory: tuple[object, ...]


class AttentionPlan:
    """Makes the tables of a step.

    Args:
        max_rows: limit for the query rows of an item, over all its KV heads.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, max_rows: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._share = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._max_rows = max_rows
        self._queries_per_item = max(1, max_rows // self._share)

    def tables(self, spans: list[AttentionSpan], num_threads: int) -> AttentionTables:
        """Returns the tables. Items with the longest contexts come first."""
        blocks = np.array([block for span in spans for block in span.block_ids], dtype=np.int64)
        memory: list[object] = [blocks]
        address, first_token = int(blocks.ctypes.data), 0
        rows: list[tuple[int, ...]] = []
        items: list[tuple[int, ...]] = []
        for number, span in enumerate(spans):
            tree_start, tree, visible = _NEVER, (0, 0, 0), None
            if span.parents:
                tree_start, (paths, visible) = span.tree_start, _tree_of(span)
                memory += [paths, visible]
                tree = (int(paths.ctypes.data), paths.shape[1], int(visible.ctypes.data))
            rows.append((address, span.start, first_token, tree_start, *tree, span.first_key))
            address += 8 * len(span.block_ids)
            first_token += span.num_tokens
            for first in range(0, span.num_tokens, self._queries_per_item):
                count = min(self._queries_per_item, span.num_tokens - first)
                end = span.start + first + count if visible is None else int(visible[first : first + count].max())
                items.append((number, 0, first, count, end, 0, 0, self._num_kv_heads))
        items = self._cut_by_heads(items, _SPLITS_PER_THREAD * num_threads if num_threads > 1 else 1)
        joins: list[tuple[int, ...]] = []
        if len(items) < _ITEMS_PER_THREAD * num_threads and num_threads > 1:
            items, joins = self._split(items, memory)
        items.sort(key=lambda item: -item[Item.END] * item[Item.COUNT] * item[Item.HEADS])
        return AttentionTables(
            np.array(rows, dtype=np.int64),
            np.array(items, dtype=np.int64),
            np.array(joins, dtype=np.int64),
            tuple(memory),
        )

    def _cut_by_heads(self, items: list[tuple[int, ...]], wanted: int) -> list[tuple[int, ...]]:
        """Divides items by KV heads: as many heads per item as memory allows, or fewer to have ``wanted`` items.

        Splits count as items, since they are made next.
        """
        limits = [self._most_heads(item[Item.COUNT] * self._share) for item in items]
        splits = [-(-item[Item.END] // SPLIT_KEYS) for item in items]
        most = self._num_kv_heads
        while most > 1 and wanted > sum(
            count * -(-self._num_kv_heads // min(most, limit)) for count, limit in zip(splits, limits, strict=True)
        ):
            most //= 2
        return [
            (item[Item.SPAN], head, *item[Item.FIRST : Item.HEADS], min(most, limit, self._num_kv_heads - head))
            for item, limit in zip(items, limits, strict=True)
            for head in range(0, self._num_kv_heads, min(most, limit))
        ]

    def _most_heads(self, num_rows: int) -> int:
        """KV heads of an item of ``num_rows`` rows per head for which there is memory."""
        return max(1, min(self._max_rows // num_rows, STATE_ROWS // int(whole_rows.py_func(num_rows))))

    def _split(
        self, items: list[tuple[int, ...]], memory: list[object]
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Returns one item for each split of the keys, and the items that join them."""
        counts = [-(-item[Item.END] // SPLIT_KEYS) for item in items]
        sizes = [
            4 * item[Item.HEADS] * int(state_floats.py_func(item[Item.COUNT] * self._share, self._head_dim))
            for item in items
        ]
        needed = sum(size * count for size, count in zip(sizes, counts, strict=True) if count > 1)
        states = np.empty(needed, dtype=np.uint8)
        memory.append(states)
        state = int(states.ctypes.data)
        parts: list[tuple[int, ...]] = []
        joins: list[tuple[int, ...]] = []
        for item, count, size in zip(items, counts, sizes, strict=True):
            if count == 1:
                parts.append(item)
                continue
            joins.append((*item[: Item.STATE], state, count, item[Item.HEADS]))
            parts += [(*item[: Item.STATE], state + split * size, split, item[Item.HEADS]) for split in range(count)]
            state += count * size
        return parts, joins


def _tree_of(span: AttentionSpan) -> tuple[Table, Table]:
    """Returns each new token's path, the places of its ancestors in the tree and its own ``[new tokens, depth of the
    tree]``, and how many keys it sees ``[new tokens]``."""
    depths = depths_of(span.parents)
    paths = np.zeros((len(span.parents), 1 + max(depths)), dtype=np.int64)
    for node, (parent, depth) in enumerate(zip(span.parents, depths, strict=True)):
        if parent != ROOT:
            paths[node, :depth] = paths[parent, :depth]
        paths[node, depth] = span.tree_start + node
    num_outside = max(0, span.tree_start - span.start)
    outside = np.arange(span.start + 1, span.start + 1 + num_outside)
    nodes = range(max(0, span.start - span.tree_start), len(span.parents))
    visible = np.array([*outside, *(span.tree_start + depths[node] + 1 for node in nodes)], dtype=np.int64)
    return np.concatenate((np.zeros((num_outside, paths.shape[1]), dtype=np.int64), paths[nodes.start :])), visible

"""Cuts a batch's attention into work items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention_groups import Span as AttentionSpan
from engine.fused.attention import MAX_ROWS, SPLIT_KEYS, state_floats
from engine.fused.tables import Item

Table = npt.NDArray[np.int64]
_NEVER = 1 << 62
# With fewer items than that for each thread, long ones are split so that all threads have work.
_ITEMS_PER_THREAD = 4


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """What the program reads; ``memory`` holds what the tables point to.

    Attributes:
        spans, items, joins: ``[number, columns]``, see :mod:`engine.fused.tables`.
    """

    spans: Table
    items: Table
    joins: Table
    memory: tuple[object, ...]


class AttentionPlan:
    """Makes the tables of a step."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._share = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._queries_per_item = max(1, MAX_ROWS // self._share)

    def tables(self, spans: list[AttentionSpan], num_threads: int) -> AttentionTables:
        """Items with the longest contexts come first."""
        blocks = np.array([block for span in spans for block in span.block_ids], dtype=np.int64)
        memory: list[object] = [blocks]
        address, first_token = int(blocks.ctypes.data), 0
        rows: list[tuple[int, ...]] = []
        items: list[tuple[int, ...]] = []
        for number, span in enumerate(spans):
            tree_start, hidden = _NEVER, 0
            if span.parents:
                mask: torch.Tensor = span.hidden_tree_keys().contiguous()
                memory.append(mask)
                tree_start, hidden = span.tree_start, mask.data_ptr()
            rows.append((address, span.start, first_token, tree_start, hidden, len(span.parents), span.first_key))
            address += 8 * len(span.block_ids)
            first_token += span.num_tokens
            for first in range(0, span.num_tokens, self._queries_per_item):
                count = min(self._queries_per_item, span.num_tokens - first)
                items += [(number, head, first, count, 0, 0) for head in range(self._num_kv_heads)]
        joins: list[tuple[int, ...]] = []
        if len(items) < _ITEMS_PER_THREAD * num_threads and num_threads > 1:
            items, joins = self._split(items, spans, memory)
        items.sort(key=lambda item: -_num_keys(item, spans) * item[Item.COUNT])
        return AttentionTables(
            np.array(rows, dtype=np.int64),
            np.array(items, dtype=np.int64),
            np.array(joins, dtype=np.int64),
            tuple(memory),
        )

    def _split(
        self, items: list[tuple[int, ...]], spans: list[AttentionSpan], memory: list[object]
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """One item for each split of the keys, and what puts them together again."""
        counts = [-(-_num_keys(item, spans) // SPLIT_KEYS) for item in items]
        sizes = [4 * state_floats(item[Item.COUNT] * self._share, self._head_dim) for item in items]
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
            joins.append((*item[: Item.STATE], state, count))
            parts += [(*item[: Item.STATE], state + split * size, split) for split in range(count)]
            state += count * size
        return parts, joins


def _num_keys(item: tuple[int, ...], spans: list[AttentionSpan]) -> int:
    """Keys that the item's last query sees."""
    return spans[item[Item.SPAN]].start + item[Item.FIRST] + item[Item.COUNT]

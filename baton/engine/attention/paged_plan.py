"""Batch metadata for attention kernels that read the block table: integers, copied to the device once per batch.

sequences  [num_seqs + 1, 5]        a row for each sequence, see :class:`Column`; one more marks the end of the last one
tables     [num_seqs, num_blocks]   ids of its blocks
positions  [num_tokens]             position of each new token, where a tree makes it differ from its place
nodes      [num_seqs, tree_size]    position of each node of a sequence's tree
ancestors  [num_tokens, tree_words] bit ``node % 32`` of word ``node // 32``: the token may see that node

All of them are parts of one int32 buffer, so that a batch costs one copy to the device. The buffer of a CUDA graph is
refilled for each batch; tokens that a batch leaves unused belong to a last sequence that sees one key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from baton.core.drafts import ROOT
from baton.engine.batch.attention_groups import AttentionGroup, Span
from baton.engine.device.uploads import upload, upload_into

_WORD = 32
_ALIGNMENT = 4  # integers: kernels are recompiled for addresses that are not multiples of 16 bytes
_NO_TREE = 2**31 - 1
# Sequences with more new tokens are computed in a launch of their own, so that they do not determine others' tiles.
_MANY_TOKENS = 64


class Column(IntEnum):
    """Columns of :attr:`PagedPlan.sequences`; positions count from the beginning of the sequence."""

    TOKEN = 0  # index of its first new token in the batch
    START = 1  # place of that token
    END = 2  # place after the last key
    FIRST_KEY = 3  # place of the first key that may be attended to
    TREE_START = 4  # place of the first node of its tree


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent sequences that one launch computes.

    Attributes:
        first, num_seqs: which of the plan's sequences.
        num_tokens: their new tokens together.
        max_tokens: new tokens of the longest one.
        max_keys: keys of the one that has most.
    """

    first: int
    num_seqs: int
    num_tokens: int
    max_tokens: int
    max_keys: int


@dataclass(frozen=True, slots=True)
class PlanSize:
    """Capacity of a plan.

    Attributes:
        tree_size: nodes of the largest tree, 0 without trees.
    """

    num_seqs: int
    num_tokens: int
    num_blocks: int
    tree_size: int = 0

    @property
    def tree_words(self) -> int:
        return -(-self.tree_size // _WORD)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the plan's arrays, in their order in the buffer."""
        tree_tokens = self.num_tokens if self.tree_size else 0
        return (
            (self.num_seqs + 1, len(Column)),
            (self.num_seqs, self.num_blocks),
            (tree_tokens, 1),
            (self.num_seqs if self.tree_size else 0, self.tree_size),
            (tree_tokens, self.tree_words),
        )

    @property
    def places(self) -> list[slice]:
        """Places of the arrays in the buffer."""
        found, offset = [], 0
        for rows, columns in self.shapes:
            found.append(slice(offset, offset + rows * columns))
            offset += -(-rows * columns // _ALIGNMENT) * _ALIGNMENT
        return found


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The arrays described above. The tensors are int32 and contiguous."""

    sequences: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor
    nodes: torch.Tensor
    ancestors: torch.Tensor
    segments: tuple[Segment, ...]

    @property
    def has_trees(self) -> bool:
        return bool(self.nodes.numel())


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """An ``AttentionBatch`` with a ready plan, for backends that take plans."""

    slots: torch.Tensor
    plan: PagedPlan

    @property
    def groups(self) -> list[AttentionGroup]:
        """Empty: backends that take plans need no groups."""
        return []


def make_plan(spans: Sequence[Span], device: torch.device) -> PagedPlan:
    """Makes a plan of exactly the size that the spans need."""
    size = PlanSize(
        num_seqs=len(spans),
        num_tokens=sum(span.num_tokens for span in spans),
        num_blocks=max(len(span.block_ids) for span in spans),
        tree_size=max(len(span.parents) for span in spans),
    )
    return _plan_in(upload(_fill(spans, size), device), size, _segments(spans))


class StaticPlan:
    """A plan whose tensors keep their addresses while batches are written into them one after the other.

    Args:
        size: the most that a batch may need; its last sequence takes unused tokens.
        max_tokens: new tokens that a sequence may have.
        block_size: tokens per block.
        scratch_block: block with the one key that unused tokens see.
    """

    def __init__(
        self, size: PlanSize, max_tokens: int, block_size: int, scratch_block: int, device: torch.device
    ) -> None:
        self._size = size
        self._max_tokens = max_tokens
        self._scratch_block = scratch_block
        self._buffer = upload(_fill((), size, scratch_block), device).clone()
        whole = Segment(0, size.num_seqs, size.num_tokens, max_tokens, size.num_blocks * block_size)
        self.plan = _plan_in(self._buffer, size, (whole,))

    def fits(self, spans: Sequence[Span]) -> bool:
        """Whether :meth:`fill` has room for the spans."""
        return (
            len(spans) < self._size.num_seqs
            and max(span.num_tokens for span in spans) <= self._max_tokens
            and sum(span.num_tokens for span in spans) <= self._size.num_tokens
            and max(len(span.block_ids) for span in spans) <= self._size.num_blocks
            and max(len(span.parents) for span in spans) <= self._size.tree_size
        )

    def fill(self, spans: Sequence[Span]) -> None:
        """Replaces the batch in the buffer."""
        upload_into(self._buffer, _fill(spans, self._size, self._scratch_block))


def _fill(spans: Sequence[Span], size: PlanSize, scratch_block: int | None = None) -> npt.NDArray[np.int32]:
    """Returns the buffer of a plan; with a scratch block, the last sequence gets the unused tokens."""
    buffer = np.zeros(max(place.stop for place in size.places), dtype=np.int32)
    sequences, tables, positions, nodes, ancestors = (
        buffer[place].reshape(shape) for place, shape in zip(size.places, size.shapes, strict=True)
    )
    sequences[:, Column.TREE_START] = _NO_TREE
    token = 0
    for row, span in enumerate(spans):
        tree_start = span.tree_start if span.parents else _NO_TREE
        sequences[row] = (token, span.start, span.end, span.first_key, tree_start)
        tables[row, : len(span.block_ids)] = span.block_ids
        if size.tree_size:
            positions[token : token + span.num_tokens, 0] = span.positions()
        if span.parents:
            nodes[row, : len(span.parents)] = span.node_positions()
            ancestors[token : token + span.num_tokens] = _ancestor_words(span, size.tree_words)
        token += span.num_tokens
    sequences[len(spans) :, Column.TOKEN] = token
    if scratch_block is not None:
        sequences[-2, Column.END] = 1
        tables[-1, 0] = scratch_block
        token = size.num_tokens
    sequences[-1, Column.TOKEN] = token
    return buffer


def _ancestor_words(span: Span, num_words: int) -> npt.NDArray[np.int32]:
    """Returns ``[num_tokens, num_words]``; all bits of a token before the tree are 0."""
    size = len(span.parents)
    related = np.eye(size, num_words * _WORD, dtype=np.bool_)
    for node, parent in enumerate(span.parents):
        if parent != ROOT:
            related[node] |= related[parent]
    bits = np.zeros((span.num_tokens, num_words * _WORD), dtype=np.bool_)
    first = span.tree_start - span.start  # negative where a part of the tree is older
    bits[max(0, first) :] = related[max(0, -first) :]
    return np.packbits(bits, axis=1, bitorder="little").view("<i4")


def _plan_in(buffer: torch.Tensor, size: PlanSize, segments: tuple[Segment, ...]) -> PagedPlan:
    sequences, tables, positions, nodes, ancestors = (
        buffer[place].view(shape) for place, shape in zip(size.places, size.shapes, strict=True)
    )
    return PagedPlan(sequences, tables, positions, nodes, ancestors, segments)


def _segments(spans: Sequence[Span]) -> tuple[Segment, ...]:
    """Runs of sequences with few and with many new tokens; at most two, since batches are sorted."""
    runs: list[list[int]] = []
    for index, span in enumerate(spans):
        if not runs or (span.num_tokens > _MANY_TOKENS) != (spans[index - 1].num_tokens > _MANY_TOKENS):
            runs.append([])
        runs[-1].append(index)
    if len(runs) > 2:
        runs = [list(range(len(spans)))]
    return tuple(_segment(run[0], [spans[index] for index in run]) for run in runs)


def _segment(first: int, spans: Sequence[Span]) -> Segment:
    return Segment(
        first=first,
        num_seqs=len(spans),
        num_tokens=sum(span.num_tokens for span in spans),
        max_tokens=max(span.num_tokens for span in spans),
        max_keys=max(span.end - span.first_key for span in spans),
    )

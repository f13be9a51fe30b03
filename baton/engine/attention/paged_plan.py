"""Batch metadata for attention kernels that read the block table: integers, copied to the device once per batch.

sequences       [num_seqs + 1, 5]        a row for each sequence, see :class:`Column`; one more marks the last one's end
tables          [num_seqs, num_blocks]   ids of its blocks
positions       [num_tokens]             position of each new token, where a tree makes it differ from its place
nodes           [num_seqs, tree_size]    position of each node of a sequence's tree
ancestors       [num_tokens, tree_words] bit ``node % 32`` of word ``node // 32``: the token may see that node
pieces          [num_pieces, 4]          a row for each piece of a sequence's keys, see :class:`PieceColumn`
rows_of_tokens  [num_tokens, 3]          if any is divided: first row of a token, distance of its rows, their number

All of them are parts of one int32 buffer, so that a batch costs one copy to the device. The buffer of a CUDA graph is
refilled for each batch; tokens that a batch leaves unused belong to a last sequence that sees one key.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.core.drafts import ROOT
from baton.engine.attention.key_sharing import UNDIVIDED, KeySharing
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


class PieceColumn(IntEnum):
    """Columns of :attr:`PagedPlan.pieces`. Pieces that a static plan leaves unused have ``SPLITS`` 0."""

    ROW = 0  # index of its first row; a piece has a row for each new token of its sequence
    SEQUENCE = 1
    SPLIT = 2  # which of the sequence's pieces it is
    SPLITS = 3  # number of the sequence's pieces


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent sequences that one launch computes.

    Attributes:
        first_piece, num_pieces: which of the plan's pieces.
        first_row, num_rows: their rows.
        num_tokens: new tokens of all sequences.
        max_tokens: new tokens of the longest one.
    """

    first_piece: int
    num_pieces: int
    first_row: int
    num_rows: int
    num_tokens: int
    max_tokens: int

    @property
    def is_divided(self) -> bool:
        """Whether a sequence may have several pieces."""
        return self.num_rows > self.num_tokens


@dataclass(frozen=True, slots=True)
class PlanSize:
    """Capacity of a plan.

    Attributes:
        tree_size: nodes of the largest tree, 0 without trees.
        extra_pieces: pieces beyond one of each sequence.
    """

    num_seqs: int
    num_tokens: int
    num_blocks: int
    tree_size: int = 0
    extra_pieces: int = 0

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
            (self.num_seqs + self.extra_pieces, len(PieceColumn)),
            (self.num_tokens if self.extra_pieces else 0, 3),
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
    pieces: torch.Tensor
    rows_of_tokens: torch.Tensor
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


def make_plan(spans: Sequence[Span], device: torch.device, sharing: KeySharing = UNDIVIDED) -> PagedPlan:
    """Makes a plan of exactly the size that the spans need."""
    runs = _runs(spans)
    counts = [count for run in runs for count in sharing.counts(run)]
    size = PlanSize(
        num_seqs=len(spans),
        num_tokens=sum(span.num_tokens for span in spans),
        num_blocks=max(len(span.block_ids) for span in spans),
        tree_size=max(len(span.parents) for span in spans),
        extra_pieces=sum(counts) - len(spans),
    )
    return _plan_in(upload(_fill(spans, counts, size), device), size, _segments(runs, counts))


class StaticPlan:
    """A plan whose tensors keep their addresses while batches are written into them one after the other.

    Args:
        size: the most that a batch may need, without extra pieces; its last sequence takes unused tokens.
        max_tokens: new tokens that a sequence may have.
        block_size: tokens per block.
        scratch_block: block with the one key that unused tokens see.
        sharing: how keys are divided.
    """

    def __init__(
        self,
        size: PlanSize,
        max_tokens: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
        sharing: KeySharing = UNDIVIDED,
    ) -> None:
        max_keys = size.num_blocks * block_size
        self._size = replace(size, extra_pieces=sharing.most_extra_pieces(max_keys))
        self._max_tokens = max_tokens
        self._scratch_block = scratch_block
        self._sharing = sharing
        self._buffer = upload(_fill((), (), self._size, scratch_block), device).clone()
        num_pieces = size.num_seqs + self._size.extra_pieces
        num_rows = size.num_tokens + sharing.most_extra_rows(max_keys, max_tokens)
        whole = Segment(0, num_pieces, 0, num_rows, size.num_tokens, max_tokens)
        self.plan = _plan_in(self._buffer, self._size, (whole,))

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
        upload_into(self._buffer, _fill(spans, self._sharing.counts(spans), self._size, self._scratch_block))


def _fill(
    spans: Sequence[Span], counts: Sequence[int], size: PlanSize, scratch_block: int | None = None
) -> npt.NDArray[np.int32]:
    """Returns the buffer of a plan; with a scratch block, the last sequence gets the unused tokens.

    Args:
        counts: number of pieces of each sequence.
    """
    buffer = np.zeros(max(place.stop for place in size.places), dtype=np.int32)
    sequences, tables, positions, nodes, ancestors, pieces, rows_of_tokens = (
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
    _fill_pieces(pieces, rows_of_tokens, sequences[:, Column.TOKEN], counts)
    return buffer


def _fill_pieces(
    pieces: npt.NDArray[np.int32],
    rows_of_tokens: npt.NDArray[np.int32],
    tokens: npt.NDArray[np.int32],
    counts: Sequence[int],
) -> None:
    """Fills the plan's arrays of these names, which are zero.

    Args:
        tokens: the sequences' first tokens, and the end. Behind the sequences of ``counts``, only the last has tokens.
    """
    splits = np.zeros(len(tokens) - 1, dtype=np.int64)
    splits[: len(counts)] = counts
    if len(counts) < len(splits):
        splits[-1] = 1
    starts, num_tokens = tokens[:-1], np.diff(tokens)
    first_pieces, first_rows = _starts_of(splits), _starts_of(splits * num_tokens)
    owners = np.repeat(np.arange(len(splits)), splits)
    own = pieces[: len(owners)]
    own[:, PieceColumn.SEQUENCE] = owners
    own[:, PieceColumn.SPLIT] = np.arange(len(owners)) - first_pieces[owners]
    own[:, PieceColumn.SPLITS] = splits[owners]
    own[:, PieceColumn.ROW] = first_rows[owners] + own[:, PieceColumn.SPLIT] * num_tokens[owners]
    pieces[len(owners) :, PieceColumn.ROW] = splits @ num_tokens
    if len(rows_of_tokens):
        owners = np.repeat(np.arange(len(splits)), num_tokens)
        rows_of_tokens[:, 0] = first_rows[owners] + np.arange(len(owners)) - starts[owners]
        rows_of_tokens[:, 1] = num_tokens[owners]
        rows_of_tokens[:, 2] = splits[owners]


def _starts_of(lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Where each part begins if parts of these lengths follow one another."""
    return np.cumsum(lengths, dtype=np.int64) - lengths


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
    sequences, tables, positions, nodes, ancestors, pieces, rows_of_tokens = (
        buffer[place].view(shape) for place, shape in zip(size.places, size.shapes, strict=True)
    )
    return PagedPlan(sequences, tables, positions, nodes, ancestors, pieces, rows_of_tokens, segments)


def _runs(spans: Sequence[Span]) -> list[Sequence[Span]]:
    """Runs of sequences with few and with many new tokens; at most two, since batches are sorted."""
    runs: list[list[Span]] = []
    for span in spans:
        if not runs or (span.num_tokens > _MANY_TOKENS) != (runs[-1][-1].num_tokens > _MANY_TOKENS):
            runs.append([])
        runs[-1].append(span)
    return [*runs] if len(runs) <= 2 else [spans]


def _segments(runs: Sequence[Sequence[Span]], counts: Sequence[int]) -> tuple[Segment, ...]:
    """A segment for each run. ``counts`` are numbers of pieces, for the sequences of all runs."""
    segments: list[Segment] = []
    left = iter(counts)
    first_piece = first_row = 0
    for run in runs:
        own = list(itertools.islice(left, len(run)))
        num_rows = sum(span.num_tokens * count for span, count in zip(run, own, strict=True))
        num_tokens, max_tokens = sum(span.num_tokens for span in run), max(span.num_tokens for span in run)
        segments.append(Segment(first_piece, sum(own), first_row, num_rows, num_tokens, max_tokens))
        first_piece, first_row = first_piece + sum(own), first_row + num_rows
    return tuple(segments)

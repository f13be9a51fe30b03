"""Scheduler output → tensors for one forward. Sequences lie one after the other, without padding:

token_ids   | a0 | b7 | c2 c3 c4 c5 |        a and b decode, c prefills a chunk of four
positions   |  9 |  7 |  2  3  4  5 |
slots       where each token's key and value go
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.kv_cache import slots_of
from engine.scheduler import ScheduledSequence

# Sequences share one padded gather while the shortest context is at least this part of the longest.
_MAX_PADDING_RATIO = 2


@dataclass(frozen=True, slots=True)
class KVView:
    """The cached positions that a group of sequences attends to.

    Attributes:
        slots: int64 ``[num_seqs * num_keys]``, each sequence padded with one of its own.
        num_keys: padded number of positions per sequence.
        mask: additive, ``[num_seqs, 1, num_queries, num_keys]``; None when everything is visible.
    """

    slots: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class AttentionGroup:
    """Adjacent sequences with the same number of new tokens, attended in one call.

    Attributes:
        token_start: index of the group's first token in the batch.
        num_seqs: sequences in the group.
        num_queries: new tokens of each.
        context_lengths: positions of each after this step.
        block_tables: block ids of each.
    """

    token_start: int
    num_seqs: int
    num_queries: int
    context_lengths: list[int]
    block_tables: list[list[int]]
    block_size: int
    device: torch.device
    mask_dtype: torch.dtype
    _views: dict[int | None, KVView] = field(default_factory=dict)

    @property
    def token_end(self) -> int:
        return self.token_start + self.num_seqs * self.num_queries

    def view(self, sliding_window: int | None) -> KVView:
        """The group's keys under a window; built once per step and window, used by every layer that has it."""
        if sliding_window not in self._views:
            self._views[sliding_window] = self._build_view(sliding_window)
        return self._views[sliding_window]

    def _build_view(self, window: int | None) -> KVView:
        queries = self.num_queries
        starts = [0 if window is None else max(0, end - queries - window + 1) for end in self.context_lengths]
        num_keys = max(end - start for start, end in zip(starts, self.context_lengths, strict=True))
        slots = torch.empty(self.num_seqs, num_keys, dtype=torch.int64)
        for row, (start, end) in enumerate(zip(starts, self.context_lengths, strict=True)):
            own = slots_of(self.block_tables[row], start, end, self.block_size)
            slots[row, : end - start] = own
            # Padding repeats a position of the same sequence: a masked value that is not a number still spoils the
            # sum, and must not come from somebody else.
            slots[row, end - start :] = own[-1]
        # positions[row, key] of each key, and of each query, decide what is visible
        first = torch.tensor(starts)[:, None]
        key_positions = first + torch.arange(num_keys)
        query_positions = torch.tensor(self.context_lengths)[:, None] - queries + torch.arange(queries)
        visible = key_positions[:, None, :] <= query_positions[:, :, None]
        if window is not None:
            visible &= key_positions[:, None, :] > query_positions[:, :, None] - window
        mask = None
        if not bool(visible.all()):
            mask = torch.zeros(visible.shape, dtype=self.mask_dtype).masked_fill_(~visible, float("-inf"))
            mask = mask[:, None].to(self.device)
        return KVView(slots.flatten().to(self.device), num_keys, mask)


@dataclass(slots=True)
class ForwardBatch:
    """One step's input.

    Attributes:
        sequences: in the order of their tokens.
        token_ids, positions, slots: int64 ``[num_tokens]``.
        logit_rows: int64 ``[num_rows]``, tokens whose logits are needed.
        rows_of: for each sequence the range of its rows in the logits, empty while it is still prefilling.
    """

    sequences: list[ScheduledSequence]
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    rows_of: list[range]
    groups: list[AttentionGroup]

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @classmethod
    def build(
        cls, plan: Sequence[ScheduledSequence], block_size: int, device: torch.device, dtype: torch.dtype
    ) -> ForwardBatch:
        """Lays the plan out; ``dtype`` is that of the attention masks."""
        sequences = sorted(plan, key=lambda s: (_num_new(s), -_context(s)))
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[torch.Tensor] = []
        logit_rows: list[int] = []
        rows_of: list[range] = []
        for sequence in sequences:
            request, start, end = sequence.request, sequence.request.num_computed_tokens, _context(sequence)
            token_ids += request.tokens_between(start, start + sequence.num_tokens)
            token_ids += sequence.draft_token_ids
            positions += range(start, end)
            slots.append(slots_of(request.block_ids, start, end, block_size))
            num_rows = len(sequence.draft_token_ids) + 1 if sequence.samples else 0
            rows_of.append(range(len(logit_rows), len(logit_rows) + num_rows))
            logit_rows += range(len(token_ids) - num_rows, len(token_ids))
        return cls(
            sequences=sequences,
            token_ids=torch.tensor(token_ids, dtype=torch.int64).to(device),
            positions=torch.tensor(positions, dtype=torch.int64).to(device),
            slots=torch.cat(slots).to(device),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64).to(device),
            rows_of=rows_of,
            groups=_group(sequences, block_size, device, dtype),
        )


def _num_new(sequence: ScheduledSequence) -> int:
    return sequence.num_tokens + len(sequence.draft_token_ids)


def _context(sequence: ScheduledSequence) -> int:
    return sequence.request.num_computed_tokens + _num_new(sequence)


def _group(
    sequences: Sequence[ScheduledSequence], block_size: int, device: torch.device, dtype: torch.dtype
) -> list[AttentionGroup]:
    groups: list[AttentionGroup] = []
    token_start = 0
    for sequence in sequences:
        queries, context = _num_new(sequence), _context(sequence)
        last = groups[-1] if groups else None
        if (
            last is None
            or last.num_queries != queries
            or context * _MAX_PADDING_RATIO < last.context_lengths[0]  # lengths fall within a group
        ):
            last = AttentionGroup(token_start, 0, queries, [], [], block_size, device, dtype)
            groups.append(last)
        last.num_seqs += 1
        last.context_lengths.append(context)
        last.block_tables.append(sequence.request.block_ids)
        token_start += queries
    return groups

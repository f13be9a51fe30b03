"""Scheduler output → tensors for one forward. Sequences lie one after the other, without padding:

token_ids   | a0 | b7 | c2 c3 c4 c5 |        a and b decode, c prefills a chunk of four
positions   |  9 |  7 |  2  3  4  5 |
slots       slots of each token's key and value
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from baton.core.drafts import ScheduledSequence
from baton.core.request import Request
from baton.engine.batch.attention_groups import AttentionGroup, Span, group_spans
from baton.engine.device.uploads import upload, upload_ints
from baton.engine.kv_cache.paged_cache import slot_of, slots_of

_FEW_TOKENS = 64


@dataclass(slots=True)
class ModelInput:
    """What a model computes in one step.

    Attributes:
        token_ids, positions, slots: int64 ``[num_tokens]``.
        logit_rows: int64 ``[num_rows]``, tokens whose logits are needed.
        groups: the sequences, in the order of their tokens.
        num_prompt_rows: how many of the rows, the last ones, are for log probabilities of prompts.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    groups: list[AttentionGroup]
    num_prompt_rows: int = field(default=0, kw_only=True)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_rows(self) -> int:
        """Tokens whose logits are needed."""
        return int(self.logit_rows.shape[0])

    @property
    def spans(self) -> list[Span]:
        return [span for group in self.groups for span in group.spans]

    @classmethod
    def of(
        cls,
        host_ints: npt.NDArray[np.int64],
        spans: Sequence[Span],
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> ModelInput:
        """Input from :attr:`ForwardBatch.host_ints` and the spans; ``dtype`` is that of the attention masks."""
        return cls(*_on_device(host_ints, spans, device), group_spans(spans, block_size, device, dtype))


@dataclass(slots=True)
class ForwardBatch(ModelInput):
    """One step's input, and the sequences that it belongs to.

    Attributes:
        sequences: in the order of their tokens.
        starts: index of each sequence's first token.
        rows_of: for each sequence the range of its rows in the logits, empty while it is still prefilling. The first
            row follows the last known token, the others follow the draft's nodes.
        host_ints: token ids, positions, slots and logit rows, one after the other, on the host.
        prompt_rows: sequences whose prompt needs log probabilities, and how many of its next tokens predict one; their
            rows come after all rows of ``rows_of``.
        has_device_tokens: whether :meth:`take_tokens` has inserted tokens that ``host_ints`` lacks.
    """

    sequences: list[ScheduledSequence]
    starts: list[int]
    rows_of: list[range]
    host_ints: npt.NDArray[np.int64]
    prompt_rows: list[tuple[ScheduledSequence, int]] = field(default_factory=list)
    has_device_tokens: bool = False

    @property
    def host_slots(self) -> npt.NDArray[np.int64]:
        """The slots, to read them without waiting for the device."""
        return self.host_ints[2 * self.num_tokens : 3 * self.num_tokens]

    @classmethod
    def build(
        cls, plan: Sequence[ScheduledSequence], block_size: int, device: torch.device, dtype: torch.dtype
    ) -> ForwardBatch:
        """Builds the batch of a plan; ``dtype`` is that of the attention masks."""
        sequences = sorted(plan, key=lambda s: (s.num_new_tokens, -_context(s)))
        spans = [_span(sequence) for sequence in sequences]
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts: list[int] = []
        logit_rows: list[int] = []
        rows_of: list[range] = []
        prompt_rows: list[tuple[ScheduledSequence, int]] = []
        scored: list[int] = []
        for sequence, span in zip(sequences, spans, strict=True):
            starts.append(len(token_ids))
            start = sequence.request.num_computed_tokens
            token_ids += sequence.request.tokens_between(start, start + sequence.num_tokens)
            token_ids += sequence.draft.token_ids
            positions += span.positions()
            slots += _slots(span, block_size)
            num_rows = len(sequence.draft) + 1 if sequence.samples else 0
            rows_of.append(range(len(logit_rows), len(logit_rows) + num_rows))
            logit_rows += range(len(token_ids) - num_rows, len(token_ids))
            if num_scored := sequence.request.num_scored(sequence.num_tokens):
                prompt_rows.append((sequence, num_scored))
                scored += range(starts[-1], starts[-1] + num_scored)
        host_ints = np.array([*token_ids, *positions, *slots, *logit_rows, *scored], dtype=np.int64)
        return cls(
            *_on_device(host_ints, spans, device),
            group_spans(spans, block_size, device, dtype),
            sequences=sequences,
            starts=starts,
            rows_of=rows_of,
            prompt_rows=prompt_rows,
            host_ints=host_ints,
            num_prompt_rows=len(scored),
        )

    def take_tokens(self, requests: Sequence[Request], token_ids: torch.Tensor) -> None:
        """Inserts the tokens of sequences whose last token is only on the device.

        Args:
            requests: requests of the tokens; not all of them need be in the batch.
            token_ids: int64 ``[len(requests)]``, on the device.
        """
        place_of = {request: place for place, request in enumerate(requests)}
        places = [(start, place_of.get(s.request)) for s, start in zip(self.sequences, self.starts, strict=True)]
        known = [(start, place) for start, place in places if place is not None]
        if known:
            both = upload_ints([start for start, _ in known] + [place for _, place in known], self.token_ids.device)
            targets, sources = torch.split(both, len(known))
            self.token_ids.index_copy_(0, targets, token_ids.index_select(0, sources))
            self.has_device_tokens = True


def _on_device(
    host_ints: npt.NDArray[np.int64], spans: Sequence[Span], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions, slots and logit rows, by one copy."""
    count = sum(span.num_tokens for span in spans)
    token_ids, positions, slots, rows = torch.split(
        upload(host_ints, device), [count, count, count, len(host_ints) - 3 * count]
    )
    return token_ids, positions, slots, rows


def _slots(span: Span, block_size: int) -> list[int]:
    if span.num_tokens < _FEW_TOKENS:  # tensors would cost more than they compute
        return [slot_of(span.block_ids, place, block_size) for place in range(span.start, span.end)]
    return slots_of(span.block_ids, span.start, span.end, block_size).tolist()


def _context(sequence: ScheduledSequence) -> int:
    return sequence.request.num_computed_tokens + sequence.num_new_tokens


def _span(sequence: ScheduledSequence) -> Span:
    request = sequence.request
    return Span(
        block_ids=request.block_ids,
        start=request.num_computed_tokens,
        num_tokens=sequence.num_new_tokens,
        parents=sequence.draft.parents,
    )

"""Keeps a draft head in step with its target, for heads that build on the target's hidden states.

A row is a hidden state at position i and the token at i + 1. Rows wait here until the head drafts next, or until there
are enough of them to be worth a pass of their own; then their KV goes to the draft's layers of the cache, at the slot
of position i. The last row of a sequence always waits: what the head makes of it is its first guess.

After every step of the target true hidden states take the place of what the head had made up while it drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.attention_groups import Span
from engine.batch import ForwardBatch
from engine.draft.eagle import EagleHead
from engine.draft.rows import DraftRows, PagedAttend
from engine.feature_tap import FeatureTap
from engine.kv_cache import slots_of
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.verification import VerifyResult

_MAX_WAITING_ROWS = 64


@dataclass(slots=True)
class WaitingRows:
    """Rows of one request, at consecutive positions from ``start`` on.

    Attributes:
        hidden: ``[num_rows, hidden_size]``, fused.
        token_ids: of each row, the token behind its position.
        first_key: first position from which on the draft's KV is complete.
    """

    request: Request
    start: int
    hidden: torch.Tensor
    token_ids: list[int]
    first_key: int

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class FeatureState:
    """The rows of all requests on a worker. Used from the engine's thread only.

    Args:
        head: what reads them.
        runner: of the target, built with ``head`` as its draft.

    Raises:
        ValueError: the runner has no such draft.
    """

    def __init__(self, head: EagleHead, runner: ModelRunner) -> None:
        if runner.features is None:
            raise ValueError("the runner was built without this draft")
        self.head = head
        self._features: FeatureTap = runner.features
        self._runner = runner
        self._first_layer = len(runner.spec.layers)
        self._mask_dtype = runner.cache.keys[-1].dtype
        self._waiting: dict[str, WaitingRows] = {}
        num_slots = runner.cache.num_blocks * runner.spec.block_size
        self._has_kv = torch.zeros(num_slots, dtype=torch.bool)

    def waiting(self, request_id: str) -> WaitingRows | None:
        """Rows that the head has not seen; None when it cannot draft for the request now."""
        return self._waiting.get(request_id)

    @torch.inference_mode()
    def computed(self, batch: ForwardBatch, results: Mapping[str, VerifyResult]) -> None:
        """Takes a forward's hidden states up. Rows of rejected drafts are left out."""
        hidden = self.head.fuse(self._features.take().to(self.head.dtype))
        self._has_kv[batch.slots.cpu()] = False  # until the head has seen their rows
        due: list[tuple[WaitingRows, int]] = []
        for sequence, first in zip(batch.sequences, batch.starts, strict=True):
            request, start = sequence.request, sequence.request.num_computed_tokens
            end = start + sequence.num_tokens
            result = results.get(request.request_id)
            if result is None:  # in the middle of the prompt, so every row's token is known and no guess is wanted
                waiting = self._add(request, start, hidden[first : first + end - start], (start + 1, end + 1), ())
                due.append((waiting, len(waiting.token_ids)))
            elif result.next_token is None:
                self.release(request.request_id)
            else:
                rows = [*range(first, first + end - start), *(first + end - start + node for node in result.nodes)]
                waiting = self._add(request, start, hidden[rows], (start + 1, end), result.token_ids)
                if len(waiting.token_ids) > _MAX_WAITING_ROWS:
                    due.append((waiting, len(waiting.token_ids) - 1))
        if due:
            self._write(due)

    def rows_of(self, waiting: Sequence[WaitingRows]) -> DraftRows:
        """The place of all waiting rows of some requests."""
        spans = [
            Span(rows.request.block_ids, rows.start, len(rows.token_ids), first_key=rows.first_key) for rows in waiting
        ]
        return self.build_rows(spans)

    def build_rows(self, spans: Sequence[Span]) -> DraftRows:
        """Lays rows out for one pass of the head."""
        return DraftRows.build(spans, self._runner.spec.block_size, self._runner.device, self._mask_dtype)

    def attend(self, rows: DraftRows) -> PagedAttend:
        """Attention over the draft's own layers of the cache."""
        return PagedAttend(self._runner.backend, rows, self._first_layer)

    def mark_seen(self, waiting: WaitingRows, num_rows: int) -> None:
        """The first ``num_rows`` rows have their KV in the cache."""
        places = slots_of(
            waiting.request.block_ids, waiting.start, waiting.start + num_rows, self._runner.spec.block_size
        )
        self._has_kv[places] = True
        waiting.start += num_rows
        waiting.hidden = waiting.hidden[num_rows:]
        del waiting.token_ids[:num_rows]

    def flush(self, request_id: str) -> None:
        """Writes what waits of a request, but for its last row, since its blocks may soon be somebody else's prefix."""
        waiting = self._waiting.get(request_id)
        if waiting is not None and len(waiting.token_ids) > 1:
            self._write([(waiting, len(waiting.token_ids) - 1)])

    def release(self, request_id: str) -> None:
        """Forgets a request."""
        self._waiting.pop(request_id, None)

    def export_state(self, request_id: str) -> bytes:
        """The hidden state of a request's last row, with which another worker can go on; empty if there is none."""
        waiting = self._waiting.get(request_id)
        if waiting is None or not waiting.token_ids:
            return b""
        return bytes(waiting.hidden[-1].contiguous().view(torch.uint8).cpu().numpy())

    def adopt(self, request: Request, state: bytes | None, first_new: int = 0) -> None:
        """See :class:`engine.draft.network.DraftState`. Without a state the head sees only what comes from now on."""
        end = request.num_computed_tokens
        arrived = slots_of(request.block_ids, first_new, end, self._runner.spec.block_size)
        self._has_kv[arrived] = False
        if not state:
            return
        hidden = torch.frombuffer(bytearray(state), dtype=self.head.dtype).to(self._runner.device)
        if hidden.numel() != self.head.hidden_size:
            raise ValueError(f"a draft state of {len(state)} bytes came, expected {self.head.hidden_size} numbers")
        self._has_kv[arrived[:-1]] = True
        self._waiting[request.request_id] = WaitingRows(
            request, end - 1, hidden[None], request.tokens_between(end, end + 1), self._first_key(request, end - 1)
        )

    def _add(
        self,
        request: Request,
        start: int,
        hidden: torch.Tensor,
        known: tuple[int, int],
        new_token_ids: tuple[int, ...],
    ) -> WaitingRows:
        """Appends rows from position ``start`` on; their tokens are those at ``known``, and then the new ones."""
        token_ids = [*request.tokens_between(*known), *new_token_ids]
        waiting = self._waiting.get(request.request_id)
        if waiting is None or waiting.end != start or waiting.request is not request:
            waiting = WaitingRows(request, start, hidden, token_ids, self._first_key(request, start))
            self._waiting[request.request_id] = waiting
        else:
            waiting.hidden = torch.cat((waiting.hidden, hidden))
            waiting.token_ids += token_ids
        return waiting

    def _first_key(self, request: Request, start: int) -> int:
        """Behind the last of the positions before ``start`` for which nobody has written draft KV."""
        slots = slots_of(request.block_ids, 0, start, self._runner.spec.block_size)
        missing = (~self._has_kv[slots]).nonzero()
        return int(missing[-1]) + 1 if len(missing) else 0

    def _write(self, due: Sequence[tuple[WaitingRows, int]]) -> None:
        """KV of each request's first rows. A head of one layer needs no attention for it."""
        due = [(waiting, count) for waiting, count in due if count]
        if not due:
            return
        rows = self.build_rows(
            [Span(rows.request.block_ids, rows.start, count, first_key=rows.first_key) for rows, count in due]
        )
        hidden = torch.cat([waiting.hidden[:count] for waiting, count in due])
        token_ids = torch.tensor([token for waiting, count in due for token in waiting.token_ids[:count]])
        token_ids = token_ids.to(hidden.device)
        if self.head.is_local:
            keys, values = self.head.keys_values(token_ids, hidden, rows.positions)
            self._runner.cache.write(self._first_layer, rows.slots, keys, values)
        else:
            self.head(token_ids, hidden, rows.positions, self.attend(rows))
        for waiting, count in due:
            self.mark_seen(waiting, count)

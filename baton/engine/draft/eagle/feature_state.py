"""Tracks a draft head's rows and KV, for heads that build on the target's hidden states.

A row is a hidden state at position i and the token at i + 1. Rows wait here until the head drafts next, or until there
are enough of them for a pass of their own; then their KV goes to the draft's layers of the cache, at the slot of
position i. The last row of a sequence always waits: the head's output for it is its first guess.

After every step of the target, true hidden states replace those that the head produced while it drafted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from baton.core.request import Request
from baton.engine.batch.attention_groups import Span
from baton.engine.batch.batch import ForwardBatch
from baton.engine.batch.hidden_states import HiddenStates
from baton.engine.contracts import VerifyResult
from baton.engine.device.uploads import take_rows, upload_numbers
from baton.engine.draft.eagle.head import EagleHead
from baton.engine.draft.eagle.head_pass import ModuleHeadPass, create_head_pass
from baton.engine.kv_cache.paged_cache import slot_array
from baton.engine.runner.model_runner import ModelRunner

_MAX_WAITING_ROWS = 64


@dataclass(slots=True)
class _Piece:
    """Some rows of a forward's hidden states.

    Attributes:
        states: hidden states of the whole forward: the target's features ``[num_tokens, num_features]``, or, if
            ``is_fused``, the head's fused ones ``[num_tokens, hidden_size]``. Picking and fusing wait until the head
            drafts.
    """

    states: torch.Tensor
    rows: list[int]
    is_fused: bool = False


@dataclass(slots=True)
class WaitingRows:
    """Rows of one request, at consecutive positions that begin at ``start``.

    Attributes:
        pieces: the hidden states of the rows, in order.
        token_ids: for each row, the token after its position.
        first_key: the draft's KV is complete for this position and all later ones.
    """

    request: Request
    start: int
    pieces: list[_Piece]
    token_ids: list[int]
    first_key: int

    blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = self.request.block_ids

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def is_stale(self) -> bool:
        """True when the request has lost its blocks, and with them the rows' slots."""
        return self.blocks is not self.request.block_ids

    def take(self, count: int) -> list[_Piece]:
        """Removes the first ``count`` rows and returns their hidden states."""
        taken: list[_Piece] = []
        self.start += count
        del self.token_ids[:count]
        while count:
            piece = self.pieces[0]
            taken.append(_Piece(piece.states, piece.rows[:count], piece.is_fused))
            piece.rows = piece.rows[count:]
            count -= len(taken[-1].rows)
            if not piece.rows:
                self.pieces.pop(0)
        return taken


@dataclass(frozen=True, slots=True)
class _RestedStep:
    """A step with a token for each sequence, recorded while the head pauses, so that it can resume after it.

    Attributes:
        states: hidden states of the whole forward.
        num_computed: computed tokens of each of the batch's sequences before the step.
        num_rows: limit for the rows kept for each sequence.
        released: requests that ended since.
    """

    states: torch.Tensor
    batch: ForwardBatch
    results: Mapping[str, VerifyResult]
    num_computed: list[int]
    num_rows: int
    released: set[str] = field(default_factory=set)

    def latest(self) -> Iterator[tuple[Request, list[int], int]]:
        """Yields each continuing request, its last rows among ``states``, and the position of the first of these."""
        batch, most = self.batch, self.num_rows
        for sequence, first, start in zip(batch.sequences, batch.starts, self.num_computed, strict=True):
            request, behind = sequence.request, first + sequence.num_tokens
            if request.request_id not in self.released:
                nodes = self.results[request.request_id].nodes
                rows = [*range(max(first, behind + len(nodes) - most), behind), *(behind + node for node in nodes)]
                rows = rows[-most:]
                yield request, rows, start + sequence.num_tokens + len(nodes) - len(rows)


class FeatureState:
    """Implements :class:`baton.engine.draft.network.DraftState`: the rows of all requests on a worker.

    Args:
        head: the head that reads them.
        runner: runner of the target, built with ``head`` as its draft.
        weights: format of the head's weights where a compiled program computes it; see
            :func:`~.head_pass.create_head_pass`.

    Raises:
        ValueError: the runner has no such draft.
    """

    def __init__(self, head: EagleHead, runner: ModelRunner, weights: str = "auto") -> None:
        if runner.features is None:
            raise ValueError("the runner was built without this draft")
        self.head = head
        self._features: HiddenStates = runner.features
        self._runner = runner
        self._modules = ModuleHeadPass(head, runner.cache, runner.backend, len(runner.spec.layers))
        self._pass = create_head_pass(head, runner, self._modules, weights)
        self._waiting: dict[str, WaitingRows] = {}
        num_slots = runner.cache.num_blocks * runner.spec.block_size
        self._has_kv = np.zeros(num_slots, dtype=np.bool_)
        self._num_kept: int | None = None
        self._rested: deque[_RestedStep] = deque()

    def waiting(self, request_id: str) -> WaitingRows | None:
        """Rows that the head has not read; ``None`` when it cannot draft for the request now."""
        self._pick_up()
        waiting = self._waiting.get(request_id)
        return None if waiting is None or waiting.is_stale else waiting

    @torch.inference_mode()
    def computed(self, batch: ForwardBatch, results: Mapping[str, VerifyResult]) -> None:
        """Takes a forward's hidden states. Rows of rejected drafts are dropped."""
        features = self._features.take()
        self._has_kv[batch.host_slots] = False  # until the head has read their rows
        if self._num_kept and len(results) == len(batch.sequences):
            num_computed = [sequence.request.num_computed_tokens for sequence in batch.sequences]
            self._rested.append(_RestedStep(features, batch, results, num_computed, self._num_kept))
            while len(self._rested) > self._num_kept:
                self._rested.popleft()
            return
        self._pick_up()
        due: list[tuple[WaitingRows, int]] = []
        for sequence, first in zip(batch.sequences, batch.starts, strict=True):
            request, start = sequence.request, sequence.request.num_computed_tokens
            end, behind = start + sequence.num_tokens, first + sequence.num_tokens
            result = results.get(request.request_id)
            if result is None:  # in the middle of the prompt: every row's token is known, and no guess is needed
                piece = _Piece(features, list(range(first, behind)))
                waiting = self._add(request, start, piece, request.tokens_between(start + 1, end + 1))
                due.append((waiting, len(waiting.token_ids)))
            elif result.next_token is None:
                self.release(request.request_id)
            else:
                piece = _Piece(features, [*range(first, behind), *(behind + node for node in result.nodes)])
                token_ids = [*request.tokens_between(start + 1, end), *result.token_ids]
                waiting = self._add(request, start, piece, token_ids)
                if self._num_kept is not None:
                    self._keep_last(waiting, self._num_kept)
                elif len(waiting.token_ids) > _MAX_WAITING_ROWS:
                    due.append((waiting, len(waiting.token_ids) - 1))
        self._write(due)

    def catch_up(self, waiting: Sequence[WaitingRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads all waiting rows in one pass.

        Returns:
            For each request's last row, the hidden state for the next pass, ``[num_requests, hidden_size]``, and its
            logits.
        """
        spans, token_ids, hidden = self._take([(own, len(own.token_ids)) for own in waiting])
        return self._pass.run(spans, token_ids, hidden, only_last=True)

    def go_on(
        self, spans: Sequence[Span], token_ids: Sequence[int], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a further pass, over guesses; see :meth:`baton.engine.draft.eagle.head_pass.HeadPass.run`."""
        return self._pass.run(spans, token_ids, hidden)

    def keep(self, num_rows: int | None) -> None:
        """Implements ``DraftState.keep``. With a number, no row of an answer is written."""
        self._num_kept = num_rows
        if num_rows is None:
            self._pick_up()

    def flush(self, request_id: str) -> None:
        """Writes all waiting rows of a request but the last, since its blocks may become another request's prefix."""
        waiting = self.waiting(request_id)
        if waiting is not None and self._num_kept is None:
            self._write([(waiting, len(waiting.token_ids) - 1)])

    def release(self, request_id: str) -> None:
        """Forgets a request. Writes the KV of all its rows first, unless only the latest are kept: its blocks may
        become another request's prefix."""
        for step in self._rested:
            step.released.add(request_id)
        if self._num_kept is None and (waiting := self.waiting(request_id)) is not None:
            self._write([(waiting, len(waiting.token_ids))])
        self._waiting.pop(request_id, None)

    def export_state(self, request_id: str) -> bytes:
        """The hidden state of a request's last row, with which another worker can continue; empty if there is none."""
        waiting = self.waiting(request_id)
        if waiting is None or not waiting.token_ids:
            return b""
        last = waiting.pieces[-1]
        (hidden,) = self._fused([_Piece(last.states, last.rows[-1:], last.is_fused)])
        return bytes(hidden.contiguous().view(torch.uint8).cpu().numpy())

    def adopt(self, request: Request, state: bytes | None, first_new: int = 0) -> None:
        """Implements ``DraftState.adopt``. Without a state, the head reads only later rows."""
        end = request.num_computed_tokens
        arrived = self._slots(request, first_new, end)
        self._has_kv[arrived] = False
        if not state:
            return
        hidden = upload_numbers(state, self.head.hidden_size, self.head.dtype, self._runner.device)
        self._has_kv[arrived[:-1]] = True
        piece, token_ids = _Piece(hidden[None], [0], is_fused=True), request.tokens_between(end, end + 1)
        self._waiting[request.request_id] = WaitingRows(
            request, end - 1, [piece], token_ids, self._first_key(request, end - 1)
        )

    def _pick_up(self) -> None:
        """Adds the rows of the last steps during the pause."""
        steps, self._rested = self._rested, deque()
        for step in steps:
            for request, rows, start in step.latest():
                end = start + len(rows)
                # A request preempted since then starts again, in other blocks.
                if request.num_computed_tokens >= end:
                    token_ids = request.tokens_between(start + 1, end + 1)
                    waiting = self._add(request, start, _Piece(step.states, rows), token_ids)
                    if self._num_kept is not None:
                        self._keep_last(waiting, self._num_kept)

    def _add(self, request: Request, start: int, piece: _Piece, token_ids: list[int]) -> WaitingRows:
        """Appends rows whose positions begin at ``start``."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None or waiting.end != start or waiting.request is not request:
            waiting = WaitingRows(request, start, [piece], token_ids, self._first_key(request, start))
            self._waiting[request.request_id] = waiting
        else:
            waiting.blocks = request.block_ids  # they differ if it was preempted and found its prefix cached
            waiting.pieces.append(piece)
            waiting.token_ids += token_ids
        return waiting

    def _keep_last(self, waiting: WaitingRows, count: int) -> None:
        if len(waiting.token_ids) > count:
            waiting.take(len(waiting.token_ids) - count)
            waiting.first_key = waiting.start

    def _first_key(self, request: Request, start: int) -> int:
        """The position after the last one before ``start`` without draft KV."""
        missing = np.flatnonzero(~self._has_kv[self._slots(request, 0, start)])
        return int(missing[-1]) + 1 if len(missing) else 0

    def _slots(self, request: Request, start: int, end: int) -> npt.NDArray[np.int64]:
        return slot_array(request.block_ids, start, end, self._runner.spec.block_size)

    @torch.inference_mode()
    def _write(self, due: Sequence[tuple[WaitingRows, int]]) -> None:
        """Writes the KV of each request's first rows. A head of one layer needs no attention for it."""
        due = [(waiting, count) for waiting, count in due if count > 0]
        if not due:
            return
        self._modules.write(*self._take(due))

    def _take(self, due: Sequence[tuple[WaitingRows, int]]) -> tuple[list[Span], list[int], torch.Tensor]:
        """Removes some requests' first rows, whose KV is about to be written; returns spans, tokens, hidden states."""
        spans = [Span(own.request.block_ids, own.start, count, first_key=own.first_key) for own, count in due]
        token_ids = [token for waiting, count in due for token in waiting.token_ids[:count]]
        pieces: list[_Piece] = []
        for waiting, count in due:
            self._has_kv[self._slots(waiting.request, waiting.start, waiting.start + count)] = True
            pieces += waiting.take(count)
        hidden = self._fused(pieces)
        return spans, token_ids, hidden[0] if len(hidden) == 1 else torch.cat(hidden)

    def _fused(self, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
        """The head's fused states of the pieces' rows; those that are not fused yet share one call."""
        picked = [take_rows(piece.states, piece.rows) for piece in pieces]
        raw = [states for states, piece in zip(picked, pieces, strict=True) if not piece.is_fused]
        if not raw:
            return picked
        all_fused = self.head.fuse(torch.cat(raw).to(self.head.dtype))
        fused = iter(torch.split(all_fused, [len(states) for states in raw]))
        return [states if piece.is_fused else next(fused) for states, piece in zip(picked, pieces, strict=True)]

"""Tracks a draft model's KV: which positions of each request it covers.

A row is a token at its position p, and the draft's output for it is its guess at position p + 1. Missing rows can be
computed at any time, since their tokens are known. Their KV goes to the draft's layers of the cache, at the slot of
position p.

tokens of the request    t0 .. t6 t7 | g8 g9        t7 is the last known token, g8 g9 are guesses in its slots
draft KV                 valid   missing             ``have`` is 7: the draft must read t7 before it guesses g8

After a round, accepted guesses are tokens of the request, whose KV is there already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from baton.core.request import Request
from baton.engine.batch.attention_groups import Span
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.draft.model.draft_model import DraftModel, PagedDraftModel
from baton.engine.kv_cache.paged_cache import slots_of
from baton.engine.runner.model_runner import ModelRunner

_MAX_PASS_ROWS = 1024
# Up to this many positions without draft KV before a prompt chunk are computed together with it.
_MAX_GAP = 256
_MAX_FLUSHED_ROWS = 64


@dataclass(slots=True)
class _Record:
    """The draft KV of one request.

    Attributes:
        blocks: the request's list of blocks, by identity: a request that loses its blocks gets a new list.
        have: positions ``[0, have)`` have the draft's KV of the request's tokens.
        guesses: tokens whose KV follows the last known token, until they are verified.
    """

    request: Request
    blocks: list[int]
    have: int
    guesses: list[int] = field(default_factory=list)


class TokenState:
    """Implements :class:`baton.engine.draft.network.DraftState`: the draft KV of all requests on a worker.

    Args:
        draft: the draft model.
        runner: runner of the target, built with ``draft`` as its draft.
        ships_prompts: True if the KV of prompts is sent as soon as it is computed. The draft's KV is then always
            computed with it. False leaves long gaps, such as a cached prefix without draft KV, to :meth:`catch_up`.

    Attributes:
        num_target_ids: columns of the target's logits.

    Raises:
        ValueError: the runner was built without this draft, or its cache has another dtype.
    """

    def __init__(self, draft: DraftModel, runner: ModelRunner, *, ships_prompts: bool = False) -> None:
        self.draft = draft
        self._model = PagedDraftModel(draft, runner)
        self.num_target_ids = runner.loaded.vocab_size
        self._block_size = runner.spec.block_size
        self._ships_prompts = ships_prompts
        self._records: dict[str, _Record] = {}
        self._has_kv = torch.zeros(runner.cache.num_blocks * self._block_size, dtype=torch.bool)

    def num_missing(self, request: Request) -> int:
        """Known tokens that the draft has not read; at least 1 at the beginning of a round."""
        return request.num_tokens - self._record(request).have

    def catch_up(self, requests: Sequence[Request], max_rows: int) -> None:
        """Reads missing tokens of some requests, the nearly complete ones first; leaves the last token of each."""
        due: list[tuple[Request, int]] = []
        for request in sorted(requests, key=self.num_missing):
            count = min(self.num_missing(request) - 1, max_rows)
            if count > 0:
                due.append((request, self._record(request).have + count))
                max_rows -= count
        self._read(due)

    def start(self, requests: Sequence[Request]) -> torch.Tensor:
        """Reads all missing tokens in one pass.

        Returns:
            Logits ``[len(requests), num_shared_tokens]`` of the first guesses.
        """
        for request in requests:
            self._record(request).guesses.clear()
        return self._pass([(request, request.num_tokens) for request in requests])

    def extend(self, requests: Sequence[Request], token_ids: Sequence[int]) -> torch.Tensor:
        """Reads one guess for each request, after those read since :meth:`start`.

        Returns:
            Logits ``[len(requests), num_shared_tokens]`` of the next guesses.
        """
        spans: list[Span] = []
        for request, token in zip(requests, token_ids, strict=True):
            record = self._record(request)
            spans.append(Span(request.block_ids, request.num_tokens + len(record.guesses), 1))
            record.guesses.append(token)
        return self._model.forward(spans, token_ids)

    @torch.inference_mode()
    def computed(self, batch: ForwardBatch, results: Mapping[str, VerifyResult]) -> None:
        """Records accepted guesses, and reads the tokens of prompts along with the target."""
        records = [self._record(sequence.request) for sequence in batch.sequences]
        # The slots may hold KV of another request, or of guesses.
        self._has_kv[torch.from_numpy(batch.host_slots)] = False
        due: list[tuple[Request, int]] = []
        for sequence, record in zip(batch.sequences, records, strict=True):
            request, start = sequence.request, sequence.request.num_computed_tokens
            end = start + sequence.num_tokens
            result = results.get(request.request_id)
            if result is not None and result.next_token is None:
                self.release(request.request_id)
                continue
            if result is not None and record.have == request.num_tokens:
                record.have += _num_true(record.guesses, result)
            record.guesses.clear()
            if record.have > start:
                self._has_kv[slots_of(request.block_ids, start, record.have, self._block_size)] = True
            in_prompt = result is None or start < request.num_prompt_tokens
            if in_prompt and (self._ships_prompts or start - record.have <= _MAX_GAP):
                due.append((request, end))
        self._read(due)

    def keep(self, num_rows: int | None) -> None:
        """Does nothing: gaps cost nothing until the next draft."""

    @torch.inference_mode()
    def flush(self, request_id: str) -> None:
        """Reads a request's missing tokens if they are few, since its blocks may become another request's prefix."""
        record = self._records.get(request_id)
        if record is None or record.blocks is not record.request.block_ids:
            return
        end = min(record.request.num_computed_tokens, record.request.num_tokens)
        if end - record.have <= _MAX_FLUSHED_ROWS:
            self._read([(record.request, end)])

    def release(self, request_id: str) -> None:
        """Forgets a request."""
        self.flush(request_id)
        self._records.pop(request_id, None)

    def export_state(self, request_id: str) -> bytes:
        """Empty: KV and tokens suffice to continue."""
        return b""

    def adopt(self, request: Request, state: bytes | None, first_new: int = 0) -> None:
        if state:
            raise ValueError(
                f"a draft state of {len(state)} bytes was received, but a draft model has no state besides its KV"
            )
        arrived = slots_of(request.block_ids, first_new, request.num_computed_tokens, self._block_size)
        self._has_kv[arrived] = state is not None
        self._records.pop(request.request_id, None)

    def _record(self, request: Request) -> _Record:
        """The state of a request, derived again from its blocks when it has new ones."""
        record = self._records.get(request.request_id)
        if record is None or record.blocks is not request.block_ids:
            slots = slots_of(request.block_ids, 0, request.num_computed_tokens, self._block_size)
            missing = (~self._has_kv[slots]).nonzero()
            have = int(missing[0]) if len(missing) else request.num_computed_tokens
            record = _Record(request, request.block_ids, have)
            self._records[request.request_id] = record
        return record

    def _read(self, due: Sequence[tuple[Request, int]]) -> None:
        """Reads rows of each request up to a position, in passes of bounded size, without guesses."""
        for part in _parts([(request, self._record(request).have, self._limit(end)) for request, end in due]):
            self._pass(part)

    def _pass(self, due: Sequence[tuple[Request, int]]) -> torch.Tensor:
        """Reads at least one row of each request, up to a position; returns the logits of each one's last row."""
        spans: list[Span] = []
        token_ids: list[int] = []
        for request, end in due:
            start = self._record(request).have
            spans.append(Span(request.block_ids, start, end - start))
            token_ids += request.tokens_between(start, end)
        logits = self._model.forward(spans, token_ids)
        for (request, end), span in zip(due, spans, strict=True):
            self._has_kv[slots_of(request.block_ids, span.start, end, self._block_size)] = True
            self._record(request).have = end
        return logits

    def _limit(self, end: int) -> int:
        return min(end, self.draft.max_positions)


def _num_true(guesses: Sequence[int], result: VerifyResult) -> int:
    """Number of guesses that are the request's next tokens and whose KV is still in its place.

    This also holds for a draft of another method, unless its accepted nodes were moved over the guesses.
    """
    count = 0
    for place, (guess, token) in enumerate(zip(guesses, result.token_ids, strict=False)):
        moved = place < len(result.nodes) and result.nodes[place] != place
        if guess != token or moved:
            break
        count += 1
    return count


def _parts(due: Sequence[tuple[Request, int, int]]) -> Iterator[list[tuple[Request, int]]]:
    """Splits rows ``[start, end)`` of several requests into passes of bounded size; short ones first."""
    part: list[tuple[Request, int]] = []
    room = _MAX_PASS_ROWS
    for request, start, end in sorted(due, key=lambda rows: (rows[2] - rows[1], -rows[2])):
        while start < end:
            count = min(end - start, room)
            start += count
            room -= count
            part.append((request, start))
            if not room:
                yield part
                part, room = [], _MAX_PASS_ROWS
    if part:
        yield part

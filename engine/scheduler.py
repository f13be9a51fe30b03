"""Which tokens are computed next. One number, ``num_computed_tokens``, catches up with the tokens known: prefill,
chunked prefill, decode, verification and recomputation after preemption are all the same movement.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.block_manager import BlockManager
from engine.drafts import NO_DRAFT, Draft
from engine.errors import ContextLengthError
from engine.request import FinishReason, Request, RequestStatus


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """
    Attributes:
        chunk_tokens: token budget of one step, shared by all its sequences.
        max_num_seqs: sequences that may run at once; never more than ``chunk_tokens``.
        max_model_len: prompt and output tokens of one request.
    """

    chunk_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute positions ``[num_computed_tokens, … + num_tokens)``, then verify ``draft`` behind them."""

    request: Request
    num_tokens: int
    draft: Draft = NO_DRAFT

    @property
    def num_new_tokens(self) -> int:
        """Rows of the forward, drafts included."""
        return self.num_tokens + len(self.draft)

    @property
    def samples(self) -> bool:
        """True when the step reaches the last known token, so that a new one follows from it."""
        return self.request.num_computed_tokens + self.num_tokens == self.request.num_tokens


class OrderingPolicy(Protocol):
    """Order of waiting requests. Implementations live with the role that chooses among them."""

    def key(self, request: Request, now_s: float) -> tuple[float, ...]:
        """Smaller is served first; ``now_s`` is the monotonic clock."""
        ...


class ArrivalOrder:
    """First come, first served."""

    def key(self, request: Request, now_s: float) -> tuple[float, ...]:
        return (request.arrival_s,)


class _StepPlan:
    """A step being put together: what is in it, and how much of the token budget is left."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.sequences: dict[str, ScheduledSequence] = {}

    def add(self, sequence: ScheduledSequence) -> None:
        self.sequences[sequence.request.request_id] = sequence
        self.budget -= sequence.num_tokens

    def drop(self, request: Request) -> None:
        sequence = self.sequences.pop(request.request_id, None)
        if sequence is not None:
            self.budget += sequence.num_tokens


class Scheduler:
    """Owns its requests: nobody else changes them.

    Args:
        blocks: the KV blocks that the requests live in.
        ordering: key function for waiting requests; smaller is served first.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        ordering: OrderingPolicy | None = None,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self._ordering = ordering or ArrivalOrder()
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> Iterable[Request]:
        return self._requests.values()

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises :class:`ContextLengthError` when such a request could never finish here."""
        needed = num_prompt_tokens + max_tokens
        if needed > self.limits.max_model_len:
            raise ContextLengthError(
                f"The model's context length is {self.limits.max_model_len} tokens, but the request needs {needed} "
                f"({num_prompt_tokens} in the prompt and up to {max_tokens} to generate). "
                "Shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )
        # The last token generated is never fed back, so it needs no slot.
        room = self.blocks.pool.num_blocks * self.blocks.block_size
        if needed - 1 > room:
            raise ContextLengthError(
                f"The request needs room for {needed - 1} tokens, but this worker's whole KV cache holds {room}. "
                "Shorten the prompt, lower max_tokens, or give the worker more kv_blocks.",
                param="max_tokens",
            )

    def add(self, request: Request) -> None:
        """Queues a request. One whose KV was imported comes with ``block_ids`` and ``num_computed_tokens`` set.

        Raises:
            ContextLengthError: the request can never fit.
            ValueError: the id is taken.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        num_new = len(request.output_token_ids) + 1 if request.hands_off else request.params.max_tokens
        self.check_fits(request.num_prompt_tokens, num_new)
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def schedule(self) -> list[ScheduledSequence]:
        """The next step: running requests first, then waiting ones while budget, seats and blocks last."""
        plan = _StepPlan(self.limits.chunk_tokens)
        preemptions_before = self.num_preemptions
        # Decoding goes before prefill, so that a long prompt never holds up those who wait for their next token.
        for request in sorted(self._running, key=lambda r: r.num_tokens - r.num_computed_tokens > 1):
            num_tokens = min(request.num_tokens - request.num_computed_tokens, plan.budget)
            if num_tokens < 1 or request.status is not RequestStatus.RUNNING:
                continue
            if self._make_room(request, request.num_computed_tokens + num_tokens, plan):
                plan.add(ScheduledSequence(request, num_tokens))
        if self.num_preemptions == preemptions_before or not plan.sequences:
            self._admit(plan)
        while not plan.sequences and self._reclaim_import():
            self._admit(plan)
        return list(plan.sequences.values())

    def _make_room(self, request: Request, num_tokens: int, plan: _StepPlan) -> bool:
        """Preempts the latest arrivals until ``request`` fits; False when it had to give way itself."""
        while not self.blocks.can_grow(request, num_tokens):
            victim = self._running[-1]
            plan.drop(victim)
            self._preempt(victim)
            if victim is request:
                return False
        self.blocks.grow(request, num_tokens)
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self.blocks.free(request)
        request.num_computed_tokens = 0
        request.move_to(RequestStatus.PREEMPTED)
        self._waiting.append(request)
        self.num_preemptions += 1

    def _waiting_in_order(self, now_s: float) -> list[Request]:
        """Preempted requests have lost work already, so they go first."""
        return sorted(
            self._waiting, key=lambda r: (r.status is not RequestStatus.PREEMPTED, *self._ordering.key(r, now_s))
        )

    def _admit(self, plan: _StepPlan) -> None:
        if not self._waiting or plan.budget < 1:
            return
        now_s = time.monotonic()
        # More seats than budget would leave the last ones without a token while the first ones decode.
        num_seats = min(self.limits.max_num_seqs, self.limits.chunk_tokens)
        blocked = False
        for request in self._waiting_in_order(now_s):
            if plan.budget < 1 or len(self._running) >= num_seats:
                return
            # Strictly in order, so that a small request never starves a large one. Only those that have all their
            # blocks already (imported ones) may pass, because the one in front may be waiting for just these.
            if blocked and len(request.block_ids) < self.blocks.num_blocks_for(request.num_tokens):
                continue
            if not self._start(request, plan, now_s):
                blocked = True

    def _start(self, request: Request, plan: _StepPlan, now_s: float) -> bool:
        """Makes a waiting request run; False when its known tokens do not fit into the free blocks.

        It gets room for all of them at once: one that started on less would run out half-way and start again.
        """
        cached = self.blocks.match_prefix(request)
        if not self.blocks.can_grow(request, request.num_tokens):
            if cached:
                self.blocks.free(request)
            return False
        self.blocks.grow(request, request.num_tokens)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = max(request.num_cached_tokens, min(cached, request.num_prompt_tokens))
        request.num_computed_tokens = max(request.num_computed_tokens, cached)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
        self._waiting.remove(request)
        request.move_to(RequestStatus.RUNNING)
        self._running.append(request)
        plan.add(ScheduledSequence(request, min(request.num_tokens - request.num_computed_tokens, plan.budget)))
        return True

    def _reclaim_import(self) -> bool:
        """Nothing can run: the last waiting request that holds imported KV gives it up, and will recompute it."""
        holders = [request for request in self._waiting_in_order(time.monotonic())[1:] if request.block_ids]
        if self._running or not holders:
            return False
        self.blocks.free(holders[-1])
        holders[-1].num_computed_tokens = 0
        self.num_preemptions += 1
        return True

    def make_draft_room(self, plan: Sequence[ScheduledSequence], max_draft_tokens: int) -> dict[str, int]:
        """Slots for drafts behind the sequences that reach their last token, as far as blocks and limits allow.

        Drafts are a bet, so nobody is preempted for them.

        Args:
            max_draft_tokens: per sequence. All together never get more than ``chunk_tokens``.

        Returns:
            By request id, how many tokens may be drafted; requests without room are left out.
        """
        sampling = [s.request for s in plan if s.samples and s.request.speculation_method != "none"]
        share = min(max_draft_tokens, self.limits.chunk_tokens // max(1, len(sampling)))
        room: dict[str, int] = {}
        for request in sampling:
            # The last token of all is sampled, not drafted.
            count = min(share, request.params.max_tokens - len(request.output_token_ids) - 1)
            while count > 0 and not self.blocks.can_grow(request, request.num_tokens + count):
                count -= 1
            if count > 0:
                self.blocks.grow(request, request.num_tokens + count)
                room[request.request_id] = count
        return room

    def advance(self, sequence: ScheduledSequence, num_accepted_drafts: int = 0) -> None:
        """Books a step's result: the scheduled tokens and the accepted drafts now have their KV."""
        request = sequence.request
        request.num_computed_tokens += sequence.num_tokens + num_accepted_drafts
        known = min(request.num_computed_tokens, request.num_tokens)
        self.blocks.remember(request, known)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """The one way out: finished, aborted, failed and handed-off requests all leave here.

        Returns:
            The request, or None when it was gone already.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        request.move_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        self.blocks.free(request)
        return request

"""Chooses the tokens to compute next. One number, ``num_computed_tokens``, catches up with the known tokens: prefill,
chunked prefill, decode, verification and recomputation after preemption are all the same movement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence
from heapq import merge

from baton.core.chunk_budget import PromptAllowance, SchedulerLimits, prompt_allowance
from baton.core.drafts import ScheduledSequence
from baton.core.errors import ContextLengthError
from baton.core.prompt_logprobs import MAX_SCORED_TOKENS
from baton.core.request import FinishReason, Request, RequestStatus
from baton.core.step_costs import Pace
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.scheduling.ordering import ArrivalOrder, OrderingPolicy
from baton.engine.scheduling.waiting_queue import WaitingQueue

_ELDEST_SHARE = 8
"""One part in this many of a step's prompt tokens is reserved for the oldest running prompt, whatever its priority."""


class _StepPlan:
    """A step under construction: its sequences, and the rest of the budgets of tokens and of scored prompt tokens."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.scored_budget = MAX_SCORED_TOKENS
        self.sequences: dict[str, ScheduledSequence] = {}

    def add(self, sequence: ScheduledSequence) -> None:
        self.sequences[sequence.request.request_id] = sequence
        self.budget -= sequence.num_tokens
        self.scored_budget -= sequence.request.num_scored(sequence.num_tokens)

    def room_for(self, request: Request, num_tokens: int) -> int:
        """How many of a request's next ``num_tokens`` tokens fit into the budgets."""
        num_tokens = min(num_tokens, self.budget)
        return num_tokens if request.num_scored(num_tokens) <= self.scored_budget else self.scored_budget

    def requests(self) -> list[Request]:
        return [sequence.request for sequence in self.sequences.values()]

    def drop(self, request: Request) -> None:
        sequence = self.sequences.pop(request.request_id, None)
        if sequence is not None:
            self.budget += sequence.num_tokens


class Scheduler:
    """Plans steps and owns its requests: no other object changes them.

    Args:
        blocks: allocates the KV blocks of the requests.
        ordering: order of waiting requests, and of prompts that share a step's budget; first come, first served by
            default.
        pace: the engine's speed, to limit prompts that share steps with sequences that have a TPOT target; ``None``
            always gives prompts the rest of the budget.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        ordering: OrderingPolicy | None = None,
        pace: Callable[[], Pace] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        # With more seats than budget, the last sequences would get no token while the first ones decode.
        self._num_seats = min(limits.max_num_seqs, limits.chunk_tokens)
        self._ordering = ordering or ArrivalOrder()
        self._pace = pace
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting = WaitingQueue(self._ordering)
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

    def check_fits(self, request: Request) -> None:
        """Raises :class:`ContextLengthError` for a request that can never finish here. Any thread may call it."""
        num_prompt_tokens = request.num_prompt_tokens
        max_tokens = len(request.output_token_ids) + 1 if request.hands_off else request.params.max_tokens
        needed = num_prompt_tokens + max_tokens
        if needed > self.limits.max_model_len:
            raise ContextLengthError(
                f"The model's context length is {self.limits.max_model_len} tokens, but the request needs {needed} "
                f"({num_prompt_tokens} in the prompt and up to {max_tokens} to generate). "
                "Shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )
        # The last generated token is never fed back, so it needs no slot.
        room = self.blocks.pool.num_blocks * self.blocks.block_size
        if needed - 1 > room:
            raise ContextLengthError(
                f"The request needs KV for {needed - 1} tokens, but this worker's whole KV cache holds {room}. "
                "Shorten the prompt, lower max_tokens, or give the worker more kv_blocks.",
                param="max_tokens",
            )

    def add(self, request: Request) -> None:
        """Queues a request. A request with imported KV has ``block_ids`` and ``num_computed_tokens`` set.

        Raises:
            ContextLengthError: the request can never fit.
            ValueError: the id is taken.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        self.check_fits(request)
        self._requests[request.request_id] = request
        self._waiting.add(request, self._clock())

    def schedule(self) -> list[ScheduledSequence]:
        """Plans the next step: one token for each decoding sequence, then prompts, running or waiting, in order of
        their queue priority, while budget, seats and blocks last.
        """
        now_s = self._clock()
        plan = _StepPlan(self.limits.chunk_tokens)
        preemptions_before = self.num_preemptions
        # Decoding goes before prefill, so that a long prompt never delays sequences that decode.
        prompts: list[Request] = []
        for request in list(self._running):
            if not _needs_one_token(request):
                prompts.append(request)
            elif request.status is RequestStatus.RUNNING and self._make_room(request, plan, now_s):
                plan.add(ScheduledSequence(request, 1))
        prompts = [request for request in prompts if request.status is RequestStatus.RUNNING]
        has_room = self.num_preemptions == preemptions_before or not (plan.sequences or prompts)
        self._fill(plan, prompts, now_s, admits=has_room)
        while not plan.sequences and self._reclaim_import(now_s):
            self._fill(plan, [], now_s, admits=True)
        return list(plan.sequences.values())

    def schedule_ahead(self, ending: Container[str]) -> list[ScheduledSequence]:
        """Plans the step after one whose tokens are not read yet; placeholders stand for these tokens in the requests.

        It preempts no request, since requests that end with the unread step may free the missing blocks.

        Args:
            ending: ids of the requests that certainly end with the unread step.

        Returns:
            Empty when there is nothing to compute, or when decoding sequences need more blocks than are free.
        """
        plan = _StepPlan(self.limits.chunk_tokens)
        prompts: list[Request] = []
        for request in self._running:
            if request.request_id in ending:
                continue
            if not _needs_one_token(request):
                prompts.append(request)
                continue
            if not self.blocks.can_grow(request, request.num_tokens):
                return []
            self.blocks.grow(request, request.num_tokens)
            plan.add(ScheduledSequence(request, 1))
        self._fill(plan, prompts, self._clock(), admits=True)
        return list(plan.sequences.values())

    def _make_room(self, request: Request, plan: _StepPlan, now_s: float) -> bool:
        """Preempts the least urgent until ``request`` has room for its token; False when it was preempted itself."""
        while not self.blocks.can_grow(request, request.num_tokens):
            # Among equals, the one that started last.
            _, _, victim = max((self._ordering.key(r, now_s), number, r) for number, r in enumerate(self._running))
            plan.drop(victim)
            self._preempt(victim)
            if victim is request:
                return False
        self.blocks.grow(request, request.num_tokens)
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self.blocks.free(request)
        request.num_computed_tokens = 0
        request.move_to(RequestStatus.PREEMPTED)
        self._waiting.add(request, self._clock())
        self.num_preemptions += 1

    def _fill(self, plan: _StepPlan, prompts: Sequence[Request], now_s: float, *, admits: bool) -> None:
        """Gives the rest of the budget to running prompts and waiting requests, the most urgent first.

        A running prompt yields to a more urgent one, except for the oldest prompt's reserved share: its blocks and its
        hand-off wait for its end. A request that lacks blocks takes no budget, so that those that hold some can end.
        """
        admits = admits and len(self._waiting) > 0 and len(self._running) < self._num_seats
        if plan.budget < 1 or not (prompts or admits):
            return
        waiting = self._waiting.in_order(now_s) if admits else []
        allowance = self._allowance(plan, [request for _, _, request in waiting if request.block_ids])
        running = ((self._ordering.key(r, now_s), number, r) for number, r in enumerate(prompts, -len(prompts)))
        eldest = prompts[0] if prompts else None
        kept = allowance.tokens_at(eldest.num_computed_tokens) // _ELDEST_SHARE if eldest is not None else 0
        spent = blocked = False
        for _, _, request in merge(sorted(running), waiting):
            if plan.budget < 1:
                return
            if request is eldest:
                kept = 0
            if request.status is RequestStatus.RUNNING:
                spent = self._add_chunk(request, plan, allowance, kept)
                continue
            # Once prompts have used their share, the rest is for requests that only decode.
            if spent and not (request.block_ids and _needs_one_token(request)):
                continue
            if len(self._running) >= self._num_seats:
                continue
            # Strictly in order, so that a small request never starves a large one. Only requests that have all their
            # blocks already (imported ones) may pass, because the first one may be waiting for exactly these.
            if blocked and not self._has_blocks(request):
                continue
            if self._start(request, now_s):
                spent = self._add_chunk(request, plan, allowance, kept, at_least=1)
            else:
                blocked = True

    def _allowance(self, plan: _StepPlan, imported: Sequence[Request]) -> PromptAllowance:
        """What prompts may take of the step besides decoding sequences: the plan's, and waiting imported ones."""
        arriving = [r for r in imported if _needs_one_token(r)][: self._num_seats - len(self._running)]
        # One token of the budget stays for each sequence that may start to decode now, and at least one for prompts.
        tokens = max(1, plan.budget - len(arriving))
        if self._pace is None:
            return PromptAllowance(tokens)
        # Nothing decodes on a prefill worker: a request with one token left hands off after it.
        decoding = [r for r in (*plan.requests(), *arriving) if not r.hands_off]
        targets = [r.tpot_target_s for r in decoding if r.tpot_target_s > 0]
        context_tokens = sum(r.num_tokens for r in decoding)
        return prompt_allowance(tokens, len(decoding), context_tokens, min(targets, default=0.0), self._pace())

    def _add_chunk(
        self, request: Request, plan: _StepPlan, allowance: PromptAllowance, kept: int, *, at_least: int = 0
    ) -> bool:
        """Schedules as many of a running request's next tokens as the step allows; it has blocks for all of them.

        Args:
            kept: tokens of the allowance that are reserved for another prompt.

        Returns:
            Whether prompts that start now would get nothing.
        """
        start = request.num_computed_tokens
        missing = request.num_tokens - start
        if missing == 1:
            plan.add(ScheduledSequence(request, 1))
        else:
            num_tokens = plan.room_for(request, min(missing, max(at_least, allowance.tokens_at(start) - kept)))
            if num_tokens > 0:
                allowance.take(num_tokens, start)
                plan.add(ScheduledSequence(request, num_tokens))
        return allowance.tokens_at(0) <= kept

    def _start(self, request: Request, now_s: float) -> bool:
        """Makes a waiting request run; False when its known tokens do not fit into the free blocks.

        It gets blocks for all of them at once: with fewer it would run out half-way and start again.
        """
        if not self.blocks.take_all(request):
            return False
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
        self._waiting.remove(request)
        request.move_to(RequestStatus.RUNNING)
        self._running.append(request)
        return True

    def _has_blocks(self, request: Request) -> bool:
        held = len(request.block_ids)
        return held > 0 and held >= self.blocks.num_blocks_for(request.num_tokens)

    def _reclaim_import(self, now_s: float) -> bool:
        """When nothing can run, the last waiting request with imported KV gives it up and will recompute it."""
        holders = [request for _, _, request in self._waiting.in_order(now_s)[1:] if request.block_ids]
        if self._running or not holders:
            return False
        self.blocks.free(holders[-1])
        holders[-1].num_computed_tokens = 0
        self.num_preemptions += 1
        return True

    def make_draft_room(self, plan: Sequence[ScheduledSequence], max_draft_tokens: int) -> dict[str, int]:
        """Allocates slots for drafts behind the sequences that sample, as far as blocks and limits allow.

        Drafts are a bet, so no request is preempted for them: one free block stays for each running request.

        Args:
            max_draft_tokens: limit per sequence. All sequences together never get more than ``chunk_tokens``.

        Returns:
            How many tokens may be drafted, by request id; requests without room are left out.
        """
        sampling = [s.request for s in plan if s.samples and s.request.speculation_method != "none"]
        share = min(max_draft_tokens, self.limits.chunk_tokens // max(1, len(sampling)))
        num_spare = max(0, self.blocks.pool.num_free - len(self._running))
        room: dict[str, int] = {}
        for request in sampling:
            held = len(request.block_ids)
            slots = (held + num_spare) * self.blocks.block_size - request.num_tokens
            # The last output token is sampled, not drafted.
            count = min(share, slots, request.params.max_tokens - len(request.output_token_ids) - 1)
            if count > 0:
                self.blocks.grow(request, request.num_tokens + count)
                num_spare -= len(request.block_ids) - held
                room[request.request_id] = count
        return room

    def advance(self, sequence: ScheduledSequence, num_accepted_drafts: int = 0) -> None:
        """Books a step's forward: the KV of the scheduled tokens and the accepted drafts is computed."""
        sequence.request.num_computed_tokens += sequence.num_tokens + num_accepted_drafts

    def remember(self, request: Request) -> None:
        """Adds the computed blocks of a request to the prefix cache, as far as its tokens are known."""
        self.blocks.remember(request, min(request.num_computed_tokens, request.num_tokens))

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """Removes a request: all finished, aborted, failed and handed-off requests end here.

        Returns:
            The request, or ``None`` when it was removed before.
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


def _needs_one_token(request: Request) -> bool:
    """True when all but the last known token is computed: the request decodes, or is about to."""
    return request.num_tokens - request.num_computed_tokens == 1

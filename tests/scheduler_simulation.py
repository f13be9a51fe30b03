"""A scheduler with a model of the cache: every slot stores the tokens from which its KV was computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import Draft, ScheduledSequence
from baton.core.queue_priority import NO_PRIORITY, QueuePriority
from baton.core.request import FinishReason, Request, RequestStatus, SamplingParams
from baton.core.step_costs import Pace
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.scheduling.ordering import OrderingPolicy
from baton.engine.scheduling.scheduler import Scheduler

EOS = 1
MAX_STEPS = 3_000


@dataclass(frozen=True, slots=True)
class Arrival:
    step: int
    prompt_length: int
    max_tokens: int
    imported: bool = False
    hands_off: bool = False
    abort_after: int | None = None
    queue_priority: QueuePriority = NO_PRIORITY
    tpot_target_s: float = 0.0


def shape(plan: list[ScheduledSequence]) -> dict[str, int]:
    """The number of tokens of each request in a step."""
    return {sequence.request.request_id: sequence.num_tokens for sequence in plan}


def advance(scheduler: Scheduler, plan: list[ScheduledSequence]) -> None:
    """Finishes a step; every sampling request gets the token 3."""
    for sequence in plan:
        samples = sequence.samples
        scheduler.advance(sequence)
        scheduler.remember(sequence.request)
        if samples and (reason := sequence.request.append_output(3)) is not None:
            scheduler.finish(sequence.request.request_id, reason)


class Simulation:
    """Runs a scheduler with random tokens from a tiny vocabulary, so that prefixes are often shared.

    A slot holds the tokens up to its position, on which a real KV entry depends. Every step checks that each sequence
    attends to its own past. A step takes one second.
    """

    def __init__(
        self,
        rng: random.Random,
        limits: SchedulerLimits,
        blocks: BlockManager,
        *,
        drafts: bool,
        ordering: OrderingPolicy | None = None,
        pace: Callable[[], Pace] | None = None,
    ) -> None:
        self.rng = rng
        self.limits = limits
        self.blocks = blocks
        self.now_s = 0.0
        self.scheduler = Scheduler(limits, blocks, ordering, pace, lambda: self.now_s)
        self.drafts = drafts
        self.kv: dict[int, tuple[int, ...]] = {}
        self.finished: dict[str, Request] = {}
        self.lease_ends: dict[str, int] = {}

    def token(self) -> int:
        return self.rng.choice([0, 0, 0, 0, 2, 2, EOS])

    def slot(self, request: Request, position: int) -> int:
        size = self.blocks.block_size
        return request.block_ids[position // size] * size + position % size

    def write(self, request: Request, tokens: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            holders = [
                r
                for r in self.scheduler.requests
                if request.block_ids[position // self.blocks.block_size] in r.block_ids
            ]
            assert holders in ([request], []), "a block is written that another request reads"
            self.kv[self.slot(request, position)] = tuple(tokens[: position + 1])

    def arrive(self, name: str, arrival: Arrival, step: int) -> None:
        prompt = [self.rng.choice([0, 0, 0, 2]) for _ in range(arrival.prompt_length)]
        params = SamplingParams(max_tokens=arrival.max_tokens)
        request = Request(
            name, prompt, params, frozenset({EOS}), hands_off=arrival.hands_off, arrival_s=float(step),
            queue_priority=arrival.queue_priority, tpot_target_s=arrival.tpot_target_s,
        )  # fmt: skip
        if arrival.imported and arrival.max_tokens > 1:
            self.give_kv(request)
        self.scheduler.add(request)

    def give_kv(self, request: Request) -> None:
        """Provides the KV as a decode worker does: shares prefix hits, writes the rest, and adds the first token."""
        cached = self.blocks.find_prefix(request, request.num_tokens // self.blocks.block_size)
        self.blocks.pool.share(cached)
        missing = self.blocks.num_blocks_for(request.num_tokens) - len(cached)
        if missing > self.blocks.pool.num_free:
            self.blocks.pool.release(cached)
        else:
            request.block_ids = cached + self.blocks.pool.allocate(missing)
            self.write(request, request.prompt_token_ids, len(cached) * self.blocks.block_size, request.num_tokens)
            self.blocks.remember(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens
        request.output_token_ids = [0]

    def step(self) -> bool:
        """Runs one engine step; returns False when nothing could be scheduled."""
        decoding = [r for r in self.scheduler.requests if self.needs_one_token(r)]
        plan = self.scheduler.schedule()
        self.check_plan(plan, decoding)
        if self.drafts:
            room = self.scheduler.make_draft_room(plan, self.rng.randrange(5))
            plan = [self.with_draft(sequence, room.get(sequence.request.request_id, 0)) for sequence in plan]
        for sequence in plan:
            self.compute(sequence)
        for sequence in plan:
            self.post_process(sequence)
        return bool(plan)

    def with_draft(self, sequence: ScheduledSequence, room: int) -> ScheduledSequence:
        count = self.rng.randint(0, room)
        return ScheduledSequence(
            sequence.request, sequence.num_tokens, Draft(tuple(self.token() for _ in range(count)))
        )

    @staticmethod
    def needs_one_token(request: Request) -> bool:
        return request.status is RequestStatus.RUNNING and request.num_tokens - request.num_computed_tokens == 1

    def check_plan(self, plan: list[ScheduledSequence], decoding: list[Request]) -> None:
        assert sum(sequence.num_tokens for sequence in plan) <= self.limits.chunk_tokens
        assert all(sequence.num_tokens > 0 for sequence in plan)
        assert self.scheduler.num_running <= self.limits.max_num_seqs
        scheduled = [sequence.request for sequence in plan]
        assert len({request.request_id for request in scheduled}) == len(scheduled)
        assert all(request.status is RequestStatus.RUNNING for request in scheduled)
        for request in decoding:  # decoding requests never wait for a prefill
            assert request in scheduled or request.status is RequestStatus.PREEMPTED

    def compute(self, sequence: ScheduledSequence) -> None:
        request = sequence.request
        tokens = [*request.prompt_token_ids, *request.output_token_ids, *sequence.draft.token_ids]
        start = request.num_computed_tokens
        end = start + sequence.num_tokens + len(sequence.draft.token_ids)
        self.write(request, tokens, start, end)
        for position in range(end):
            assert self.kv.get(self.slot(request, position)) == tuple(tokens[: position + 1])

    def post_process(self, sequence: ScheduledSequence) -> None:
        request = sequence.request
        samples = sequence.samples
        accepted = sequence.draft.token_ids[: self.rng.randint(0, len(sequence.draft.token_ids))]
        self.scheduler.advance(sequence, len(accepted))
        self.scheduler.remember(request)
        if not samples:
            return
        reason = None
        for token in (*accepted, self.token()):
            reason = request.append_output(token)
            if reason is not None:
                break
        if reason is None and request.hands_off:
            reason = FinishReason.HANDED_OFF
        if reason is not None:
            self.finish(request.request_id, reason)
        elif self.rng.random() < 0.05:
            self.lease(request)

    def lease(self, request: Request) -> None:
        lease_id = f"lease of {request.request_id} at {request.num_computed_tokens}"
        if lease_id not in self.lease_ends:
            self.blocks.pool.lease(lease_id, request.block_ids)
            self.lease_ends[lease_id] = self.rng.randint(1, 30)

    def age_leases(self, *, end_all: bool) -> None:
        for lease_id in list(self.lease_ends):
            self.lease_ends[lease_id] -= 1
            if end_all or not self.lease_ends[lease_id]:
                self.blocks.pool.end_lease(lease_id)
                del self.lease_ends[lease_id]

    def finish(self, name: str, reason: FinishReason) -> None:
        request = self.scheduler.finish(name, reason)
        if request is not None:
            self.finished[name] = request

    def run(self, arrivals: list[Arrival]) -> None:
        for step in range(MAX_STEPS):
            self.now_s = float(step)
            for index, arrival in enumerate(arrivals):
                if arrival.step == step:
                    self.arrive(f"request-{index}", arrival, step)
                if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                    self.finish(f"request-{index}", FinishReason.ABORT)
            ran = self.step()
            stuck = not ran and self.scheduler.has_work()
            assert not stuck or self.lease_ends, "requests wait, and nobody will ever give blocks back"
            self.age_leases(end_all=stuck)
            assert self.blocks.check(self.scheduler.requests) == []
            if not self.scheduler.has_work() and all(arrival.step <= step for arrival in arrivals):
                self.age_leases(end_all=True)
                return
        raise AssertionError(f"requests were left after {MAX_STEPS} steps")

"""The scheduler with a model of the cache behind it: every slot remembers which tokens its KV was computed from."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_manager import BlockManager
from engine.errors import ContextLengthError
from engine.request import FinishReason, Request, RequestStatus, SamplingParams
from engine.scheduler import ScheduledSequence, Scheduler, SchedulerLimits

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


class Simulation:
    """Runs a scheduler with tokens drawn at random from a tiny vocabulary, so that prefixes are often shared.

    A slot holds the tokens up to its position, as a real KV entry depends on them. Every step checks that what a
    sequence attends to is its own past.
    """

    def __init__(self, rng: random.Random, limits: SchedulerLimits, blocks: BlockManager, *, drafts: bool) -> None:
        self.rng = rng
        self.limits = limits
        self.blocks = blocks
        self.scheduler = Scheduler(limits, blocks)
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
            holders = [r for r in self.scheduler.requests if request.block_ids[position // self.blocks.block_size] in r.block_ids]
            assert holders in ([request], []), "a block is written that another request reads"
            self.kv[self.slot(request, position)] = tuple(tokens[: position + 1])

    def arrive(self, name: str, arrival: Arrival, step: int) -> None:
        prompt = [self.rng.choice([0, 0, 0, 2]) for _ in range(arrival.prompt_length)]
        params = SamplingParams(max_tokens=arrival.max_tokens)
        request = Request(
            name, prompt, params, frozenset({EOS}), hands_off=arrival.hands_off, arrival_s=float(step)
        )  # fmt: skip
        if arrival.imported and arrival.max_tokens > 1:
            self.give_kv(request)
        self.scheduler.add(request)

    def give_kv(self, request: Request) -> None:
        """As a decode worker does: prefix hits are shared, the rest is written, the first token came along."""
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
        """One engine step; False when nothing could be scheduled."""
        decoding = [r for r in self.scheduler.requests if self.needs_one_token(r)]
        plan = self.scheduler.schedule()
        self.check_plan(plan, decoding)
        if self.drafts:
            guesses = {
                s.request.request_id: tuple(self.token() for _ in range(self.rng.randrange(4))) for s in plan
            }
            plan = self.scheduler.attach_drafts(plan, guesses)
        for sequence in plan:
            self.compute(sequence)
        for sequence in plan:
            self.post_process(sequence)
        return bool(plan)

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
        for request in decoding:  # nobody who decodes waits for a prefill
            assert request in scheduled or request.status is RequestStatus.PREEMPTED

    def compute(self, sequence: ScheduledSequence) -> None:
        request = sequence.request
        tokens = [*request.prompt_token_ids, *request.output_token_ids, *sequence.draft_token_ids]
        start = request.num_computed_tokens
        end = start + sequence.num_tokens + len(sequence.draft_token_ids)
        self.write(request, tokens, start, end)
        for position in range(end):
            assert self.kv.get(self.slot(request, position)) == tuple(tokens[: position + 1])

    def post_process(self, sequence: ScheduledSequence) -> None:
        request = sequence.request
        samples = sequence.samples
        accepted = sequence.draft_token_ids[: self.rng.randint(0, len(sequence.draft_token_ids))]
        self.scheduler.advance(sequence, len(accepted))
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


arrivals_of = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 15),
        prompt_length=st.integers(1, 20),
        max_tokens=st.integers(1, 12),
        imported=st.booleans(),
        hands_off=st.sampled_from([False, False, False, True]),
        abort_after=st.none() | st.integers(0, 20),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    arrivals=arrivals_of,
    chunk_tokens=st.sampled_from([1, 2, 5, 16, 64]),
    max_num_seqs=st.sampled_from([1, 2, 3, 16]),
    block_size=st.sampled_from([1, 2, 4]),
    spare_tokens=st.sampled_from([0, 3, 10, 400]),
    prefix_caching=st.booleans(),
    drafts=st.booleans(),
)
def test_every_request_completes_over_its_own_kv_and_nothing_leaks(
    seed: int,
    arrivals: list[Arrival],
    chunk_tokens: int,
    max_num_seqs: int,
    block_size: int,
    spare_tokens: int,
    prefix_caching: bool,
    drafts: bool,
) -> None:
    longest = max(arrival.prompt_length + arrival.max_tokens - 1 for arrival in arrivals)
    blocks = BlockManager(-(-(longest + spare_tokens) // block_size), block_size, prefix_caching=prefix_caching)
    limits = SchedulerLimits(chunk_tokens, max_num_seqs, max_model_len=64)
    simulation = Simulation(random.Random(seed), limits, blocks, drafts=drafts)

    simulation.run(arrivals)

    assert blocks.check([]) == []
    assert blocks.usage().used == 0
    assert len(simulation.finished) == len(arrivals)
    for index, arrival in enumerate(arrivals):
        request = simulation.finished[f"request-{index}"]
        assert request.status is RequestStatus.FINISHED
        if request.finish_reason is FinishReason.STOP:
            assert request.output_token_ids[-1] == EOS
        elif request.finish_reason is FinishReason.LENGTH:
            assert len(request.output_token_ids) == arrival.max_tokens
        elif request.finish_reason is FinishReason.HANDED_OFF:
            assert request.output_token_ids
        else:
            assert arrival.abort_after is not None


def build(num_blocks: int, *, block_size: int = 4, chunk_tokens: int = 64, max_num_seqs: int = 8) -> Scheduler:
    blocks = BlockManager(num_blocks, block_size, prefix_caching=False)
    return Scheduler(SchedulerLimits(chunk_tokens, max_num_seqs, max_model_len=100), blocks)


def request(name: str, prompt_length: int, max_tokens: int = 8, arrival_s: float = 0.0) -> Request:
    return Request(name, [7] * prompt_length, SamplingParams(max_tokens=max_tokens), arrival_s=arrival_s)


def shape(plan: list[ScheduledSequence]) -> dict[str, int]:
    return {sequence.request.request_id: sequence.num_tokens for sequence in plan}


def advance(scheduler: Scheduler, plan: list[ScheduledSequence]) -> None:
    for sequence in plan:
        samples = sequence.samples
        scheduler.advance(sequence)
        if samples and (reason := sequence.request.append_output(3)) is not None:
            scheduler.finish(sequence.request.request_id, reason)


def test_a_long_prompt_fills_only_what_decoding_leaves_of_the_budget() -> None:
    scheduler = build(64, chunk_tokens=8)
    scheduler.add(request("short", 3))
    advance(scheduler, scheduler.schedule())
    scheduler.add(request("long", 20))
    chunks = []
    for _ in range(4):
        plan = scheduler.schedule()
        chunks.append(shape(plan))
        advance(scheduler, plan)
    assert chunks == [{"short": 1, "long": 7}, {"short": 1, "long": 7}, {"short": 1, "long": 6}, {"short": 1, "long": 1}]


def test_everyone_who_runs_gets_a_token_in_every_step() -> None:
    scheduler = build(64, chunk_tokens=3, max_num_seqs=8)
    for index in range(6):
        scheduler.add(request(f"request-{index}", 1, max_tokens=4))
    counts = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        counts.append(len(plan))
        advance(scheduler, plan)
    assert counts == [3] * 8


def test_waiting_requests_start_in_the_order_of_the_policy() -> None:
    class ShortestPrompt:
        def key(self, request: Request, now_s: float) -> tuple[float, ...]:
            return (request.num_prompt_tokens,)

    blocks = BlockManager(64, 4)
    scheduler = Scheduler(SchedulerLimits(64, 2, 100), blocks, ShortestPrompt())
    for length in (9, 3, 6):
        scheduler.add(request(f"{length} tokens", length))
    assert list(shape(scheduler.schedule())) == ["3 tokens", "6 tokens"]
    assert scheduler.num_waiting == 1


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_blocks() -> None:
    scheduler = build(6)
    scheduler.add(request("running", 8))
    advance(scheduler, scheduler.schedule())
    scheduler.add(request("large", 16, arrival_s=1))
    scheduler.add(request("small", 1, arrival_s=2))
    assert shape(scheduler.schedule()) == {"running": 1}
    scheduler.finish("running", FinishReason.ABORT)
    assert list(shape(scheduler.schedule())) == ["large", "small"]


def test_the_latest_arrival_gives_way_and_completes_later() -> None:
    scheduler = build(4, max_num_seqs=4)
    first, second = request("first", 7, max_tokens=8), request("second", 7, max_tokens=8)
    scheduler.add(first)
    scheduler.add(second)
    while not first.is_finished:
        advance(scheduler, scheduler.schedule())
    assert scheduler.num_preemptions > 0
    assert not second.is_finished
    while scheduler.has_work():
        advance(scheduler, scheduler.schedule())
    assert len(first.output_token_ids) == len(second.output_token_ids) == 8
    assert scheduler.blocks.check([]) == []


def imported(scheduler: Scheduler, name: str, prompt_length: int, max_tokens: int = 8) -> Request:
    received = request(name, prompt_length, max_tokens)
    scheduler.blocks.grow(received, prompt_length)
    received.num_computed_tokens = prompt_length
    received.output_token_ids = [5]
    return received


def test_an_imported_request_is_scheduled_for_one_token() -> None:
    scheduler = build(8)
    received = imported(scheduler, "imported", 10)
    scheduler.add(received)
    (sequence,) = scheduler.schedule()
    assert sequence.num_tokens == 1
    assert sequence.samples
    assert received.num_computed_tokens == 10


def test_imports_that_wait_for_a_seat_cannot_block_a_preempted_request_for_ever() -> None:
    """All blocks are held by requests that wait: the one in front by none, so the last import gives its KV up."""
    scheduler = build(8, max_num_seqs=1)
    scheduler.add(request("running", 12, max_tokens=20))
    advance(scheduler, scheduler.schedule())
    for index in range(2):
        scheduler.add(imported(scheduler, f"import-{index}", 8, max_tokens=12))
    assert scheduler.blocks.pool.num_free == 1
    order = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan, "nothing can run, and nothing ever will"
        order.append(plan[0].request.request_id)
        advance(scheduler, plan)
    assert set(order) == {"running", "import-0", "import-1"}
    assert scheduler.blocks.check([]) == []


def test_a_prompt_starts_only_with_room_for_all_of_it() -> None:
    """Else it would run out half-way, give way to itself, and do the same work again and again."""
    scheduler = build(8, chunk_tokens=4)
    leased = scheduler.blocks.pool.allocate(4)
    scheduler.add(request("long", 20))
    assert scheduler.schedule() == []
    scheduler.blocks.pool.release(leased)
    assert shape(scheduler.schedule()) == {"long": 4}


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "message"),
    [(60, 41, "context length is 100 tokens, but the request needs 101"), (30, 12, "whole KV cache holds 40")],
)
def test_requests_that_can_never_fit_are_refused(prompt_length: int, max_tokens: int, message: str) -> None:
    scheduler = build(10)
    with pytest.raises(ContextLengthError, match=message):
        scheduler.add(request("huge", prompt_length, max_tokens))
    assert not scheduler.has_work()


def test_the_largest_request_that_fits_completes() -> None:
    scheduler = build(10)
    largest = request("largest", 30, max_tokens=11)
    scheduler.add(largest)
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan
        advance(scheduler, plan)
    assert len(largest.output_token_ids) == 11


def test_a_hand_off_needs_room_for_one_more_token_than_it_has() -> None:
    scheduler = build(4)
    leaving = request("leaving", 16, max_tokens=50)
    leaving.hands_off = True
    scheduler.add(leaving)
    resumed = request("resumed", 10, max_tokens=50)
    resumed.hands_off = True
    resumed.output_token_ids = [1] * 10
    with pytest.raises(ContextLengthError):
        scheduler.add(resumed)


def test_a_taken_id_is_refused_and_finishing_twice_does_nothing() -> None:
    scheduler = build(8)
    scheduler.add(request("same", 4))
    with pytest.raises(ValueError, match="same is in use"):
        scheduler.add(request("same", 4))
    assert scheduler.finish("same", FinishReason.ABORT) is not None
    assert scheduler.finish("same", FinishReason.ABORT) is None
    assert scheduler.finish("never seen", FinishReason.ABORT) is None


def test_drafts_stop_at_max_tokens_and_at_free_blocks() -> None:
    scheduler = build(2)
    scheduler.add(request("drafting", 4, max_tokens=5))
    advance(scheduler, scheduler.schedule())
    (sequence,) = scheduler.attach_drafts(scheduler.schedule(), {"drafting": (1, 2, 3, 4, 5, 6)})
    assert sequence.draft_token_ids == (1, 2, 3)
    scheduler.blocks.pool.allocate(scheduler.blocks.pool.num_free)
    sequence.request.params = SamplingParams(max_tokens=50)
    (sequence,) = scheduler.attach_drafts([ScheduledSequence(sequence.request, 1)], {"drafting": (1, 2, 3, 4, 5, 6)})
    assert sequence.draft_token_ids == ()
    assert scheduler.num_preemptions == 0

"""The scheduler: any mix of requests completes over its own KV, and the rules by which it chooses."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import ContextLengthError
from baton.core.queue_priority import NO_PRIORITY, QueuePriority
from baton.core.request import FinishReason, Request, RequestStatus, SamplingParams
from baton.core.step_costs import Pace
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.scheduling.ordering import ArrivalOrder, EarliestDeadlineFirst, OrderingPolicy
from baton.engine.scheduling.scheduler import Scheduler
from tests.scheduler_simulation import EOS, Arrival, Simulation, advance, shape

arrivals_of = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 15),
        prompt_length=st.integers(1, 20),
        max_tokens=st.integers(1, 12),
        imported=st.booleans(),
        hands_off=st.sampled_from([False, False, False, True]),
        abort_after=st.none() | st.integers(0, 20),
        queue_priority=st.just(NO_PRIORITY)
        | st.builds(QueuePriority, st.integers(0, 2), st.integers(0, 30).map(float), st.sampled_from([0.5, 3.0, 20.0])),
        tpot_target_s=st.sampled_from([0.0, 0.0, 0.001, 0.015, 1.0]),
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
    ordering=st.sampled_from([None, ArrivalOrder(), EarliestDeadlineFirst()]),
    paced=st.booleans(),
)
def test_every_request_completes_on_its_own_kv_without_leaks(
    seed: int,
    arrivals: list[Arrival],
    chunk_tokens: int,
    max_num_seqs: int,
    block_size: int,
    spare_tokens: int,
    prefix_caching: bool,
    drafts: bool,
    ordering: OrderingPolicy | None,
    paced: bool,
) -> None:
    longest = max(arrival.prompt_length + arrival.max_tokens - 1 for arrival in arrivals)
    blocks = BlockManager(-(-(longest + spare_tokens) // block_size), block_size, prefix_caching=prefix_caching)
    limits = SchedulerLimits(chunk_tokens, max_num_seqs, max_model_len=64)
    pace = Pace if paced else None
    simulation = Simulation(random.Random(seed), limits, blocks, drafts=drafts, ordering=ordering, pace=pace)

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


def test_a_long_prompt_gets_only_the_budget_left_by_decoding() -> None:
    scheduler = build(64, chunk_tokens=8)
    scheduler.add(request("short", 3))
    advance(scheduler, scheduler.schedule())
    scheduler.add(request("long", 20))
    chunks = []
    for _ in range(4):
        plan = scheduler.schedule()
        chunks.append(shape(plan))
        advance(scheduler, plan)
    assert chunks == [
        {"short": 1, "long": 7},
        {"short": 1, "long": 7},
        {"short": 1, "long": 6},
        {"short": 1, "long": 1},
    ]


def test_every_running_request_gets_a_token_in_every_step() -> None:
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


def test_a_small_request_does_not_overtake_a_large_one_waiting_for_blocks() -> None:
    scheduler = build(6)
    scheduler.add(request("running", 8))
    advance(scheduler, scheduler.schedule())
    scheduler.add(request("large", 16, arrival_s=1))
    scheduler.add(request("small", 1, arrival_s=2))
    assert shape(scheduler.schedule()) == {"running": 1}
    scheduler.finish("running", FinishReason.ABORT)
    assert list(shape(scheduler.schedule())) == ["large", "small"]


def test_the_latest_arrival_is_preempted_and_completes_later() -> None:
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


def test_imports_waiting_for_a_slot_cannot_starve_a_preempted_request() -> None:
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
    """Otherwise it would run out half-way, give way to itself, and do the same work again and again."""
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


def test_a_handoff_needs_room_for_one_extra_token() -> None:
    scheduler = build(4)
    leaving = request("leaving", 16, max_tokens=50)
    leaving.hands_off = True
    scheduler.add(leaving)
    resumed = request("resumed", 10, max_tokens=50)
    resumed.hands_off = True
    resumed.output_token_ids = [1] * 10
    with pytest.raises(ContextLengthError):
        scheduler.add(resumed)


def test_a_duplicate_id_is_refused_and_finishing_twice_does_nothing() -> None:
    scheduler = build(8)
    scheduler.add(request("same", 4))
    with pytest.raises(ValueError, match="same is in use"):
        scheduler.add(request("same", 4))
    assert scheduler.finish("same", FinishReason.ABORT) is not None
    assert scheduler.finish("same", FinishReason.ABORT) is None
    assert scheduler.finish("never seen", FinishReason.ABORT) is None


def test_drafts_are_limited_by_max_tokens_and_free_blocks() -> None:
    scheduler = build(2)
    scheduler.add(request("drafting", 4, max_tokens=5))
    advance(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert scheduler.make_draft_room(plan, 6) == {"drafting": 3}
    assert scheduler.make_draft_room(plan, 2) == {"drafting": 2}
    plan[0].request.params = SamplingParams(max_tokens=50)
    scheduler.blocks.pool.allocate(scheduler.blocks.pool.num_free)
    assert scheduler.make_draft_room(plan, 6) == {"drafting": 3}, "the slots of its own blocks"
    advance(scheduler, plan)
    assert scheduler.make_draft_room(scheduler.schedule(), 6) == {"drafting": 2}
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize(("num_blocks", "room"), [(6, 3), (7, 3), (8, 6)])
def test_drafts_leave_a_free_block_for_each_running_request(num_blocks: int, room: int) -> None:
    """Otherwise the one that grows next would take the blocks of another."""
    scheduler = build(num_blocks)
    for name in ("first", "second"):
        scheduler.add(request(name, 4, max_tokens=20))
    advance(scheduler, scheduler.schedule())
    plan = scheduler.schedule()  # two of the four slots of two blocks each are left to them
    given = scheduler.make_draft_room(plan, 6)
    assert given["second"] == room
    assert scheduler.blocks.pool.num_free >= 2

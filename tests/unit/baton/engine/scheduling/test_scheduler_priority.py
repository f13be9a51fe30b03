"""Sharing of a step: urgent prompts and long prompts in progress, and prompts and sequences with a TPOT target."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.chunk_budget import MIN_PROMPT_TOKENS, SchedulerLimits
from baton.core.drafts import ScheduledSequence
from baton.core.queue_priority import NO_PRIORITY, QueuePriority
from baton.core.request import Request, SamplingParams
from baton.core.step_costs import Pace, StepCosts
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.scheduling.ordering import EarliestDeadlineFirst
from baton.engine.scheduling.scheduler import Scheduler
from tests.fake_clock import FakeClock
from tests.scheduler_simulation import advance, shape

CPU = StepCosts(10.0, 0.5, 1e-4, 0.3, 5e-4, 0.5)
BATCH = QueuePriority(0, 300.0, 60.0)
INTERACTIVE = QueuePriority(2, 1.0, 2.0)


def build(
    *,
    num_blocks: int = 400,
    chunk_tokens: int = 64,
    max_num_seqs: int = 8,
    pace: Pace | None = None,
    clock: FakeClock | None = None,
) -> Scheduler:
    return Scheduler(
        SchedulerLimits(chunk_tokens, max_num_seqs, max_model_len=10_000),
        BlockManager(num_blocks, 16, prefix_caching=False),
        EarliestDeadlineFirst(),
        (lambda: pace) if pace else None,
        clock or FakeClock(0.0),
    )


def request(
    name: str,
    prompt_length: int,
    queue_priority: QueuePriority = NO_PRIORITY,
    max_tokens: int = 8,
    *,
    arrival_s: float = 0.0,
    target_s: float = 0.0,
    hands_off: bool = False,
) -> Request:
    return Request(
        name,
        [7] * prompt_length,
        SamplingParams(max_tokens=max_tokens),
        queue_priority=queue_priority,
        tpot_target_s=target_s,
        arrival_s=arrival_s,
        hands_off=hands_off,
    )


def imported(
    scheduler: Scheduler, name: str, prompt_length: int, queue_priority: QueuePriority = NO_PRIORITY
) -> Request:
    received = request(name, prompt_length, queue_priority)
    scheduler.blocks.grow(received, prompt_length + 1)
    received.num_computed_tokens = prompt_length
    received.output_token_ids = [5]
    return received


def step(scheduler: Scheduler) -> dict[str, int]:
    plan = scheduler.schedule()
    advance(scheduler, plan)
    return shape(plan)


def test_an_urgent_prompt_joins_the_next_step_of_a_long_one() -> None:
    scheduler = build()
    scheduler.add(request("long", 1000, BATCH))
    assert step(scheduler) == {"long": 64}
    scheduler.add(request("urgent", 20, INTERACTIVE, arrival_s=1.0))
    assert step(scheduler) == {"urgent": 20, "long": 44}
    assert step(scheduler) == {"urgent": 1, "long": 63}


def test_a_less_urgent_prompt_waits_for_the_long_one() -> None:
    scheduler = build()
    scheduler.add(request("long", 100, INTERACTIVE))
    assert step(scheduler) == {"long": 64}
    scheduler.add(request("patient", 20, BATCH, arrival_s=1.0))
    assert step(scheduler) == {"long": 36, "patient": 20}


@pytest.mark.parametrize("patience_s", [5.0, math.inf])
def test_a_started_prompt_completes_despite_more_urgent_ones(patience_s: float) -> None:
    """A share of every step is its own; lateness only makes it faster."""
    clock = FakeClock(0.0)
    scheduler = build(max_num_seqs=64, clock=clock)
    long = request("long", 64 + 20 * 8, QueuePriority(0, 5.0, patience_s))
    scheduler.add(long)
    assert step(scheduler) == {"long": 64}
    num_steps = 0
    while not long.output_token_ids:
        num_steps += 1
        clock.now_s += 1.0
        queue_priority = QueuePriority(1, clock.now_s + 1.0, 2.0)
        scheduler.add(request(f"urgent-{num_steps}", 64, queue_priority, 1, arrival_s=clock.now_s))
        assert step(scheduler)["long"] >= 8
    assert num_steps == 20 if patience_s == math.inf else num_steps < 20


def test_the_reserved_share_belongs_to_the_prompt_that_started_first() -> None:
    scheduler = build(max_num_seqs=64)
    for priority, name in enumerate(("first", "second", "third")):
        scheduler.add(request(name, 200, QueuePriority(priority, 9.0, 9.0), 1))
        plan = step(scheduler)
        assert plan == ({"first": 64} if name == "first" else {name: 56, "first": 8})


def test_an_urgent_prompt_without_room_does_not_block_others() -> None:
    scheduler = build(num_blocks=10)
    scheduler.add(request("long", 140, BATCH))
    assert step(scheduler) == {"long": 64}
    scheduler.add(request("urgent", 40, INTERACTIVE, arrival_s=1.0))
    assert step(scheduler) == {"long": 64}
    assert step(scheduler) == {"long": 12}


def test_the_least_urgent_request_is_preempted_regardless_of_arrival() -> None:
    scheduler = build(num_blocks=4)
    scheduler.add(request("batch", 31, BATCH, max_tokens=30))
    scheduler.add(request("interactive", 31, INTERACTIVE, max_tokens=30, arrival_s=1.0))
    while not scheduler.num_preemptions:
        step(scheduler)
    batch = scheduler.get("batch")
    assert batch is not None
    assert batch.status == "preempted"
    while scheduler.has_work():
        assert step(scheduler)


def test_imports_start_beside_a_long_prompt() -> None:
    """They decode, and no prompt stalls that; but they leave it a token, even when they could fill the step."""
    scheduler = build(chunk_tokens=8, max_num_seqs=8)
    scheduler.add(request("long", 100, INTERACTIVE))
    assert step(scheduler) == {"long": 8}
    for number in range(10):
        scheduler.add(imported(scheduler, f"import-{number}", 20, BATCH))
    plan = step(scheduler)
    assert plan["long"] == 1
    assert len(plan) == 8
    assert step(scheduler)["long"] == 1


def test_imports_do_not_block_a_more_urgent_prompt() -> None:
    scheduler = build(chunk_tokens=4, max_num_seqs=4)
    for number in range(6):
        scheduler.add(imported(scheduler, f"import-{number}", 20, BATCH))
    scheduler.add(request("urgent", 30, INTERACTIVE))
    assert step(scheduler)["urgent"] == 1


def decoding_with_a_long_prompt(target_s: float, pace: Pace, num_decoding: int = 1) -> Scheduler:
    scheduler = build(chunk_tokens=512, pace=pace)
    for number in range(num_decoding):
        scheduler.add(request(f"decoding-{number}", 3, max_tokens=400, target_s=target_s))
    step(scheduler)
    scheduler.add(request("long", 4000, arrival_s=1.0))
    return scheduler


def estimated_ms(plan: list[ScheduledSequence], costs: StepCosts) -> float:
    decoding = [s for s in plan if s.num_tokens == 1]
    context = sum(s.request.num_computed_tokens + 1 for s in decoding)
    chunks = [costs.chunk_ms(s.num_tokens, s.request.num_computed_tokens) for s in plan if s.num_tokens > 1]
    return costs.decode_ms(len(decoding), context) + sum(chunks)


@pytest.mark.parametrize("target_s", [0.04, 0.05, 0.1, 0.25])
def test_chunks_of_a_long_prompt_respect_the_tpot_of_decoding_requests(target_s: float) -> None:
    scheduler = decoding_with_a_long_prompt(target_s, Pace(CPU), num_decoding=3)
    long = scheduler.get("long")
    assert long is not None
    chunks = []
    while not long.output_token_ids:
        plan = scheduler.schedule()
        assert len(plan) == 4, "everyone who decodes is in every step"
        chunk = shape(plan)["long"]
        chunks.append(chunk)
        assert estimated_ms(plan, CPU) <= target_s * 1e3 or chunk <= MIN_PROMPT_TOKENS
        advance(scheduler, plan)
    assert sum(chunks) == 4000
    assert chunks[0] > chunks[-2], "what stands before a chunk makes it dearer"


def test_without_decoding_targets_a_prompt_gets_the_whole_budget() -> None:
    assert step(decoding_with_a_long_prompt(0.0, Pace(CPU))) == {"decoding-0": 1, "long": 511}
    scheduler = build(chunk_tokens=512, pace=Pace(CPU))
    scheduler.add(request("long", 4000, target_s=0.02))
    assert step(scheduler) == {"long": 512}


def test_an_impossible_target_leaves_prompts_the_minimum() -> None:
    assert step(decoding_with_a_long_prompt(0.001, Pace(CPU))) == {"decoding-0": 1, "long": MIN_PROMPT_TOKENS}


def test_prompts_on_a_prefill_worker_do_not_count_as_decoding() -> None:
    """A prompt whose last token is left hands off with it: its target is not that of this step."""
    scheduler = build(chunk_tokens=64, pace=Pace(CPU))
    scheduler.add(request("short", 65, target_s=0.001, hands_off=True))
    assert step(scheduler) == {"short": 64}
    scheduler.add(request("long", 4000, target_s=0.001, hands_off=True, arrival_s=1.0))
    assert step(scheduler) == {"short": 1, "long": 63}


def test_a_prompt_does_not_start_on_time_used_by_others() -> None:
    scheduler = decoding_with_a_long_prompt(0.05, Pace(CPU))
    scheduler.add(request("next", 50, arrival_s=2.0))
    plan = step(scheduler)
    assert set(plan) == {"decoding-0", "long"}
    waiting = scheduler.get("next")
    assert waiting is not None
    assert waiting.status == "waiting"
    assert waiting.block_ids == []


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 300), st.integers(0, 2), st.integers(0, 20), st.sampled_from([0.0, 0.02, 0.1])),
        min_size=1,
        max_size=20,
    ),
    chunk_tokens=st.sampled_from([4, 32, 256]),
)
def test_planned_requests_run_and_the_budget_holds(
    prompts: list[tuple[int, int, int, float]], chunk_tokens: int
) -> None:
    clock = FakeClock(0.0)
    scheduler = build(num_blocks=60, chunk_tokens=chunk_tokens, pace=Pace(CPU), clock=clock)
    for number, (length, priority, deadline_s, target_s) in enumerate(prompts):
        queue_priority = QueuePriority(priority, float(deadline_s), 3.0)
        scheduler.add(request(str(number), length, queue_priority, arrival_s=float(number), target_s=target_s))
    for _ in range(4000):
        clock.now_s += 0.1
        plan = scheduler.schedule()
        assert plan
        assert all(sequence.num_tokens > 0 for sequence in plan)
        assert sum(sequence.num_tokens for sequence in plan) <= chunk_tokens
        advance(scheduler, plan)
        if not scheduler.has_work():
            break
    assert not scheduler.has_work()
    assert scheduler.blocks.check([]) == []

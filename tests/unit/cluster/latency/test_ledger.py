"""What the router believes to be under way on each worker."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from baton.core.queue_priority import QueuePriority
from cluster.latency.cost_table import attention_pairs
from cluster.latency.estimates import EMPTY_QUEUE
from cluster.latency.ledger import WorkLedger


def test_prompts_enter_and_leave_the_queue() -> None:
    ledger = WorkLedger()
    ledger.begin_prompt("p", "a", 100, 0, now_s=10.0)
    ledger.begin_prompt("p", "b", 50, 16, now_s=10.5)
    queue = ledger.queue("p", now_s=11.0)
    assert (queue.tokens, queue.prompts) == (150, 2)
    assert queue.attention_pairs == attention_pairs(100, 0) + attention_pairs(50, 16)
    assert queue.elapsed_ms == 1000.0  # the first one has been at work since it came
    ledger.end_prompt("p", "a", now_s=12.0)
    assert ledger.queue("p", now_s=12.5).elapsed_ms == 500.0  # the second one since the first was done
    ledger.end_prompt("p", "b", now_s=13.0)
    ledger.end_prompt("p", "b", now_s=14.0)
    assert ledger.queue("p", now_s=15.0) == EMPTY_QUEUE
    assert not ledger.computes_prompts("p")


def test_a_cancelled_queued_prompt_does_not_restart_the_running_one() -> None:
    ledger = WorkLedger()
    for name, sent_s in (("at work", 10.0), ("behind", 10.5), ("last", 10.6)):
        ledger.begin_prompt("p", name, 100, 0, sent_s)
    ledger.end_prompt("p", "behind", now_s=12.0, is_computed=False)
    queue = ledger.queue("p", now_s=12.0)
    assert (queue.tokens, queue.elapsed_ms) == (200, 2000.0)
    ledger.end_prompt("p", "at work", now_s=12.5, is_computed=False)
    assert ledger.queue("p", now_s=13.0).elapsed_ms == 500.0  # the next one could begin


def test_contexts_are_current() -> None:
    ledger = WorkLedger()
    ledger.begin_decoding("d", "a", 23)
    ledger.begin_decoding("d", "b", 7)
    assert ledger.batch("d") == (2, 30)
    ledger.grow("d", "a", 1)
    ledger.grow("d", "unknown", 100)
    assert ledger.batch("d") == (2, 31)
    assert ledger.queue("d", now_s=0.0).decoding == 2
    ledger.end_decoding("d", "a")
    assert ledger.batch("d") == (1, 7)
    ledger.end_decoding("d", "b")
    ledger.end_decoding("d", "b")
    ledger.grow("d", "b", 1)
    assert ledger.batch("d") == (0, 0)


def test_the_strictest_target_of_decoding_sequences_is_used() -> None:
    ledger = WorkLedger()
    assert ledger.tpot_target_s("d") == inf
    for name, target_s in (("a", 0.1), ("b", 0.05), ("c", 0.05)):
        ledger.begin_decoding("d", name, 1, target_s)
    found = []
    for name in ("b", "c", "a"):
        found.append(ledger.tpot_target_s("d"))
        assert ledger.queue("d", now_s=0.0).tpot_target_s == found[-1]
        ledger.end_decoding("d", name)
    assert found == [0.05, 0.05, 0.1]
    assert ledger.tpot_target_s("d") == inf


BATCH = QueuePriority(priority=0, deadline_s=60.0, patience_s=60.0)
INTERACTIVE = QueuePriority(priority=2, deadline_s=1.0, patience_s=1.0)


def test_a_prompt_waits_only_for_prompts_served_first() -> None:
    ledger = WorkLedger()
    ledger.begin_prompt("p", "first", 2000, 0, now_s=0.0, queue_priority=BATCH)
    ledger.begin_prompt("p", "second", 300, 0, now_s=0.1, queue_priority=BATCH)
    ledger.begin_prompt("p", "third", 40, 0, now_s=0.2, queue_priority=INTERACTIVE)
    urgent = ledger.queue("p", 0.5, INTERACTIVE._replace(deadline_s=1.5), chunk_tokens=500)
    assert (urgent.tokens, urgent.prompts) == (500 + 40, 2)  # of the first one, the step under way
    assert urgent.attention_pairs == attention_pairs(2000, 0) // 4 + attention_pairs(40, 0)
    patient = ledger.queue("p", 0.5, BATCH._replace(deadline_s=60.5))
    assert (patient.tokens, patient.prompts) == (2340, 3)
    assert ledger.backlog_tokens("p") == 2340


def test_first_come_first_served_allows_no_overtaking() -> None:
    ledger = WorkLedger()
    ledger.begin_prompt("p", "first", 2000, 0, now_s=0.0, queue_priority=BATCH)
    ledger.begin_prompt("p", "second", 300, 0, now_s=0.1, queue_priority=INTERACTIVE)
    queue = ledger.queue("p", 0.5, queue_priority=None, chunk_tokens=500)
    assert (queue.tokens, queue.prompts, queue.elapsed_ms) == (2300, 2, 500.0)


def test_progress_of_a_delayed_prompt_does_not_shorten_the_wait_for_others() -> None:
    ledger = WorkLedger()
    ledger.begin_prompt("p", "long", 20_000, 0, now_s=0.0, queue_priority=QueuePriority(0, deadline_s=60.0))
    ledger.begin_prompt("p", "urgent", 1_000, 0, now_s=5.0, queue_priority=QueuePriority(2, deadline_s=6.0))
    between = ledger.queue("p", now_s=5.0, queue_priority=QueuePriority(2, deadline_s=7.0), chunk_tokens=512)
    assert (between.tokens, between.elapsed_ms) == (1_512, 0.0)
    behind = ledger.queue("p", now_s=5.0, queue_priority=QueuePriority(0, deadline_s=90.0), chunk_tokens=512)
    assert (behind.tokens, behind.elapsed_ms) == (21_000, 5_000.0)


def test_a_late_prompt_precedes_the_next_priority() -> None:
    ledger = WorkLedger()
    for name in ("at work", "late"):
        ledger.begin_prompt("p", name, 100, 0, now_s=0.0, queue_priority=BATCH)
    newcomer = QueuePriority(priority=1, deadline_s=200.0, patience_s=3.0)
    assert ledger.queue("p", 1.0, newcomer, chunk_tokens=10).tokens == 10
    assert ledger.queue("p", 199.0, newcomer, chunk_tokens=10).tokens == 200  # twice its patience over: priority 2


@given(
    st.lists(
        st.tuples(
            st.integers(1, 500),
            st.builds(QueuePriority, st.integers(0, 2), st.floats(0.0, 20.0), st.floats(0.1, 10.0)),
            st.booleans(),
        ),
        max_size=12,
    ),
    st.builds(QueuePriority, st.integers(0, 2), st.floats(0.0, 20.0), st.floats(0.1, 10.0)),
    st.floats(0.0, 30.0),
)
def test_the_incremental_count_matches_the_full_one(
    prompts: list[tuple[int, QueuePriority, bool]], queue_priority: QueuePriority, now_s: float
) -> None:
    ledger, left = WorkLedger(), []
    for number, (tokens, of_prompt, stays) in enumerate(prompts):
        ledger.begin_prompt("p", str(number), tokens, 0, 0.0, of_prompt)
        if stays:
            left.append((tokens, of_prompt))
    for number, (_, _, stays) in enumerate(prompts):
        if not stays:
            ledger.end_prompt("p", str(number), 0.0)
    ahead = [
        tokens
        for number, (tokens, of_prompt) in enumerate(left)
        if number == 0 or of_prompt.key(now_s) <= queue_priority.key(now_s)
    ]
    queue = ledger.queue("p", now_s, queue_priority, chunk_tokens=10_000)
    assert (queue.tokens, queue.prompts) == (sum(ahead), len(ahead))
    assert queue.attention_pairs == sum(attention_pairs(tokens, 0) for tokens in ahead)


def test_sequences_are_expected_to_grow_and_can_exceed_the_expectation():
    ledger = WorkLedger()
    assert ledger.final_tokens("d") == 0
    ledger.begin_decoding("d", "a", 100, expected_tokens=20)
    ledger.begin_decoding("d", "b", 50, expected_tokens=5)
    ledger.grow("d", "a", 20)
    assert (ledger.batch("d")[1], ledger.final_tokens("d")) == (170, 175)
    ledger.grow("d", "a", 7)
    ledger.grow("d", "b", 4)
    assert (ledger.batch("d")[1], ledger.final_tokens("d")) == (181, 182)
    ledger.end_decoding("d", "a")
    assert (ledger.batch("d")[1], ledger.final_tokens("d")) == (54, 55)
    ledger.end_decoding("d", "b")
    assert ledger.final_tokens("d") == 0

"""What the router believes to be under way on each worker."""

from __future__ import annotations

from cluster.latency.estimates import EMPTY_QUEUE, attention_pairs
from cluster.latency.ledger import WorkLedger


def test_prompts_queue_up_and_leave() -> None:
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


def test_contexts_are_those_of_the_moment() -> None:
    ledger = WorkLedger()
    tokens = [1, 2, 3]
    ledger.begin_decoding("d", "a", lambda: 20 + len(tokens))
    ledger.begin_decoding("d", "b", lambda: 7)
    assert ledger.batch("d") == (2, 30)
    tokens.append(4)
    assert ledger.batch("d") == (2, 31)
    assert ledger.queue("d", now_s=0.0).decoding == 2
    ledger.end_decoding("d", "a")
    ledger.end_decoding("d", "b")
    ledger.end_decoding("d", "b")
    assert ledger.batch("d") == (0, 0)
    assert not ledger.decodes("d")

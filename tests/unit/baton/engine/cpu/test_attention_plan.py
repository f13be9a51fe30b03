"""Work items cover every head of every new token once, and each thread uses only its own memory."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.batch.attention_groups import Span
from baton.engine.cpu.attention_plan import AttentionPlan
from baton.engine.cpu.attention_state import STATE_ROWS, state_floats, whole_rows
from baton.engine.cpu.key_slots import SPLIT_KEYS
from baton.engine.cpu.tables import Item

BLOCK_SIZE = 16
HEAD_DIM = 64


def span(start: int, num_tokens: int) -> Span:
    return Span(list(range(-(-(start + num_tokens) // BLOCK_SIZE))), start, num_tokens)


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 1500), st.sampled_from([1, 2, 9, 40, 300])), min_size=1, max_size=12),
    num_kv_heads=st.sampled_from([1, 2, 3, 5, 8]),
    share=st.sampled_from([1, 3, 8]),
    max_rows=st.sampled_from([64, 128]),
    num_threads=st.sampled_from([1, 2, 16]),
)
def test_every_head_of_every_token_is_computed_once(
    lengths: list[tuple[int, int]], num_kv_heads: int, share: int, max_rows: int, num_threads: int
) -> None:
    plan = AttentionPlan(num_kv_heads * share, num_kv_heads, HEAD_DIM, max_rows)
    tables = plan.tables([span(start, count) for start, count in lengths], num_threads)
    splits: Counter[tuple[int, int, int]] = Counter()
    states: list[tuple[int, int]] = []
    for item in tables.items.tolist():
        rows = item[Item.COUNT] * share
        assert item[Item.HEADS] == 1 or item[Item.HEADS] * rows <= max_rows
        assert item[Item.HEADS] == 1 or item[Item.HEADS] * int(whole_rows.py_func(rows)) <= STATE_ROWS
        size = 4 * item[Item.HEADS] * int(state_floats.py_func(rows, HEAD_DIM))
        if item[Item.STATE]:
            states.append((item[Item.STATE], item[Item.STATE] + size))
        for head in range(item[Item.HEAD], item[Item.HEAD] + item[Item.HEADS]):
            for query in range(item[Item.FIRST], item[Item.FIRST] + item[Item.COUNT]):
                splits[item[Item.SPAN], head, query] += 1
    joined = {(item[Item.SPAN], item[Item.HEAD], item[Item.FIRST]): item for item in tables.joins.tolist()}
    expected = {
        (number, head, query)
        for number, (_, count) in enumerate(lengths)
        for head in range(num_kv_heads)
        for query in range(count)
    }
    assert set(splits) == expected
    for item in tables.items.tolist():
        key = (item[Item.SPAN], item[Item.HEAD], item[Item.FIRST])
        wanted = joined[key][Item.SPLIT] if item[Item.STATE] else 1
        assert wanted == (-(-item[Item.END] // SPLIT_KEYS) if item[Item.STATE] else 1)
        assert splits[item[Item.SPAN], item[Item.HEAD], item[Item.FIRST]] == wanted
    states.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(states))


def test_few_rows_take_all_heads_and_a_prompt_takes_one_at_a_time() -> None:
    plan = AttentionPlan(9, 3, HEAD_DIM, 128)
    decoding = plan.tables([span(4000, 1) for _ in range(8)], 2).items
    assert decoding[:, Item.HEADS].tolist() == [3] * 8
    beside_a_prompt = plan.tables([span(0, 1000), span(4000, 1)], 2).items
    heads_of = [set(beside_a_prompt[beside_a_prompt[:, Item.SPAN] == number, Item.HEADS].tolist()) for number in (0, 1)]
    assert heads_of == [{1}, {3}]


def test_heads_are_split_if_threads_would_be_idle() -> None:
    plan = AttentionPlan(32, 8, HEAD_DIM, 128)
    items = plan.tables([span(200, 1)], 2).items
    assert sorted(items[:, Item.HEAD].tolist()) == [0, 2, 4, 6]
    assert sorted(plan.tables([span(200, 1)], 4).items[:, Item.HEAD].tolist()) == list(range(8))
    assert len(plan.tables([span(200, 1)], 1).items) == 1


def test_heads_are_grouped_when_context_splits_suffice() -> None:
    plan = AttentionPlan(9, 3, HEAD_DIM, 64)
    items = plan.tables([span(4 * SPLIT_KEYS - 1, 1)], 2).items
    assert items[:, Item.HEADS].tolist() == [3] * 4
    assert set(plan.tables([span(2 * SPLIT_KEYS, 1)], 2).items[:, Item.HEADS].tolist()) == {1}


def test_items_group_as_many_heads_as_memory_allows() -> None:
    heads = {}
    for num_heads, num_kv_heads, max_rows in ((32, 8, 64), (32, 32, 64), (64, 4, 64), (32, 8, 128)):
        plan = AttentionPlan(num_heads, num_kv_heads, HEAD_DIM, max_rows)
        items = plan.tables([span(4000, 1)], 1).items
        heads[num_heads // num_kv_heads, num_kv_heads, max_rows] = set(items[:, Item.HEADS].tolist())
    assert heads == {(4, 8, 64): {8}, (1, 32, 64): {8}, (16, 4, 64): {4}, (4, 8, 128): {8}}
    plan = AttentionPlan(32, 8, HEAD_DIM, 64)
    assert set(plan.tables([span(4000, 9)], 1).items[:, Item.HEADS].tolist()) == {1}
    assert set(plan.tables([span(4000, 5)], 1).items[:, Item.HEADS].tolist()) == {3, 2}

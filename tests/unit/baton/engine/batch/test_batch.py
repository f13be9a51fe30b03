"""From a plan to tensors: layout, groups, and the keys that each query may see."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.batch.batch import ForwardBatch

CPU = torch.device("cpu")


def sequence(
    name: str, num_known: int, num_new: int, blocks: list[int], drafts: tuple[int, ...] = ()
) -> ScheduledSequence:
    tokens = [100 * int(name) + position for position in range(num_known + num_new)]
    request = Request(name, tokens, SamplingParams(), num_computed_tokens=num_known, block_ids=blocks)
    return ScheduledSequence(request, num_new, Draft(drafts))


def build(plan: list[ScheduledSequence], block_size: int = 4) -> ForwardBatch:
    return ForwardBatch.build(plan, block_size, CPU, torch.float32)


def test_decodes_precede_verifications_and_chunks() -> None:
    chunk = sequence("3", 2, 4, [5, 6])
    chunk.request.prompt_token_ids.append(999)  # one more token to come: no logits yet
    batch = build(
        [chunk, sequence("1", 9, 1, [3, 1, 2]), sequence("4", 4, 1, [0, 7], (55, 56)), sequence("2", 7, 1, [8, 9])]
    )

    assert [s.request.request_id for s in batch.sequences] == ["1", "2", "4", "3"]
    assert batch.token_ids.tolist() == [109, 207, 404, 55, 56, 302, 303, 304, 305]
    assert batch.positions.tolist() == [9, 7, 4, 5, 6, 2, 3, 4, 5]
    assert batch.slots.tolist() == [9, 39, 28, 29, 30, 22, 23, 24, 25]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert [list(rows) for rows in batch.rows_of] == [[0], [1], [2, 3, 4], []]
    assert [(g.num_seqs, g.num_queries) for g in batch.groups] == [(2, 1), (1, 3), (1, 4)]
    assert batch.num_tokens == 9


def test_short_contexts_are_not_padded_to_the_longest() -> None:
    batch = build([sequence("1", 3, 1, [0]), sequence("2", 39, 1, list(range(1, 11)))])
    assert [[span.end for span in group.spans] for group in batch.groups] == [[40], [4]]


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 25), st.integers(1, 6)), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 12),
    block_size=st.integers(1, 5),
)
def test_every_query_sees_exactly_its_own_past_within_the_window(
    lengths: list[tuple[int, int]], window: int | None, block_size: int
) -> None:
    plan, next_block = [], 0
    for index, (num_known, num_new) in enumerate(lengths):
        count = -(-(num_known + num_new) // block_size)
        plan.append(sequence(str(index), num_known, num_new, list(range(next_block, next_block + count))[::-1]))
        next_block += count
    batch = build(plan, block_size)

    sequences = iter(batch.sequences)
    token = 0
    for group in batch.groups:
        assert group.token_start == token
        token = group.token_end
        view = group.view(window)
        assert group.view(window) is view
        slots = view.slots.view(group.num_seqs, view.num_keys)
        for row in range(group.num_seqs):
            request = next(sequences).request
            own = {
                request.block_ids[position // block_size] * block_size + position % block_size: position
                for position in range(request.num_computed_tokens + group.num_queries)
            }
            assert set(slots[row].tolist()) <= own.keys(), "a slot of another sequence is gathered"
            for query in range(group.num_queries):
                position = request.num_computed_tokens + query
                first = 0 if window is None else max(0, position - window + 1)
                shown = torch.ones(view.num_keys) if view.mask is None else view.mask[row, 0, query].exp()
                seen = [own[int(slot)] for slot, weight in zip(slots[row], shown, strict=True) if weight]
                assert seen == list(range(first, position + 1))
    assert token == batch.num_tokens
